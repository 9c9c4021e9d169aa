"""examples/deepspeed_gpt.py: plain DeepSpeed but for one call, and the same bits every time."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.chaos.trace import read_trace
from megatron_ft.cli.demo.final_state import compare_runs
from tests.programs.deepspeed_script_program import SCRIPT
from tests.support.warm_host import Request, WarmHost

STEPS = 4
CPU = {"device": "cpu"}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2-accumulating": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
    "zero2-fp32": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}},
    "zero3-offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
        "zero_force_ds_cpu_optimizer": False,
    },
    "pipeline": {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2},
}

FLAGS = {"pipeline": ("--pipeline", "2")}

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"),
]


@dataclass
class Trainings:
    """Runs of the script alone, each made once."""

    server: WarmHost
    folder: Path
    traces: dict[str, Path] = field(default_factory=dict)

    def of(self, variant: str) -> Path:
        """The trace of a run that saved a checkpoint at its end."""
        if variant not in self.traces:
            self.traces[variant] = self.run(variant, variant, "--save-interval", str(STEPS))
        return self.traces[variant]

    def run(self, variant: str, name: str, *flags: str) -> Path:
        """Train to the end in a folder called ``name``; the trace."""
        folder = self.folder / name
        folder.mkdir()
        path = folder / "ds_config.json"
        path.write_text(json.dumps(config(variant)))
        words = [str(folder / "trace"), "--deepspeed_config", str(path), "--hidden", "64"]
        words += ["--text", str(SCRIPT), "--sequence", "16", "--steps", str(STEPS)]
        words += ["--checkpoints", str(folder / "checkpoints"), *FLAGS.get(variant, ()), *flags]
        entry, logs = "tests.programs.deepspeed_script_program:train", str(folder / "logs")
        done = self.server.run(Request(entry, words, ranks(variant), logs, 120.0))
        assert not any(done.codes), done.story()
        return folder / "trace"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    """Runs whose ranks are forked from one process."""
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    server = WarmHost("tests.programs.deepspeed_script_program", environment)
    yield Trainings(server, tmp_path_factory.mktemp("trainings"))
    server.close()


def ranks(variant: str) -> int:
    return 4 if variant == "pipeline" else 2


def config(variant: str) -> dict[str, Any]:
    """A complete configuration; a variant adds to it and changes it."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 2},
        },
        **VARIANTS[variant],
    }


def test_the_script_has_no_name_of_ours_but_run_resilient() -> None:
    source = SCRIPT.read_text().lower()
    for name in ("deepspeed_ext", "inmem", "snapshot"):
        assert name not in source, name
    assert [line for line in source.splitlines() if "resilient" in line] == [
        "from megatron_ft import run_resilient",
        "    run_resilient(main)",
    ]
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    standard = {"__future__", "argparse", "collections", "pathlib", "random", "sysconfig"}
    assert imported == standard | {"deepspeed", "megatron_ft", "numpy", "torch", "typing"}


def _marked(variant: str) -> Any:
    # Stage and precision are covered by others; jobs of every pair resume in their own tests.
    in_ci = ("zero1", "zero3")
    marks = () if variant in in_ci else pytest.mark.all_layouts
    return pytest.param(variant, marks=marks)


@pytest.mark.parametrize("variant", [_marked(variant) for variant in VARIANTS])
def test_every_variant_trains(variant: str, trainings: Trainings) -> None:
    traces = [read_trace(trainings.of(variant), rank) for rank in range(ranks(variant))]
    losses = [line.loss_value for line in traces[0]]
    assert None not in losses and losses[-1] < losses[0]  # type: ignore[operator]
    accumulated = config(variant).get("gradient_accumulation_steps", 1)
    assert all(len(line.samples) == 2 * accumulated for line in traces[0])
    mine, others, *later = ({s for line in trace for s in line.samples} for trace in traces)
    assert not mine & others
    # The second stage of a pipeline reads the labels of the same samples.
    assert later == ([mine, others] if variant == "pipeline" else [])


@pytest.mark.parametrize(
    "variant", [pytest.param("zero3", marks=pytest.mark.all_layouts), "pipeline"]
)
@pytest.mark.all_layouts
def test_training_is_the_same_every_time(variant: str, trainings: Trainings) -> None:
    again = trainings.run(variant, f"{variant}-again")
    found = compare_runs(trainings.of(variant), again, ranks(variant), STEPS)
    assert found.identical, found.differences


def test_the_script_goes_on_from_a_checkpoint_of_its_own(trainings: Trainings) -> None:
    first = trainings.of("zero3")
    saved = str(first.parent / "checkpoints")
    flags = ("--checkpoints", saved, "--steps", str(STEPS + 2))
    second = trainings.run("zero3", "zero3-resumed", *flags)
    assert [line.iteration for line in read_trace(first, 0)] == [1, 2, 3, 4]
    assert [line.iteration for line in read_trace(second, 0)] == [5, 6]


def test_the_trace_shows_another_seed(trainings: Trainings) -> None:
    other = trainings.run("zero1", "zero1-other-seed", "--seed", "7")
    found = compare_runs(trainings.of("zero1"), other, ranks("zero1"), STEPS)
    assert any("iteration 1: loss" in text for text in found.differences)
    assert any("final state differs at /optimizer/main" in text for text in found.differences)
    assert any("final state differs at /random/torch" in text for text in found.differences)
