"""The demo: its pure parts, and short real runs of it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch  # noqa: E402

from megatron_ft.cli.chaos.trace import (  # noqa: E402
    GATE,
    TraceLine,
    TraceTail,
    TraceWriter,
    final_lines,
    final_path,
    read_trace,
    set_gate,
    trace_path,
)
from megatron_ft.cli.demo import command as cli  # noqa: E402
from megatron_ft.cli.demo import faults, report, reshape  # noqa: E402
from megatron_ft.cli.demo import final_state as compare  # noqa: E402
from megatron_ft.cli.demo.corruption import BrokenMemory, undone  # noqa: E402
from megatron_ft.cli.demo.faults import DemoFault, DemoStrike, DemoVictim, plan_faults  # noqa: E402
from megatron_ft.cli.demo.protected_run import PATIENCE_SECONDS, ProtectedRun  # noqa: E402
from megatron_ft.cli.demo.run import Demo, faults_of  # noqa: E402
from megatron_ft.cli.demo.settings import (  # noqa: E402
    MICRO_BATCH,
    DemoFolders,
    DemoLayout,
    DemoSettings,
    job_of,
    read_layout,  # noqa: E402
    reshaped_job,
)
from megatron_ft.core.errors import ConfigError, ProtectionError  # noqa: E402
from megatron_ft.launchers.virtual import default_root  # noqa: E402
from megatron_ft.supervisor.event_log import LoggedEvent, event_of  # noqa: E402
from megatron_ft.supervisor.job_state import STATUS  # noqa: E402


def _has_megatron() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.training") is not None


def real(test: Any) -> Any:
    """Mark a test that runs Megatron and MPI."""
    marks = (
        pytest.mark.mpi,
        pytest.mark.megatron,
        pytest.mark.slow,
        # A hang's limit, not an expectation: a start of Megatron takes seconds to a minute.
        pytest.mark.timeout(900),
        pytest.mark.skipif(not _has_megatron(), reason="needs megatron-core and its training"),
    )
    for mark in marks:
        test = mark(test)
    return test


SNAPSHOTS = ("--inmem-snapshot", "--inmem-snapshot-interval", "2")


def line(iteration: int, incarnation: int = 1, end: float | None = None) -> TraceLine:
    when = float(iteration) if end is None else end
    return TraceLine(incarnation, iteration, (1.0 / iteration).hex(), [iteration], 0.5, when)


def write_trace(folder: Path, lines: list[TraceLine], rank: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with trace_path(folder, rank).open("a") as file:
        for one in lines:
            values = {name: getattr(one, name) for name in one.__struct_fields__}
            file.write(json.dumps(values) + "\n")


# faults.py


@given(
    seed=st.integers(),
    iterations=st.integers(20, 500),
    nodes=st.integers(1, 16),
    per_node=st.integers(1, 8),
    data=st.data(),
)
def test_faults_fit_the_job_and_leave_room_between_them(
    seed: int, iterations: int, nodes: int, per_node: int, data: st.DataObject
) -> None:
    lose = data.draw(st.integers(1, nodes))
    faults = plan_faults(seed, iterations, nodes, per_node, lose)
    assert faults == plan_faults(seed, iterations, nodes, per_node, lose)
    assert [f.kind for f in faults] == list(DemoVictim)
    for fault in faults:
        assert len(fault.positions) == (lose if fault.kind is DemoVictim.NODE else 1)
        assert len(set(fault.positions)) == len(fault.positions)
        assert all(0 <= position < nodes for position in fault.positions)
        assert 0 <= fault.local_rank < per_node
        assert 0 < fault.fraction < 1
    moments = [0, *(fault.iteration for fault in faults), iterations]
    gaps = [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]
    assert min(gaps) >= 0.15 * iterations - 1  # both ends are rounded


def test_seeds_give_different_faults() -> None:
    plans = {plan_faults(seed, 40, 4) for seed in range(20)}
    assert len(plans) == 20
    assert {plan[1].positions for plan in plans} == {(0,), (1,), (2,), (3,)}


def test_more_nodes_than_there_are_cannot_be_lost() -> None:
    with pytest.raises(ValueError, match="5 of 4 nodes"):
        plan_faults(0, 40, 4, lose=5)


def test_a_job_that_must_refuse_gets_the_loss_alone() -> None:
    assert [f.kind for f in faults_of(DemoSettings(lose=2))] == [DemoVictim.NODE]
    assert len(faults_of(DemoSettings(lose=2, protect="rs:2+2"))) == 3


def told(nodes: list[str], back_to: int = 18) -> list[LoggedEvent]:
    """The events of a flip that was found at iteration 20."""
    return [
        seen("committed", 1.0, 1),
        seen("replicas_differ", 2.0, 1, iteration=20, nodes=nodes, tensors="w"),
        seen("spare", 3.0, 2)._replace(text="node4 takes the place of node1"),
        seen("restoring", 4.0, 2, iteration=back_to),
    ]


def test_a_broken_memory_is_undone_if_its_node_alone_is_blamed_and_nothing_of_it_is_left() -> None:
    broken = BrokenMemory("node1", 19)
    assert (
        "resumed from iteration 18; node4 takes the place of node1"
        in undone(broken, told(["node1"]))[-1]
    )
    assert not undone(broken, [])
    assert not undone(broken, told(["node1"])[:2])
    assert not undone(broken, told(["node2"]))
    assert not undone(broken, told(["node1", "node2"]))
    assert not undone(broken, told(["node1"], back_to=19))


def test_a_demo_breaks_the_memory_of_a_node_that_trains() -> None:
    settings = DemoSettings(corrupt=True)
    assert settings.broken is not None and not faults_of(settings)
    assert settings.broken == DemoSettings(corrupt=True).broken
    assert settings.broken.node in {"node0", "node1", "node2", "node3"}
    assert 24 <= settings.broken.iteration <= 40


# settings.py and the flags


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 2, "pp": 3}, "cannot be divided by 6, which --tp 2 and --pp 3"),
        ({"tp": 3}, "give 1, 2 or 4"),
        ({"pp": 0}, "--pp is 0; give a number >= 1"),
        ({"iterations": 5}, "at least 20"),
        ({"lose": 5}, "more than the 4 nodes"),
        ({"nodes": 0}, ">= 1"),
        ({"corrupt": True, "tp": 2, "pp": 2}, "two data-parallel ranks at least"),
        ({"corrupt": True, "spares": 0}, "and --spares"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(**changes)


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(flags)


def test_spares_follow_what_is_lost_unless_given() -> None:
    assert cli.settings_from(parse()).spares == 1
    assert cli.settings_from(parse("--lose", "3")).spares == 3
    assert cli.settings_from(parse("--lose", "3", "--spares", "1")).spares == 1


def test_outputs_that_cannot_be_written_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        cli.main(parse("--json", str(tmp_path / "absent" / "report.json")))


def test_both_runs_have_the_same_command_but_for_snapshots(tmp_path: Path) -> None:
    settings, folders = DemoSettings(tp=2), DemoFolders(tmp_path)
    ours = job_of(settings, folders, tmp_path / "text", "a").training
    oracle = job_of(settings, folders, tmp_path / "text", "b", snapshots=False).training
    assert ours == (*oracle[:-1], str(folders.protected), *SNAPSHOTS)
    assert oracle[-2:] == ("--trace-dir", str(folders.oracle))


def test_a_scheme_that_the_nodes_cannot_meet_is_refused_at_once() -> None:
    with pytest.raises(ProtectionError, match="needs 4 nodes"):
        cli.settings_from(parse("--nodes", "3"))


# --reshape


def reshaped(text: str, **changes: Any) -> DemoLayout:
    return read_layout(text, DemoSettings(**changes))


def test_sizes_that_are_not_named_stay() -> None:
    assert reshaped("tp=1,dp=3", tp=2) == DemoLayout(tp=1, pp=1, dp=3)
    assert reshaped("dp=1", tp=2, pp=1) == DemoLayout(tp=2, pp=1, dp=1)
    assert reshaped("tp=2, pp=2,dp=1", spares=2) == DemoLayout(tp=2, pp=2, dp=1)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("tp=1,dp=5", {"tp": 2}, "5 nodes, and 3 are left.*nearest dp that will do is 3"),
        (
            "dp=3",
            {"tp": 2, "ranks_per_node": 4},
            "6 ranks are not a multiple.*dp that will do is 4",
        ),
        ("dp=1", {}, "1 node has no other one.*nearest dp that will do is 2"),
        ("tp=4", {}, "16 nodes, and 3 are left.*no dp will do"),
        ("tp=3,dp=1", {}, "give tp 1, 2 or 4"),
        ("tp=2", {"tp": 2}, "begins with this layout"),
        ("tp=1,dp=3", {"tp": 2, "lose": 2}, "--lose 2 is more than rs:3\\+1 survives"),
        *((bad, {}, "give some of tp, pp and dp") for bad in ("", "dp", "dp=0", "ep=2", "dp=-1")),
        ("dp=2,dp=3", {}, "'dp=3' is not a size"),
    ],
)
def test_layouts_that_cannot_be_trained_are_refused_at_once(
    text: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        reshaped(text, **changes)


RESHAPED = ("--tp", "2", "--reshape", "tp=1,dp=3")


def test_both_layouts_train_one_model_on_one_batch(tmp_path: Path) -> None:
    settings, folders = cli.settings_from(parse(*RESHAPED)), DemoFolders(tmp_path)
    before = job_of(settings, folders, tmp_path / "text", "a")
    after = reshaped_job(settings, before, folders, tmp_path / "text")
    assert (after.spec.nodes, after.node_names) == (3, before.node_names)
    assert str(after.spec.scheme) == "rs:2+1"
    flags = [dict(itertools.pairwise(job.training)) for job in (before, after)]
    differing = {name for name in flags[0] | flags[1] if flags[0].get(name) != flags[1].get(name)}
    flag, padding = "--tensor-model-parallel-size", "--make-vocab-size-divisible-by"
    assert {name for name in differing if name.startswith("--")} == {flag, padding}
    assert {int(one[flag]) * int(one[padding]) for one in flags} == {64}
    batch = int(flags[0]["--global-batch-size"])
    assert batch % (MICRO_BATCH * 2) == batch % (MICRO_BATCH * 3) == 0
    assert flags[0]["--hidden-dropout"] == "0"


def compared_after(ours: list[TraceLine], oracle: list[TraceLine]) -> compare.Comparison:
    result = compare.Comparison(tensors=1, losses=1)
    reshape.compare_after(result, {0: ours}, {0: oracle}, range(2, 4))
    return result


def test_losses_after_a_reshape_may_differ_in_the_order_of_sums_alone() -> None:
    oracle = [line(2), line(3)]
    near, far = (msgspec.structs.replace(line(3), loss=(loss / 3).hex()) for loss in (1.001, 1.003))
    good = compared_after([line(2), near], oracle)
    assert good.identical and good.deviation == pytest.approx(1e-3)
    (said,) = compared_after([line(2), far], oracle).differences
    assert "iteration 3 after the reshape: loss" in said
    other = msgspec.structs.replace(near, samples=[4])
    (said,) = compared_after([line(2), other], oracle).differences
    assert "samples [4], without it [3]" in said
    missing = compared_after([line(2)], oracle).differences
    assert "samples []" in missing[0] and "loss nan" in missing[1]


def test_one_bit_of_a_tensor_gives_another_digest() -> None:
    tensor = torch.tensor([[0.0, 1.0]])
    other = [torch.tensor([[-0.0, 1.0]]), tensor.reshape(2), tensor.view(torch.int32)]
    digests = {reshape.digest_of(one) for one in (tensor, tensor.clone(), *other)}
    assert len(digests) == 4
    assert reshape.differing({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == [
        *"acd"
    ]


# trace.py


def test_the_last_line_of_an_iteration_counts(tmp_path: Path) -> None:
    write_trace(tmp_path, [line(1), line(2), line(2, incarnation=2), line(3, incarnation=2)])
    found = read_trace(tmp_path, 0)
    assert [(x.incarnation, x.iteration) for x in found] == [(1, 1), (1, 2), (2, 2), (2, 3)]
    assert final_lines(found)[2].incarnation == 2
    assert read_trace(tmp_path, 7) == []


def test_a_tail_gives_each_line_once_and_only_when_complete(tmp_path: Path) -> None:
    tail = TraceTail(trace_path(tmp_path, 0))
    assert tail.read() == []
    write_trace(tmp_path, [line(1)])
    assert [x.iteration for x in tail.read()] == [1]
    text = trace_path(tmp_path, 0).read_bytes()
    with trace_path(tmp_path, 0).open("ab", buffering=0) as file:
        file.write(text[:20])
        assert tail.read() == []
        file.write(text[20:])
        assert [x.iteration for x in tail.read()] == [1]


# compare.py


def write_run(
    folder: Path, losses: list[float], weight: torch.Tensor, incarnation: int = 1
) -> None:
    values = enumerate(losses, 1)
    lines = [TraceLine(incarnation, i, x.hex(), [i, i + 1], 0.1, float(i)) for i, x in values]
    write_trace(folder, lines)
    torch.save({"weights": {"w": weight}, "iteration": len(losses)}, final_path(folder, 0))


def test_equal_runs_are_identical_and_counted(tmp_path: Path) -> None:
    weight = torch.arange(6, dtype=torch.float32)
    for name in ("ours", "oracle"):
        write_run(tmp_path / name, [3.0, 2.0, 1.0], weight)
    result = compare.compare_runs(tmp_path / "ours", tmp_path / "oracle", 1, 3)
    assert result.identical
    assert (result.losses, result.samples, result.tensors, result.bytes) == (3, 6, 1, 24)
    assert result.values == 1


def test_the_last_occurrence_of_an_iteration_counts(tmp_path: Path) -> None:
    weight = torch.zeros(1)
    write_run(tmp_path / "oracle", [3.0, 2.0], weight)
    write_trace(tmp_path / "ours", [line(2, incarnation=1)])
    write_run(tmp_path / "ours", [3.0, 2.0], weight, incarnation=2)
    assert compare.compare_runs(tmp_path / "ours", tmp_path / "oracle", 1, 2).identical


@pytest.mark.parametrize(
    ("losses", "weight", "expected"),
    [
        ([3.0, 2.0 + 2**-50], torch.zeros(2), "rank 0 iteration 2: loss"),
        ([3.0, 2.0], torch.tensor([0.0, -0.0]), "final state differs at /weights/w"),
        ([3.0], torch.zeros(2), "rank 0 iteration 2: missing in our run"),
    ],
)
def test_one_bit_is_found(
    tmp_path: Path, losses: list[float], weight: torch.Tensor, expected: str
) -> None:
    write_run(tmp_path / "oracle", [3.0, 2.0], torch.zeros(2))
    write_run(tmp_path / "ours", losses, weight)
    result = compare.compare_runs(tmp_path / "ours", tmp_path / "oracle", 1, 2)
    assert not result.identical
    assert any(expected in text for text in result.differences)


def test_other_samples_and_a_missing_final_state_are_found(tmp_path: Path) -> None:
    write_trace(tmp_path / "ours", [line(1)])
    write_trace(tmp_path / "oracle", [TraceLine(1, 1, (1.0).hex(), [9], 0.1, 1.0)])
    result = compare.compare_runs(tmp_path / "ours", tmp_path / "oracle", 1, 1)
    assert any("samples [1], uninterrupted [9]" in text for text in result.differences)
    assert sum("no final state" in text for text in result.differences) == 2


def test_nothing_compared_is_not_identical() -> None:
    assert not compare.Comparison().identical


# Recoveries


def seen(kind: str, at: float, incarnation: int, **fields: Any) -> LoggedEvent:
    line = {"time": at, "at": at, "job": "j", "kind": kind, "text": kind}
    return event_of({**line, "incarnation": incarnation, **fields})


PARTS = {"detect": 0.0, "kill": 0.2, "decide": 0.3, "rebuild": 2.0, "start": 7.0, "iterate": 1.5}
STRIKE = DemoStrike(DemoFault(DemoVictim.NODE, 5, 0.5, (2,)), "node2", 1, 7, 100.0, 1100.0)
EVENTS = [
    seen("committed", 99.0, 1, iteration=4, level="protected"),
    seen("trainer_died", 100.5, 1),
    seen("restoring", 101.0, 2, iteration=4, source="parity", lost=["shard2"]),
    seen("trainers_started", 103.0, 2),
    seen("training", 110.0, 2),
    seen("recovered", 112.0, 2, total=11.0, starts={"in process": [0, 1, 3], "warm": [2]}, **PARTS),
]


def recovered(traces: faults.Traces, events: list[LoggedEvent] = EVENTS) -> Any:
    # Monotonic time is wall time less 1000 here.
    return faults.recoveries([STRIKE], events, traces)


def test_an_outcome_adds_up() -> None:
    lost = [line(i, incarnation=1, end=1000.0 + i) for i in range(1, 7)]
    again = [line(i, incarnation=2, end=1106.0 + i) for i in range(5, 9)]
    slower = [line(i, incarnation=2, end=1106.5 + i) for i in range(5, 9)]
    found = recovered({0: lost + again, 1: lost + slower})[0]
    assert (found.source, found.restored_iteration, found.iterations_lost) == ("parity", 4, 2)
    assert found.parts == PARTS and found.starts["warm"] == [2]
    assert found.seconds_to_first_iteration == found.detect + sum(found.parts.values()) == 11.5


def test_a_recovery_that_the_next_fault_cut_short_has_no_parts() -> None:
    traces = {0: [line(6, incarnation=1), line(5, incarnation=2, end=1111.0)]}
    found = recovered(traces, EVENTS[:-1])[0]
    assert found.parts == found.starts == {} and found.seconds_to_first_iteration == 11.0


def test_a_fault_is_noticed_when_its_incarnation_ends_not_when_the_node_is_named() -> None:
    """The parts count from the end of the incarnation, which is reported later."""
    ended = seen("incarnation_ended", 100.4, 1, ago=0.3)
    later = [ended, seen("node_lost", 102.0, 1), *EVENTS[2:]]
    assert recovered({0: [line(6)]}, later)[0].detect == pytest.approx(0.1)


def test_a_fault_that_ended_the_job_was_noticed_but_not_restored() -> None:
    found = recovered({0: [line(6)]}, EVENTS[:2])[0]
    assert found.detect == 0.5
    assert found.source is None
    assert found.seconds_to_first_iteration is None


# report.py

FOUND = report.DemoReshape(
    iteration=2,
    tensors=5,
    identical_tensors=5,
    different=(),
    bytes_needed=100,
    bytes_decoded=30,
    storage_bytes_read=0,
    seconds=0.25,
)


def a_report(**changes: Any) -> report.DemoReport:
    traces = {0: [line(6, incarnation=1), line(5, incarnation=2, end=1111.0)]}
    made = report.DemoReport(DemoSettings(), recoveries=recovered(traces))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def shown(made: report.DemoReport, capsys: pytest.CaptureFixture[str]) -> str:
    report.show(made)
    return capsys.readouterr().out


def test_a_good_end_says_identical(capsys: pytest.CaptureFixture[str]) -> None:
    good = compare.Comparison(losses=4, samples=8, tensors=5, values=6, bytes=7)
    made = a_report(comparison=good, exit_code=0)
    text = shown(made, capsys)
    assert "IDENTICAL" in text
    row = r"^node2 +7 at 50% +0.50 s +parity +4 +2 +3 in process, 1 warm +11.0 s$"
    assert re.search(row, text, re.M), text
    assert json.loads(json.dumps(made.as_json()))["identical"] is True


def test_a_reshape_has_its_line_and_its_object(capsys: pytest.CaptureFixture[str]) -> None:
    good = compare.Comparison(losses=4, samples=8, tensors=5, deviation=1e-4)
    settings = cli.settings_from(parse(*RESHAPED))
    made = a_report(comparison=good, exit_code=0, reshape=FOUND, settings=settings)
    text = shown(made, capsys)
    assert "RESHAPED in 0.25 s in memory, tp=2,pp=1,dp=2 to tp=1,pp=1,dp=3" in text
    assert "all 5 tensors" in text and "0 read from disk" in text
    keys = "identical_tensors bytes_needed bytes_decoded storage_bytes_read seconds".split()
    found = made.as_json()["reshape"]
    assert [found[key] for key in keys] == [5, 100, 30, 0, 0.25]
    made.reshape = replace(FOUND, storage_bytes_read=None)
    assert "storage_bytes_read" not in made.as_json()["reshape"]
    assert "reshape" not in a_report().as_json()


def test_a_difference_is_never_called_identical(capsys: pytest.CaptureFixture[str]) -> None:
    bad = compare.Comparison(losses=4, tensors=5, differences=["rank 0 iteration 2: loss"])
    made = a_report(comparison=bad, exit_code=1, reason="the two runs differ")
    text = shown(made, capsys)
    assert "IDENTICAL" not in text
    assert "DIFFERENT" in text
    assert "rank 0 iteration 2: loss" in text
    assert made.as_json()["identical"] is False


def test_a_refusal_says_why_and_that_it_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    made = a_report(exit_code=10, reason="the stripe lost 2 shards", settings=DemoSettings(lose=2))
    text = shown(made, capsys)
    assert "exit code 10" in text
    assert "the stripe lost 2 shards" in text
    assert "right answer" in text
    assert made.as_json()["identical"] is False


def test_a_fault_waits_for_a_protected_snapshot_that_is_not_old(tmp_path: Path) -> None:
    """After a restart captures are skipped until the encoders are up."""
    folders = DemoFolders(tmp_path)
    job = job_of(DemoSettings(), folders, tmp_path / "text", f"due-{os.getpid()}")
    run = ProtectedRun(job, folders.protected, (), 80, print)
    fault = DemoFault(DemoVictim.NODE, 30, 0.5, (0,))
    run._incarnation, run._lines = 2, [line(60, incarnation=2)]
    try:
        for iteration, due in ((22, False), (58, True)):
            run._take(seen("committed", 1.0, 2, iteration=iteration, level="protected"))
            assert run._is_due(fault) is due
    finally:
        run.follower.cluster.destroy()


def test_training_waits_for_its_faults_however_slow_encoders_are(tmp_path: Path) -> None:
    folders, faults = DemoFolders(tmp_path), (DemoFault(DemoVictim.NODE, 30, 0.5, (0,)),)
    job = job_of(DemoSettings(), folders, tmp_path / "text", f"gate-{os.getpid()}")
    run, gate = ProtectedRun(job, folders.protected, faults, 80, print), folders.protected / GATE
    told = {"summary": {"encoders": "down", "incarnation": 1}}
    job.notes.mkdir(parents=True)

    def at(iteration: int, encoders: str, ago: float = 0.0) -> str:
        told["summary"]["encoders"] = encoders
        (job.notes / STATUS).write_text(json.dumps(told))
        run._incarnation, run._lines = 1, [line(iteration, end=time.time() - ago)]
        run._set_gate()
        return gate.read_text()

    try:
        assert at(29, "down") == "79" and at(30, "down") == "30" and at(31, "up") == "79"
        assert at(31, "down") == "30" and at(31, "down", PATIENCE_SECONDS + 1) == "79"
        assert not run._is_due(faults[0])
        assert at(79, "up", PATIENCE_SECONDS + 1) and run._is_due(faults[0])
        run._waiting.clear()
        run._set_gate()
        assert not gate.exists()
    finally:
        run.follower.cluster.destroy()


def test_a_rank_waits_at_the_gate_until_it_is_moved(tmp_path: Path) -> None:
    set_gate(tmp_path, 2)
    writer, tail = TraceWriter(tmp_path, 0), TraceTail(trace_path(tmp_path, 0))
    train = threading.Thread(target=lambda: [writer.record(n, None, 0.0) for n in (1, 2, 3)])
    train.start()
    time.sleep(0.1)
    assert [one.iteration for one in tail.read()] == [1, 2] and train.is_alive()
    set_gate(tmp_path, None)
    train.join(10)
    assert [one.iteration for one in tail.read()] == [3]


def test_the_command_has_the_defaults_of_the_settings() -> None:
    assert cli.settings_from(parse()) == DemoSettings()


# Real runs.

SMALL = ("--nodes", "2", "--protect", "xor:2", "--iterations", "40")


def run_demo(folder: Path, *flags: str) -> tuple[int, dict[str, Any], Demo]:
    """Two ranks, a spare and one fault: the loss of a node.

    It strikes early.  On a busy machine it takes seconds to find a node's processes, and
    iterations are short: training must not have ended by then.
    """
    demo = Demo(cli.settings_from(parse(*SMALL, *flags)), DemoFolders(folder))
    node = next(fault for fault in demo.faults if fault.kind is DemoVictim.NODE)
    demo.faults = (replace(node, iteration=5),)
    made = demo.run()
    return made.exit_code, made.as_json(), demo


@real
def test_a_node_is_lost_and_the_end_is_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """With --all also the end of the command that the demo prints."""
    code, made, demo = run_demo(tmp_path / "demo", "--iterations", "20")
    (printed,) = re.findall(r"(?<=outside:\n)(?:.*\\\n)+.*", capsys.readouterr().out)
    assert made["identical"], made["comparison"]["differences"]
    assert code == 0
    assert [event["source"] for event in made["events"]] == ["parity"]
    (event,) = made["events"]
    assert sorted(rank for ranks in event["starts"].values() for rank in ranks) == [0, 1]
    sum_of_parts = event["detect"] + sum(event["parts"].values())
    assert sum_of_parts == pytest.approx(event["seconds_to_first_iteration"], abs=0.3)
    assert made["comparison"]["losses"] == 2 * 20
    assert not demo.folders.state.exists()
    assert "<h2>Recoveries in parts</h2>" in demo.folders.report.read_text()
    if pytestconfig.getoption("all_layouts"):
        for path in demo.folders.protected.iterdir():
            path.unlink()
        done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "training finished" in done.stdout
        again = compare.compare_runs(demo.folders.protected, demo.folders.oracle, 2, 20)
        assert again.identical, again.differences
    # The comparison of these very files can fail.
    path = final_path(demo.folders.oracle, 1)
    state = torch.load(path, weights_only=True)
    name = next(iter(state["weights"]))
    state["weights"][name].view(-1).view(torch.uint8)[0] ^= 1
    torch.save(state, path)
    again = compare.compare_runs(demo.folders.protected, demo.folders.oracle, 2, 20)
    assert again.differences == [f"rank 1: final state differs at /weights/{name}"]


@pytest.mark.all_layouts
@real
def test_a_flipped_weight_is_found_blamed_and_undone(tmp_path: Path) -> None:
    settings = cli.settings_from(parse("--corrupt", "--iterations", "40"))
    assert settings.broken is not None
    made = Demo(settings, DemoFolders(tmp_path / "demo")).run()
    assert made.exit_code == 0 and made.identical, (made.reason, made.comparison)
    found = " ".join(made.as_json()["corruption"])
    assert f"On {settings.broken.node} alone chunk0.embedding" in found
    assert f"node4 takes the place of {settings.broken.node}" in found


@pytest.mark.all_layouts
@real
def test_losing_more_than_parity_covers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    flags = ("--lose", "2", "--json", str(target))
    assert cli.main(parse(*SMALL, *flags)) == 10
    made = json.loads(target.read_text())
    assert made["identical"] is False
    assert made["exit_code"] == 10
    assert "lost" in made["reason"] or "no survivor" in made["reason"]
    assert "exit code 10" in capsys.readouterr().out


@pytest.mark.all_layouts
@real
def test_a_job_continues_in_another_layout_from_memory(tmp_path: Path) -> None:
    """The same run is called different if one bit of one tensor is."""
    flags = (*RESHAPED, "--iterations", "20")
    demo = Demo(cli.settings_from(parse(*flags)), DemoFolders(tmp_path / "demo"))
    demo.faults = ()
    made = demo.run()
    assert made.exit_code == 0, (made.reason, made.comparison)
    found, (event,) = made.as_json()["reshape"], made.as_json()["events"]
    assert found["tensors"] == found["identical_tensors"] > 60
    assert found["bytes_decoded"] > 0 and found["storage_bytes_read"] == 0
    assert event["victim"].endswith("then tp=1,pp=1,dp=3")
    assert (event["source"], event["restored_iteration"]) == ("parity", found["iteration"])
    assert event["seconds_to_first_iteration"] > 0
    assert made.reshape is not None
    spoilt = replace(made.reshape, different=["a.weight"])
    again = reshape.compare_reshaped_runs(demo.settings, demo.folders, spoilt)
    assert again.differences == ["a.weight: not the same after the reshape"]


def _wait_for(process: subprocess.Popen[str], words: str, seconds: float = 300.0) -> None:
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    read = ""
    while words not in read:
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        assert ready, f"no {words!r} within {seconds} s; it said:\n{read}"
        part = os.read(process.stdout.fileno(), 4096).decode()
        assert part, f"it ended without {words!r}; it said:\n{read}"
        read += part


@pytest.mark.all_layouts
@real
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    before = set(default_root().glob("demo-*"))
    command = [sys.executable, "-m", "megatron_ft.cli.main", "demo", *SMALL]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Shells start background commands with SIGINT ignored, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        _wait_for(process, "iteration   5/40")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    finally:
        process.kill()
        process.wait()
    assert set(default_root().glob("demo-*")) <= before
    assert list(tmp_path.glob("megatron-ft-demo-*")) == []
