"""Damage to one node's arenas and files under a whole job: one lost shard at most.

CI runs a few kinds; --all-layouts runs every kind, and each after a full stop as well.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.smp.__main__ import FOLDER_CHECK_SECONDS
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.renewal import MOST_INTERVALS
from tests.support import damage as kinds
from tests.support.disk_jobs import of_kind, pause, signal_trainers, wait_for, wait_until
from tests.support.jobs import Job, Uninterrupted, difference
from tests.support.tmpfs import mount_tmpfs

pytestmark = [pytest.mark.usefixtures("warm_trainers")]

ITERATIONS = 40
VICTIM = "n1"
Damage = Callable[[Path], None]
"""Strikes at a node's folder."""


def arena_of(folder: Path) -> Path:
    (path,) = folder.glob("*.arena")
    return path


def on_arena(damage: Damage) -> Damage:
    return lambda folder: damage(arena_of(folder))


def data(path: Path) -> None:
    with Arena.open(path) as arena:
        for slot in range(arena.geometry.slot_count):
            arena.data(slot, writable=True)[:64] ^= 255


def parity(path: Path) -> None:
    with Arena.open(path) as arena:
        for slot in range(arena.geometry.slot_count):
            arena.parity(slot, writable=True)[:64] ^= 255


def one_copy_later(path: Path) -> None:
    """A copy of the arena is written in place several snapshots later."""
    copy = path.read_bytes()
    with Arena.open(path) as arena:
        before = arena.progress()
        deadline = time.monotonic() + 60
        while arena.progress() < before + 12:
            assert time.monotonic() < deadline, "training does not advance"
            time.sleep(0.02)
    with open(path, "r+b") as file:
        file.write(copy)


def socket_removed(folder: Path) -> None:
    (folder / "smp.sock").unlink()


def folder_removed(folder: Path) -> None:
    shutil.rmtree(folder)


def writers_damaged(folder: Path) -> None:
    (folder / "writers.json").write_bytes(b"\0nonsense")


def node_damaged(folder: Path) -> None:
    (folder / "node.json").write_bytes(b"{")


LIVE: dict[str, Damage] = {
    "data": on_arena(data),
    "parity": on_arena(parity),
    "both copies of the arena header": on_arena(kinds.arena_header),
    "both copies of slot headers": on_arena(kinds.slot_headers),
    "stale copy in place": on_arena(one_copy_later),
    "magic": on_arena(kinds.magic),
    "extended": on_arena(kinds.extended),
    "cut": on_arena(kinds.cut),
    "mode 644": on_arena(kinds.open_to_others),
    "mode 000": on_arena(kinds.closed),
    "folder in its place": on_arena(kinds.folder),
    "link in its place": on_arena(kinds.link),
    "a second name": on_arena(kinds.second_name),
    "node folder removed": folder_removed,
    "socket removed": socket_removed,
}
STOPPED: dict[str, Damage] = {
    **{name: damage for name, damage in LIVE.items() if name != "stale copy in place"},
    "writers.json": writers_damaged,
    "node.json": node_damaged,
}
IN_CI = {"both copies of the arena header"}
STOPPED_IN_CI = {"writers.json"}


def cases(kinds_: dict[str, Damage], in_ci: set[str]) -> list[object]:
    return [
        pytest.param(damage, id=name, marks=[] if name in in_ci else pytest.mark.all_layouts)
        for name, damage in kinds_.items()
    ]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, nodes=3, protect="xor:3", iterations=ITERATIONS, transport="tcp")
    yield job
    job.cluster.destroy()


def kill_trainers(job: Job) -> None:
    for pid in job.trainers():
        os.kill(pid, signal.SIGKILL)


def require_restored(job: Job, expected: object) -> None:
    assert difference(job.result(), expected) == "", job.story()  # type: ignore[arg-type]
    assert "node_lost" not in job.kinds(), job.story()
    assert job.restores(), job.story()


@pytest.mark.parametrize("damage", cases(LIVE, IN_CI))
def test_damage_under_a_living_smp_costs_one_shard_at_most(
    job: Job, damage: Damage, uninterrupted: Uninterrupted
) -> None:
    def strike(job: Job) -> None:
        damage(job.cluster.node_dir(VICTIM))
        kill_trainers(job)

    job.run((8, strike))
    require_restored(job, uninterrupted(3, ITERATIONS))


@pytest.mark.parametrize("damage", cases(STOPPED, STOPPED_IN_CI))
def test_damage_after_a_full_stop_costs_one_shard_at_most(
    job: Job, damage: Damage, uninterrupted: Uninterrupted
) -> None:
    def stop(job: Job) -> None:
        job.interrupt()

    with pytest.raises(asyncio.CancelledError):
        job.run((8, stop))
    for node in job.cluster.nodes():
        place = job.supervisor.members.smps._handles[node]
        place.kill()
        place.join(30)
    damage(job.cluster.node_dir(VICTIM))
    job.run()
    require_restored(job, uninterrupted(3, ITERATIONS))
    if damage in (writers_damaged, node_damaged):
        told = next(event.text for event in job.events if event.kind == "damaged")
        assert ".json is damaged" in told and "clean" not in told, told


