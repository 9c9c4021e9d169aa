"""Snapshots in Megatron's logs: what is written where, how often, and never at training's cost."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import defaultdict
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_ft.cli.demo import demo_model, stdlib_corpus  # noqa: E402
from megatron_ft.megatron import run  # noqa: E402
from megatron_ft.megatron.run import SnapshotLog, text_line  # noqa: E402
from megatron_ft.trainer.stats import (  # noqa: E402
    CaptureStats,
    LastCapture,
    figures,  # noqa: E402
)
from tests.programs import megatron_logging_program  # noqa: E402
from tests.support.jobs import Job  # noqa: E402

ITERATIONS, TEXT_INTERVAL, SCALAR_INTERVAL = 20, 5, 2


def args_of(rank: int = 1, **values: int) -> SimpleNamespace:
    given = {"train_iters": 100, "log_interval": 10, "tensorboard_log_interval": 5}
    return SimpleNamespace(rank=rank, world_size=2, **{**given, **values})


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, float]]]:
    kept: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(run, "_write", lambda values, step: kept.append((step, values)))
    return kept


def test_before_the_first_capture_only_counts_are_known() -> None:
    names = [figure.name for figure in figures(CaptureStats(due_skipped=2, skipped=5))]
    assert names == ["taken", "skipped", "missed", "abandoned"]
    assert {f.name: f.value for f in figures(CaptureStats(due_skipped=2))}["skipped"] == 2


def test_the_line_has_megatrons_form() -> None:
    stats = CaptureStats(taken=9, missed=1, protected_iteration=16, committed_iteration=18)
    stats.last = LastCapture(18, 0.0123, 0.0012, 3 << 20)
    line = text_line(20, 100, figures(stats), datetime(2026, 1, 2, 3, 4, 5, 6))
    assert line == (
        " [2026-01-02 03:04:05.000006] in-memory snapshots at iteration       20/     100 |"
        " captured iteration:       18 | capture time (ms): 12.3 | stall (ms): 1.2 |"
        " size (MiB): 3.0 | protected iteration:       16 | committed iteration:       18 |"
        " taken: 9 | skipped: 0 | missed: 1 | abandoned: 0 |"
    )


def test_both_intervals_are_megatrons(
    written: list[tuple[int, dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    stats = CaptureStats()
    log = SnapshotLog(args_of(), stats)
    for iteration in range(1, 31):
        stats.taken = iteration
        log.end_iteration(iteration)
    assert [step for step, _ in written] == [5, 10, 15, 20, 25, 30]
    assert [values["inmem-snapshot/taken"] for _, values in written] == [5, 10, 15, 20, 25, 30]
    assert [line.split("taken: ")[1][:2] for line in capsys.readouterr().out.splitlines()] == [
        "10",
        "20",
        "30",
    ]


def test_a_line_that_would_say_nothing_new_is_left_out(
    written: list[tuple[int, dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = SnapshotLog(args_of(log_interval=1), CaptureStats())
    for iteration in range(1, 11):
        log.end_iteration(iteration)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_only_the_last_rank_logs(
    written: list[tuple[int, dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    SnapshotLog(args_of(rank=0, log_interval=1), CaptureStats()).end_iteration(10)
    assert not written and not capsys.readouterr().out


def test_a_writer_that_fails_is_not_asked_again_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def fail(values: Any, step: int) -> None:
        asked.append(step)
        raise OSError("the disk is full")

    monkeypatch.setattr(run, "_write", fail)
    log = SnapshotLog(args_of(), CaptureStats())
    with caplog.at_level(logging.WARNING):
        for iteration in range(1, 31):
            log.end_iteration(iteration)
    assert asked == [5]
    assert "snapshots are no longer logged" in caplog.text


def training_command(corpus: Path, folder: Path) -> tuple[str, ...]:
    flags = demo_model.demo_arguments(
        iterations=ITERATIONS, data_path=corpus, hidden=64, sequence=32
    )
    logged: dict[str, object] = {
        "--log-interval": TEXT_INTERVAL,
        "--tensorboard-log-interval": SCALAR_INTERVAL,
        "--tensorboard-dir": folder / "tensorboard",
        "--wandb-project": "test",
        "--wandb-exp-name": "test",
        "--wandb-save-dir": folder / "wandb",
    }
    words = [str(word) for pair in logged.items() for word in pair]
    program = (sys.executable, megatron_logging_program.__file__)
    # Later flags win: demo_arguments has a log interval of its own.
    return (*program, *flags, *words, "--inmem-snapshot", "--inmem-snapshot-interval", "2")


@pytest.mark.mpi
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.all_layouts
@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron-core with megatron.training",
)
def test_megatrons_own_writers_get_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**demo_model.ENVIRONMENT, "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(megatron_logging_program.RECORDS, str(tmp_path))
    corpus = stdlib_corpus.prepare(tmp_path / "corpus", max_bytes=200_000)
    job = Job(tmp_path, nodes=2, command=training_command(corpus, tmp_path))
    try:
        job.run()
    finally:
        job.cluster.destroy()
    check_text((tmp_path / "logs" / "rank1.log").read_text())
    assert "in-memory snapshots at" not in (tmp_path / "logs" / "rank0.log").read_text()
    for writer in ("tensorboard", "wandb"):
        check_scalars(tmp_path / f"{writer}.jsonl")
    # Iterations are measured but for those with an evaluation or a checkpoint.
    seen = [one.report for one in job.supervisor.coordinator.pulses.all()]
    assert len(seen) == 2 and all(report.typical > 0 for report in seen)


def check_text(output: str) -> None:
    lines = [line for line in output.splitlines() if "in-memory snapshots at" in line]
    assert [int(re.findall(r"iteration +(\d+)/", line)[0]) for line in lines] == [5, 10, 15, 20]
    last = [int(re.findall(rf"{word} iteration: +(\d+)", lines[-1])[0]) for word in _SAFETY]
    assert 20 >= last[0] >= last[1] >= last[2] > 0
    plain = [line for line in output.splitlines() if "| consumed samples:" in line]
    assert len(plain) >= 2, "Megatron's own lines are still there"


_SAFETY = ("captured", "committed", "protected")


def check_scalars(path: Path) -> None:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        rank, name, value, step = json.loads(line)
        assert rank == "1", "Megatron's writers are on the last rank"
        found[name][step] = value
    due = list(range(SCALAR_INTERVAL, ITERATIONS + 1, SCALAR_INTERVAL))
    assert list(found["inmem-snapshot/taken"]) == due == list(found["learning-rate"])
    taken = list(found["inmem-snapshot/taken"].values())
    assert taken == sorted(taken) and taken[-1] >= 1
    assert list(found["inmem-snapshot/abandoned"]) == due
    for name in ("capture-ms", "stall-ms", "mib", "protected-iteration", "committed-iteration"):
        assert found[f"inmem-snapshot/{name}"][ITERATIONS] > 0
