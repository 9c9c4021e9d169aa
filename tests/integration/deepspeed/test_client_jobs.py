"""Jobs of unedited scripts of other libraries that lose a trainer or a node, against the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

LIBRARIES = ("deepspeed", "transformers", "accelerate", "lightning")
if missing := [name for name in LIBRARIES if find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)

from megatron_ft.cli.demo.final_state import Comparison, compare_traces, differences, plain
from tests.programs.clients_program import OPTIMIZER
from tests.support.deepspeed_jobs import (
    ITERATIONS,
    Program,
    hit,
    kill_held_rank,
    lose_node_of_held_rank,
    train_alone,
)
from tests.support.jobs import ROOT, Job, log_of

pytestmark = [
    pytest.mark.usefixtures("warm_client_trainers"),
    pytest.mark.mpi,
    pytest.mark.deepspeed,
    pytest.mark.slow,
]
all_layouts = pytest.mark.all_layouts


@dataclass(frozen=True)
class TrainerProgram(Program):
    """The example of transformers.Trainer; its JSON has the one key and nothing else of ours."""

    example: Path = ROOT / "examples" / "hf_trainer.py"

    def flags(self, folder: Path, *, snapshots: bool) -> list[str]:
        path = folder / "ds_config.json"
        section = {"inmem_snapshot": {"enabled": True}} if snapshots else {}
        path.write_text(json.dumps({**TRAINER, **self.config, **section}))
        batches = ["--per_device_train_batch_size", "2", "--learning_rate", "0.01"]
        often = ["--max_steps", str(ITERATIONS), "--logging_steps", "3", "--save_steps", "6"]
        output = ["--deepspeed", str(path), "--output_dir", str(folder / "output")]
        quiet = ["--report_to", "none", "--disable_tqdm", "true"]
        return [*output, *batches, *often, *quiet, *self.script]


TRAINER = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 1000,
    "optimizer": OPTIMIZER,
}


def check_identical(program: Program, folder: Path, fault: Any, **shape: Any) -> Job:
    """Samples and losses of all ranks, and all of the last checkpoint, are equal bit by bit."""
    job = hit(program, folder / "job", fault, **shape)
    assert "no checkpoint was read" in log_of(job, 0), log_of(job, 0)[-3000:]
    train_alone(program, folder / "alone", job.nodes)
    found = Comparison()
    for rank in range(job.nodes):
        traces = (folder / name / "trace" for name in ("job", "alone"))
        compare_traces(found, rank, *traces, ITERATIONS)
    assert found.losses == ITERATIONS * job.nodes and not found.differences, found.differences
    ours, alone = (
        folder / name / "output" / f"checkpoint-{ITERATIONS}" for name in ("job", "alone")
    )
    names = {path.relative_to(alone) for path in alone.rglob("*.pt*")}
    assert len(names) >= 2 * job.nodes + 1
    different = [d for name in names for d in differences(of(ours / name), of(alone / name))]
    assert different == []
    assert (ours / "trainer_state.json").read_text() == (alone / "trainer_state.json").read_text()
    return job


def of(file: Path) -> Any:
    """The content of a checkpoint's file as plain values, without the JSON."""
    content = torch.load(file, weights_only=False)
    content.pop("ds_config", None)
    return plain(content)


FAULTS = {"kill": kill_held_rank, "node": lose_node_of_held_rank}


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (1, "node"),
        *(pytest.param(*cell, marks=all_layouts) for cell in ((1, "kill"), (2, "node"))),
        *(pytest.param(3, fault, marks=all_layouts) for fault in FAULTS),
    ],
)
def test_a_trainer_script_goes_on(stage: int, fault: str, tmp_path: Path) -> None:
    program = TrainerProgram({"zero_optimization": {"stage": stage}})
    shape: dict[str, Any] = {"nodes": 2}
    if fault == "node":
        shape |= {"spares": 1, "protect": "xor:2"}
    job = check_identical(program, tmp_path, FAULTS[fault], **shape)
    sources = [source for _, source in job.restores()]
    assert sources == ["parity" if fault == "node" else "own memory"], job.story()
