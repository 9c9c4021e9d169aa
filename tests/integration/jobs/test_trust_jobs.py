"""Memory that goes bad under a running job: found by the scrub, and never restored."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.cli import status
from megatron_ft.cli.main import main
from megatron_ft.supervisor.job_state import read_record
from tests.programs.faulty_example import DECLINES, POISON
from tests.support.disk_jobs import pause, signal_trainers
from tests.support.jobs import FAULTY, ROOT, WAIT_SECONDS, Job, Result, difference

REASON = "it is unknown whether the script follows"
pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS = 110


def shard(index: int) -> str:
    return f"pp0-tp0-dp{index}-ep0"


def newest(arena: Arena) -> int:
    """The slot of the newest snapshot that is committed there."""
    committed = {
        slot.snapshot: number
        for number in range(arena.geometry.slot_count)
        if (slot := arena.slot(number)).state == SlotState.COMMITTED and slot.snapshot is not None
    }
    return committed[max(committed)]


def shown(job: Job, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `megatron-ft status` shows, once its supervisor has written this."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        view = status.collect(job.cluster.job_dir.parent, job.name)[job.name]
        if condition(view):
            return view
        assert time.monotonic() < deadline, view["summary"]
        time.sleep(0.05)


def view_of(job: Job) -> list[int]:
    """Iterations of the snapshots that are committed on all nodes."""
    nodes = status.collect(job.cluster.job_dir.parent, job.name)[job.name]["nodes"].values()
    held = [
        {slot["iteration"] for slot in shard["slots"] if slot["state"] == "COMMITTED"}
        for node in nodes
        for shard in node["shards"].values()
    ]
    return sorted(set.intersection(*held))


def wait_until(condition: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, job.story()
        time.sleep(0.02)


def wait_for(job: Job, kind: str, times: int = 1) -> None:
    """Until an event of this kind was told so often."""
    wait_until(lambda: job.kinds().count(kind) >= times, job)


def test_damage_in_memory_is_found_and_rebuilt_from_parity_by_the_next_start(
    tmp_path: Path, two: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three slots: two snapshots are there, whatever is being captured when the user rewinds.
    # No scrub until all is damaged: one that passes meanwhile would report a part of it.
    job = Job(tmp_path, nodes=2, protect="xor:2", iterations=ITERATIONS, scrub_percent=0.0, slots=3)
    view: dict[str, Any] = {}
    rewound: list[int] = []
    told: list[str] = []

    def found_in_a_pass(view: dict[str, Any]) -> bool:
        found = view["summary"]["damaged_shards"] == 1
        return found and view["nodes"]["n1"]["scrub"]["passes"] > 0

    def damage(job: Job) -> None:
        pause(job, True)
        with Arena.open(job.cluster.node_dir("n1") / f"{shard(1)}.arena") as arena:
            slot = newest(arena)
            data, parity = arena.data(slot, writable=True), arena.parity(slot, writable=True)
            data[100] ^= 1
            parity[-1] ^= 64
            job.supervisor.fleet.scrub_percent = 50.0
            del data, parity
        view.update(shown(job, found_in_a_pass))
        # The damaged snapshot is the newest: a trainer that dies now must get the right bytes.
        os.kill(job.trainers()[0], signal.SIGKILL)
        pause(job, False)

    def rewind(job: Job) -> None:
        """As if the user did not like what he sees."""
        wait_for(job, "training", 2)
        wait_until(lambda: len(view_of(job)) > 1, job)
        pause(job, True)
        held = view_of(job)
        words = ["--job", job.name, "--arena-dir", str(job.cluster.job_dir.parent)]
        words += ["--state-dir", str(tmp_path / "state")]
        assert main(["rewind", *words, "--before-iteration", str(min(held))]) == 2
        capsys.readouterr()
        assert main(["rewind", *words, "--before-iteration", str(max(held))]) == 0
        told.append(capsys.readouterr().out)
        rewound.extend(held)
        wait_for(job, "rewind")
        pause(job, False)

    try:
        job.run((10, damage), (24, rewind))
    finally:
        job.cluster.destroy()
    assert not difference(job.result(), two), job.story()
    assert job.kinds().index("corrupt") < job.kinds().index("trainer_died"), job.story()
    first, second = job.restores()
    assert (first[1], second[1]) == ("parity", "own memory"), job.story()
    assert second[0] == sorted(rewound)[-2] and "rewind" in job.kinds(), job.story()
    assert f"starts again from before iteration {max(rewound)}\n" in told[0]
    assert "backoff" not in job.kinds(), "what was asked for is no failure"
    counts = view["nodes"]["n1"]["scrub"]
    assert counts["bad_blocks"] == 2 and counts["passes"] > 0, counts
    assert "2 bad blocks found; 1 shards count as lost" in status.render("job", view)


@pytest.mark.all_layouts
def test_more_damage_than_parity_counts_as_lost_and_is_not_restored(
    tmp_path: Path, two: Result
) -> None:
    """One row damaged in two members of a stripe with one parity: said, and never loaded."""
    # No scrub until both are damaged: one that passes meanwhile would report a part of it.
    job = Job(tmp_path, nodes=2, protect="xor:2", iterations=ITERATIONS, scrub_percent=0.0, slots=3)

    def damage(job: Job) -> None:
        pause(job, True)
        for index in range(2):
            with Arena.open(job.cluster.node_dir(f"n{index}") / f"{shard(index)}.arena") as arena:
                slot = newest(arena)
                data, parity = arena.data(slot, writable=True), arena.parity(slot, writable=True)
                data[100] ^= 1
                parity[100] ^= 1
                del data, parity
        job.supervisor.fleet.scrub_percent = 50.0
        wait_for(job, "corrupt", 2)
        os.kill(job.trainers()[0], signal.SIGKILL)
        pause(job, False)

    try:
        job.run((10, damage))
    finally:
        job.cluster.destroy()
    assert not difference(job.result(), two), job.story()
    died = job.kinds().index("trainer_died")
    committed = [e.fields["iteration"] for e in job.events[:died] if e.kind == "committed"]
    assert job.restores()[-1] == (committed[-2], "own memory"), job.story()


def test_a_snapshot_from_which_training_fails_twice_is_not_used_again(
    tmp_path: Path, two: Result
) -> None:
    """Weights go wrong in committed snapshots."""
    folder = tmp_path / "poison"
    folder.mkdir()
    job = Job(
        tmp_path,
        nodes=2,
        protect="xor:2",
        slots=3,
        script=FAULTY,
        environment={POISON: str(folder), "MEGATRON_FT_SNAPSHOT_INTERVAL": "10"},
        iterations=ITERATIONS,
        iteration_seconds=0.1,
    )
    wrong_from: list[int] = []

    def poison(job: Job) -> None:
        # Stopped, trainers cannot pass the iteration before they are told of it.
        signal_trainers(job, signal.SIGSTOP)
        at = max(job.result()[0]) + 15
        wrong_from.append(at)
        (folder / "poison").write_text(str(at))
        signal_trainers(job, signal.SIGCONT)
        wait_until(lambda: job.supervisor.standing.committed[1] >= at, job)  # type: ignore[index]
        pause(job, True)
        (folder / "fail").touch()

    def note(job: Job) -> None:
        """What a supervisor that is started now would know."""
        record = read_record(tmp_path / "state" / job.name, job.name)
        assert record is not None
        noted.append(len(record.quarantine.rejected))

    noted: list[int] = []
    job.at_event["quarantined"] = note

    try:
        job.run((6, poison))
    finally:
        job.cluster.destroy()
    assert difference(job.result(), two) == "", job.story()
    restores = [iteration for iteration, _ in job.restores()]
    poisoned = [iteration for iteration in restores if iteration >= wrong_from[0]]
    assert restores == [*poisoned, restores[-1]] and restores[-1] < wrong_from[0], job.story()
    assert poisoned and all(poisoned.count(i) == 2 for i in poisoned), job.story()
    assert job.kinds().count("quarantined") == len(set(poisoned)), job.story()
    assert noted == [1], "it is in the notes before anybody hears of it"


def test_trainers_that_decline_what_was_announced_are_told_of_once(tmp_path: Path) -> None:
    """The supervisor has said that memory is restored: that must not stay its last word."""
    job = Job(
        tmp_path,
        nodes=2,
        protect="none",
        script=FAULTY,
        environment={"PYTHONPATH": str(ROOT), DECLINES: REASON},
        iterations=20,
        iteration_seconds=0.1,
    )
    try:
        job.run((8, lambda job: os.kill(job.trainers()[1], signal.SIGKILL)))
    finally:
        job.cluster.destroy()
    (offered, _), (told,) = job.restores()[0], [e for e in job.events if e.kind == "declined"]
    assert told.text.startswith(
        f"trainers do not take the snapshot of iteration {offered}: {REASON}; they start from "
        "scratch; "
    ), job.story()
    assert job.supervisor.standing.resumed_from == -1
    kinds = job.kinds()
    assert kinds.index("restoring") < kinds.index("declined") < len(kinds) - 1, job.story()
