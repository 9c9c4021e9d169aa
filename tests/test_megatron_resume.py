"""Megatron's real loop: a run resumed from a snapshot is the uninterrupted run, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import megatron_program  # noqa: E402  # needs torch

from megatron_ft.testing import demo_model, final_state, stdlib_corpus  # noqa: E402


def _has_megatron() -> bool:
    # Looked up, not imported: the test process itself has no stand-in for a device.
    return find_spec("megatron") is not None and find_spec("megatron.training") is not None


pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(not _has_megatron(), reason="needs megatron-core with megatron.training"),
]

ITERATIONS, SNAPSHOT_AT = 8, 4
TIMEOUT_SECONDS = 200


@dataclass(frozen=True)
class Layout:
    """A parallel layout; what differs from demo_model's defaults."""

    name: str
    processes: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    use_arena: bool = False


LAYOUTS = [
    Layout("dp2-distributed-bf16"),
    Layout("tp2-distributed-bf16", options={"tp": 2}),
    Layout("pp2-distributed-bf16", options={"pp": 2}),
    Layout("dp2-replicated-bf16", options={"distributed_optimizer": False}),
    Layout(
        "dp2-distributed-overlapped-bf16-arena",
        flags=("--overlap-grad-reduce", "--overlap-param-gather"),
        use_arena=True,
    ),
    Layout(
        "dp2-replicated-bf16-arena",
        options={"distributed_optimizer": False},
        flags=("--inmem-replicated-split-bytes", "1024"),
        use_arena=True,
    ),
    Layout("dp2-distributed-fp16", options={"precision": "fp16"}),
    Layout("dp2-replicated-fp32", options={"distributed_optimizer": False, "precision": "fp32"}),
    Layout(
        "ep2-experts-bf16",
        flags=(
            *("--num-experts", "4", "--expert-model-parallel-size", "2"),
            *("--moe-token-dispatcher-type", "allgather", "--moe-router-topk", "2"),
            *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        ),
    ),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stdlib_corpus.prepare(tmp_path_factory.mktemp("corpus"), max_bytes=200_000)


def train(layout: Layout, corpus: Path, trace: Path, *flags: str, **variables: str) -> str:
    """Run all ranks to the end; their common output.  If one fails, the launcher ends all."""
    arguments = demo_model.demo_arguments(
        **{"iterations": ITERATIONS, "data_path": corpus, "hidden": 64, "sequence": 32}
        | layout.options
    )
    environment = {**os.environ, **demo_model.ENVIRONMENT, **variables, "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    program = [str(layout.processes), megatron_program.__file__, *arguments, *layout.flags]
    done = subprocess.run(
        [*launcher, *program, *flags, "--trace-dir", str(trace)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def lines(trace: Path, rank: int) -> dict[int, tuple[str | None, list[int]]]:
    """Loss and sample indices by iteration."""
    texts = (trace / f"rank{rank}.jsonl").read_text().splitlines()
    found = [json.loads(text) for text in texts]
    return {line["iteration"]: (line["loss"], line["samples"]) for line in found}


def final(trace: Path, rank: int) -> Any:
    return torch.load(trace / f"final-rank{rank}.pt", weights_only=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_resumed_run_is_bit_identical(layout: Layout, corpus: Path, tmp_path: Path) -> None:
    snapshot, arena = str(tmp_path / "snapshot"), "1" if layout.use_arena else ""
    train(
        layout,
        corpus,
        tmp_path / "whole",
        "--inmem-snapshot",
        TEST_SAVE_AT=str(SNAPSHOT_AT),
        TEST_SAVE_TO=snapshot,
        TEST_USE_ARENA=arena,
    )
    output = train(
        layout,
        corpus,
        tmp_path / "resumed",
        "--inmem-snapshot",
        TEST_LOAD_FROM=snapshot,
        TEST_SAVE_TO=str(tmp_path / "after"),
        TEST_USE_ARENA=arena,
    )
    assert f"restored iteration {SNAPSHOT_AT} from the in-memory snapshot" in output
    for rank in range(layout.processes):
        whole, resumed = lines(tmp_path / "whole", rank), lines(tmp_path / "resumed", rank)
        assert list(whole) == list(range(1, ITERATIONS + 1))
        assert resumed == {i: line for i, line in whole.items() if i > SNAPSHOT_AT}
        states = [final(tmp_path / run, rank) for run in ("whole", "resumed")]
        assert final_state.differences(*states) == []


def test_snapshots_do_not_change_training(corpus: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[0]
    train(layout, corpus, tmp_path / "plain")
    train(
        layout,
        corpus,
        tmp_path / "with",
        "--inmem-snapshot",
        TEST_SAVE_AT="4",
        TEST_SAVE_TO=str(tmp_path / "snapshot"),
    )
    for rank in range(layout.processes):
        assert lines(tmp_path / "plain", rank) == lines(tmp_path / "with", rank)
        states = [final(tmp_path / run, rank) for run in ("plain", "with")]
        assert final_state.differences(*states) == []
