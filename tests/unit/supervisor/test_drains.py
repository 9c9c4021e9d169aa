"""When a snapshot is drained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.checkpoint.disk_format import mount_point
from megatron_ft.config import SnapshotConfig
from megatron_ft.supervisor.drain_times import SAFETY_FACTOR, Urgency, gives_way, is_due
from megatron_ft.supervisor.drains import noted_places
from megatron_ft.supervisor.emergency_drain import doubled_up
from megatron_ft.supervisor.job_state import DiskPlaces
from megatron_ft.supervisor.spec import JobSpec


@given(st.integers(0, 10), st.lists(st.tuples(st.integers(1, 7), st.booleans()), max_size=40))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_drains_are_an_interval_apart_and_none_is_forgotten(
    interval: int, commits: list[tuple[int, bool]]
) -> None:
    """Commits arrive while the disk is busy or not; whenever it is not, nothing due waits."""
    committed = last = 0
    for step, busy in commits:
        committed += step
        if not busy and is_due(last, committed, interval):
            assert committed - last >= interval > 0
            last = committed
        assert busy or not interval or committed - last < interval
    assert interval or last == 0


def test_what_is_urgent_waits_for_no_interval_and_is_drained_once() -> None:
    assert is_due(10, 11, 500, urgent=True)
    assert not is_due(10, 10, 500, urgent=True) and not is_due(10, 11, 0)
    assert is_due(10, 11, 0, urgent=True), "by age alone"
    assert is_due(100, 40, 500) and not is_due(100, 100, 500), "training has gone back"


def test_the_mount_point_of_a_drain_folder_is_looked_up_once(tmp_path: Path) -> None:
    """At a restart the file system may be unmounted, and the folder lies on the disk below."""
    given = SnapshotConfig(drain_dir=tmp_path / "disk", drain_interval=1)
    spec = JobSpec(name="j", command=("x",), nodes=4, settings=given, log_dir=tmp_path)
    first = noted_places(DiskPlaces(), spec)
    assert first.drain_mount == str(mount_point(tmp_path))
    mounted = DiskPlaces(first.drain_dir, str(tmp_path))
    assert noted_places(mounted, spec).drain_mount == str(tmp_path)
    other = replace(spec, settings=replace(given, drain_dir=tmp_path / "other"))
    assert noted_places(mounted, other).drain_mount == first.drain_mount
    assert noted_places(mounted, replace(spec, settings=SnapshotConfig())) == DiskPlaces()


def test_the_last_spare_is_a_reason() -> None:
    urgency = Urgency()
    told = [urgency.poll(0.0, spares_gone=gone, slowest=0.0) for gone in (False, True, True)]
    assert [bool(text) for text in told] == [False, True, False]
    assert "no spare is left" in told[1]


def test_a_job_with_a_time_limit_drains_once_early_to_know_how_long_that_takes() -> None:
    urgency = Urgency(ends_at=1000.0)
    assert "how long one takes" in urgency.poll(1.0, spares_gone=False, slowest=0.0)
    assert not urgency.poll(2.0, spares_gone=False, slowest=5.0)


@given(st.floats(1, 1e4), st.floats(0, 100), st.floats(0.1, 100), st.floats(0.1, 5))
@settings(derandomize=True, deadline=None)
def test_the_drain_before_the_time_limit_has_time_to_end(
    limit: float, margin: float, slowest: float, tick: float
) -> None:
    urgency = Urgency(ends_at=limit, margin=margin)
    now, told = 0.0, False
    late = limit - margin - SAFETY_FACTOR * slowest
    while not told and now < limit:
        now += tick
        told = "time ends" in urgency.poll(now, spares_gone=False, slowest=slowest)
        assert told == (now >= late)
        assert not told or now <= max(late, 0.0) + tick
    assert told or limit <= 0


@given(*[st.floats(0, 1e4)] * 3)
@settings(derandomize=True, deadline=None)
def test_a_drain_gives_way_only_to_one_that_can_be_written_instead(
    running: float, slowest: float, left: float
) -> None:
    if gives_way(running, slowest, left):
        assert 0 < slowest <= left < max(0.0, slowest - running) + slowest
    assert not gives_way(running, 0.0, left), "nobody knows how long one takes"
    assert not gives_way(slowest, slowest, left), "it ends just now"
    assert gives_way(0.0, 10.0, 15.0) and not gives_way(6.0, 10.0, 15.0)


@given(st.lists(st.booleans(), min_size=1, max_size=9).filter(any))
def test_lost_nodes_are_shared_out_among_those_that_are_left(there: list[bool]) -> None:
    active = [f"n{i}" for i in range(len(there))]
    left = {node for node, alive in zip(active, there, strict=True) if alive}
    doubled = doubled_up(active, left)
    loads = [doubled.count(node) for node in left]
    assert set(doubled) == left and max(loads) - min(loads) <= 1
    assert all(new == old for new, old in zip(doubled, active, strict=True) if old in left)