def test_a_socket_that_was_removed_comes_back_while_training_goes_on(
    job: Job, uninterrupted: Uninterrupted
) -> None:
    def strike(job: Job) -> None:
        path = job.cluster.node_dir(VICTIM) / "smp.sock"
        path.unlink()
        deadline = time.monotonic() + 30 * FOLDER_CHECK_SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, "the socket does not come back"
            time.sleep(0.02)

    job.run((8, strike))
    assert difference(job.result(), uninterrupted(3, ITERATIONS)) == "", job.story()
    assert not job.restores() and "smp_restarted" not in job.kinds(), job.story()


QUICK = Timing(heartbeat=0.25, lease=2.0, node_timeout=2.5)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(folder_removed, id="folder"),
        pytest.param(on_arena(Path.unlink), id="arena", marks=pytest.mark.all_layouts),
    ],
)
def test_trainers_start_again_where_an_arena_has_no_file_any_more(
    job: Job, damage: Damage, uninterrupted: Uninterrupted
) -> None:
    """Nobody kills them: what they write could not be restored."""
    job.timing = QUICK

    def strike(job: Job) -> None:
        damage(job.cluster.node_dir(VICTIM))
        signal_trainers(job, signal.SIGSTOP)

    job.run((8, strike))
    require_restored(job, uninterrupted(3, ITERATIONS))
    (ended,) = of_kind(job, "incarnation_ended")
    assert f"{VICTIM}: " in ended.text and "was removed" in ended.text, job.story()
    assert of_kind(job, "rebuilt") and of_kind(job, "committed")[-1].monotonic > ended.monotonic, (
        job.story()
    )


def test_training_goes_on_where_memory_does_not_serve_without_the_removed_arenas(
    job: Job, uninterrupted: Uninterrupted
) -> None:
    """Two nodes lose their files one after the other: the decision waits for the second."""
    job.timing = QUICK

    def strike(job: Job) -> None:
        signal_trainers(job, signal.SIGSTOP)
        folder_removed(job.cluster.node_dir(VICTIM))
        answers = job.supervisor.fleet.answers
        wait_until(job, lambda: bool(answers[VICTIM].missing), "for the loss of an arena")
        folder_removed(job.cluster.node_dir("n2"))
        wait_for(job, "damaged", 2)
        signal_trainers(job, signal.SIGCONT)

    job.run((8, strike))
    assert difference(job.result(), uninterrupted(3, ITERATIONS)) == "", job.story()
    assert not job.restores() and "trainer_died" not in job.kinds(), job.story()
    for event, node in zip(of_kind(job, "damaged"), (VICTIM, "n2"), strict=True):
        assert event.fields["node"] == node and "memory serves nothing" in event.text, job.story()


def test_training_goes_on_where_a_restart_would_repeat_too_much(
    job: Job, uninterrupted: Uninterrupted
) -> None:
    job.timing, job.iterations = QUICK, 2 * ITERATIONS

    def strike(job: Job) -> None:
        pause(job, True)
        fleet, pump = job.supervisor.fleet, job.supervisor.pump
        committed = of_kind(job, "committed")[-1].fields["iteration"]
        enough = committed + MOST_INTERVALS * pump.cycle.schedule.interval
        wait_until(job, lambda: max(fleet.progress.values()) > enough, "for iterations")
        signal_trainers(job, signal.SIGSTOP)
        arena_of(job.cluster.node_dir(VICTIM)).unlink()
        wait_for(job, "damaged")
        signal_trainers(job, signal.SIGCONT)

    job.run((8, strike))
    assert difference(job.result(), uninterrupted(3, 2 * ITERATIONS)) == "", job.story()
    assert not job.restores() and "trainer_died" not in job.kinds(), job.story()
    assert "serves only iteration" in of_kind(job, "damaged")[0].text, job.story()


def test_all_smps_killed_at_once_are_replaced_together(
    job: Job, uninterrupted: Uninterrupted
) -> None:
    """One after the other, the last would be silent for longer than a node may be."""
    job.timing = QUICK

    def strike(job: Job) -> None:
        for node in job.cluster.nodes():
            job.supervisor.members.smps._handles[node].kill()

    job.run((8, strike))
    assert difference(job.result(), uninterrupted(3, ITERATIONS)) == "", job.story()
    assert "node_lost" not in job.kinds() and "silent" not in job.kinds(), job.story()


@pytest.mark.parametrize(
    "victim", ["trainer", pytest.param("SMP and trainer", marks=pytest.mark.all_layouts)]
)
def test_a_full_tmpfs_keeps_no_trainer_from_its_memory(
    tmp_path: Path, victim: str, uninterrupted: Uninterrupted
) -> None:
    # A short path: there are sockets below.
    place = tempfile.mkdtemp(prefix="mft-")
    for small in mount_tmpfs(Path(place, "small"), "size=48m,mode=0700"):
        root = small / "root"
        root.mkdir(mode=0o700)
        job = Job(tmp_path, 3, protect="xor:3", iterations=ITERATIONS, transport="tcp", root=root)

        def strike(job: Job, small: Path = small) -> None:
            with pytest.raises(OSError, match="space"), open(small / "filler", "wb", 0) as filler:
                while True:
                    filler.write(bytes(4096))
            if victim == "SMP and trainer":
                job.supervisor.members.smps._handles[VICTIM].kill()
            os.kill(job.trainers()[1], signal.SIGKILL)

        try:
            job.run((8, strike))
        finally:
            job.cluster.destroy()
        require_restored(job, uninterrupted(3, ITERATIONS))
