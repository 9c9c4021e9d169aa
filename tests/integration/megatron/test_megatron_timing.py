"""Snapshots beside the rest of Megatron's loop: exits, checkpoints, evaluation, the hot path."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None or find_spec("megatron.training") is None:
    pytest.skip("needs megatron-core with megatron.training", allow_module_level=True)

from dataclasses import replace

from tests.support.late_capture import LOAD_FROM, SAVE_AT
from tests.support.megatron_layouts import DISTRIBUTED, Layout, words
from tests.support.megatron_runs import SNAPSHOT_AT, SNAPSHOTS, Runs

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

EVALUATION = words("--split 80,20,0 --eval-iters 2")
DP2 = Layout("dp2", 2, DISTRIBUTED)


def with_flags(text: str) -> Layout:
    return replace(DP2, flags=(*DISTRIBUTED, *words(text)))


def evaluations(output: str) -> list[str]:
    """Losses of evaluations, as Megatron prints them."""
    return re.findall(r"validation loss at iteration (\d+.*?)\|? *$", output, re.MULTILINE)


def trained(runs: Runs, name: str) -> list[int]:
    return sorted(runs.lines(name, 0))


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        ("--split 80,20,0 --eval-iters 2 --eval-interval 2", 8),
        ("--exit-interval 5", 5),
        ("--exit-duration-in-mins=-1", 1),
        ("--rerun-mode disabled", 8),
        ("--manual-gc --manual-gc-interval 2", 8),
        ("--global-batch-size 8 --micro-batch-size 1", 8),
        ("--empty-unused-memory-level 1", 8),
    ],
)
def test_the_loop_goes_as_without_snapshots(runs: Runs, flags: str, last: int) -> None:
    layout = with_flags(flags)
    plain = runs.train(layout, "plain")
    taken = runs.train(layout, "with", SNAPSHOTS, **{SAVE_AT: min(last, SNAPSHOT_AT)})
    assert trained(runs, "plain") == trained(runs, "with") == list(range(1, last + 1))
    runs.require_same(layout, "plain", "with", until=last)
    assert evaluations(plain.output(1)) == evaluations(taken.output(1))
    assert bool(evaluations(plain.output(1))) == ("--eval-interval" in flags)


def test_checkpoints_are_written_as_without_snapshots(runs: Runs) -> None:
    flags = words("--save-interval 4 --exit-interval 6 --ckpt-format torch_dist")
    for name, more in (("plain", ()), ("with", (SNAPSHOTS,))):
        disk = str(runs.folder / f"{name}-disk")
        runs.train(DP2, name, *more, *flags, "--save", disk, **{SAVE_AT: SNAPSHOT_AT})
    folders = [runs.folder / f"{name}-disk" for name in ("plain", "with")]
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in folders]
    assert files[0] == files[1] and any("iter_0000006" in file for file in files[0])
    for name in ("plain", "with"):  # what was written is read back and trained on
        runs.train(DP2, f"{name}-on", "--load", str(runs.folder / f"{name}-disk"))
    runs.require_same(DP2, "plain-on", "with-on", after=6)


def test_a_signal_ends_a_run_as_without_snapshots(runs: Runs) -> None:
    """SIGTERM in iteration 3: the iteration ends, is captured, and the run exits."""
    layout = replace(
        with_flags("--exit-signal-handler"),
        plugins=("tests.programs.megatron_plugins:terminate_in_iteration_3",),
    )
    runs.train(layout, "plain")
    runs.train(layout, "with", SNAPSHOTS, **{SAVE_AT: 3})
    assert trained(runs, "plain") == trained(runs, "with") == [1, 2, 3]
    runs.require_same(layout, "plain", "with", until=3)
    runs.train(DP2, "on", SNAPSHOTS, **{LOAD_FROM: runs.folder / "with" / "arenas"})
    assert trained(runs, "on") == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("interval", [4, 5])
def test_a_restore_across_an_evaluation_is_exact(runs: Runs, interval: int) -> None:
    """Evaluation just before the snapshot of iteration 4, or just after it."""
    layout = with_flags(f"--split 80,20,0 --eval-iters 2 --eval-interval {interval}")
    whole = runs.train(layout, "whole", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    arenas = runs.folder / "whole" / "arenas"
    after = runs.train(layout, "after", SNAPSHOTS, **{LOAD_FROM: arenas})
    runs.require_same(layout, "whole", "after", after=SNAPSHOT_AT)
    expected = [e for e in evaluations(whole.output(1)) if int(e.split()[0]) > SNAPSHOT_AT]
    assert expected and evaluations(after.output(1)) == expected


def test_a_snapshot_calls_no_collective_and_builds_no_state_dict(runs: Runs) -> None:
    layout = replace(DP2, plugins=("tests.programs.megatron_plugins:count_calls",))
    runs.train(layout, "counted", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    for rank in range(layout.ranks):
        counts = json.loads(Path(runs.folder, "counted", f"calls{rank}.json").read_text())
        assert counts.pop("snapshots") == 1 and counts.pop("iterations") == 8
        assert counts.pop("collectives outside") > 0  # the counter does count
        assert counts == {"inside": []}
