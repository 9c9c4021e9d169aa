"""Jobs in which a bit of live state flips: found by the next compared snapshot, and undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.supervisor.events import JobEvent
from tests.programs.faulty_example import BUFFER, FLIPS, MOMENT, WEIGHT
from tests.support.disk_jobs import of_kind
from tests.support.jobs import FAULTY, Job, Uninterrupted, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


def job_with_flips(folder: Path, *flips: tuple[int, int, str], **more: object) -> Job:
    """A job in which flips of (rank, iteration, what) are due."""
    due = folder / "flips"
    due.mkdir()
    for rank, iteration, what in flips:
        (due / f"{rank}-{iteration}-{what}").touch()
    return Job(folder, script=FAULTY, environment={FLIPS: str(due)}, **more)  # type: ignore[arg-type]


def check_undone(job: Job, found: JobEvent, flipped_at: int, restored: int) -> None:
    """Nothing with the flip was committed, and training went back to before it."""
    before = job.events[: job.events.index(found)]
    resumed = [e.monotonic for e in before if e.kind == "training"][-1]
    committed = [
        e.fields["iteration"] for e in before if e.kind == "committed" and e.monotonic > resumed
    ]
    assert committed and max(committed) < flipped_at <= found.fields["iteration"], job.story()
    assert found.fields["iteration"] - flipped_at <= 4, "not in the next compared snapshot"
    assert restored == max(committed), job.story()


def test_flips_are_found_blamed_and_undone(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    flips = ((1, 12, WEIGHT), (2, 26, MOMENT))
    job = job_with_flips(tmp_path, *flips, nodes=3, spares=2, protect="xor:3")
    made.append(job)
    job.run()
    assert not difference(job.result(), uninterrupted(3, 40)), job.story()
    found, restores = of_kind(job, "replicas_differ"), job.restores()
    assert len(found) == len(restores) == len(flips), job.story()
    for event, (restored, _), (rank, flipped_at, _) in zip(found, restores, flips, strict=True):
        assert event.fields["shards"] == [f"pp0-tp0-dp{rank}-ep0"], event
        assert event.fields["nodes"] == [f"n{rank}"], event
        check_undone(job, event, flipped_at, restored)
    assert "model/module.0.weight" in found[0].text, found[0].text
    assert "optimizer/state/0/exp_avg" in found[1].text, found[1].text
    assert job.supervisor.members.active == ["n0", "n3", "n4"], job.story()
    assert [e.fields["node"] for e in of_kind(job, "avoided")] == ["n1", "n2"], job.story()


@pytest.mark.all_layouts
def test_of_two_replicas_the_pair_is_named(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    job = job_with_flips(tmp_path, (0, 12, WEIGHT), nodes=2, spares=1)
    made.append(job)
    job.run()
    assert not difference(job.result(), uninterrupted(2, 40)), job.story()
    (found,) = of_kind(job, "replicas_differ")
    assert found.fields["nodes"] == ["n0", "n1"], found
    check_undone(job, found, 12, job.restores()[0][0])
    assert job.supervisor.members.active == ["n0", "n1"], "nobody is proven to be at fault"


@pytest.mark.all_layouts
def test_what_is_not_compared_raises_no_alarm(
    made: list[Job], tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """Buffers that ranks need not have alike, and everything with comparisons off."""
    (tmp_path / "on").mkdir()
    on = job_with_flips(tmp_path / "on", (1, 12, BUFFER), nodes=2)
    (tmp_path / "off").mkdir()
    off = job_with_flips(tmp_path / "off", (1, 12, WEIGHT), nodes=2, compare_replicas=0)
    for job in (on, off):
        made.append(job)
        job.run()
        assert not {"replicas_differ", "replicas_unlike", "restoring"} & {*job.kinds()}, job.story()
    assert difference(off.result(), uninterrupted(2, 40))
