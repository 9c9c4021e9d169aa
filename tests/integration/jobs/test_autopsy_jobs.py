"""Jobs in which a rank stops in one of many ways: it is named, with the way, and the evidence kept.

Ranks that die of it are not named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.arena.limits import CGROUP_ROOT, oom_counter
from megatron_ft.supervisor.autopsy import LOADER, OTHER_CALL
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.evidence import Kept, read_kept
from megatron_ft.supervisor.orders import Timing
from tests.programs.faulty_example import HANGS
from tests.support.disk_jobs import of_kind
from tests.support.jobs import FAULTY, ROOT, Job
from tests.support.networks import needs_network

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

QUICK = {"hang_seconds": 3.0, "register_timeout_seconds": 60.0}


@pytest.fixture
def new(made: list[Job], tmp_path: Path) -> Callable[..., Job]:
    def make(*ends: str, **settings: object) -> Job:
        standard: dict[str, object] = {"nodes": 3, "protect": "xor:3", "iterations": 50, **QUICK}
        environment = {HANGS: " ".join(ends)}
        if ends:
            standard |= {"script": FAULTY, "environment": environment}
        job = Job(tmp_path, **{**standard, **settings})  # type: ignore[arg-type]
        made.append(job)
        return job

    return make


def verdicts(job: Job) -> list[tuple[int, str, str]]:
    found = of_kind(job, "autopsy")
    return [(e.fields["rank"], e.fields["node"], e.fields["verdict"]) for e in found]


def kept(event: JobEvent) -> Kept:
    return read_kept(Path(event.fields["folder"]))


def test_each_end_is_named_with_its_class(new: Callable[..., Job], tmp_path: Path) -> None:
    job = new("1:killed:8:1", "2:error:16:0", "3:leave:24:2", "4:suspended:32:1")
    job.run()
    assert verdicts(job) == [
        (1, "n1", "signal"),
        (0, "n0", "exception"),
        (2, "n2", "left early"),
        (1, "n1", "hang"),
    ], job.story()
    for event, at in zip(of_kind(job, "autopsy"), (7, 15, 23, 31), strict=True):
        ranks = {one.rank: one for one in kept(event).evidence.ranks}
        assert ranks.keys() == {0, 1, 2}
        # A heartbeat is half a second old where a rank was not dead yet.
        assert ranks[event.fields["rank"]].iteration == at, ranks
    error = of_kind(job, "autopsy")[1]
    assert "this rank alone cannot continue; at fail (" in error.text
    log = Path(error.fields["folder"], "rank0.log").read_text()
    assert "ValueError" in log and log.count("Traceback") == 1
    hang = Path(of_kind(job, "autopsy")[3].fields["folder"])
    assert "be_suspended" in (hang / "stacks" / "rank1.txt").read_text()
    command = [sys.executable, "-m", "megatron_ft.cli.main", "autopsy", "--job", job.name]
    command += ["--state-dir", str(tmp_path / "state")]
    page = subprocess.check_output([*command, "2"], cwd=ROOT, timeout=60, text=True)
    print(page)
    assert "stopped first: rank 0 on n0" in page and "at fail (" in page
    newest = subprocess.check_output([*command, "--json"], cwd=ROOT, timeout=60, text=True)
    assert json.loads(newest)["verdict"]["kind"] == "hang"


@pytest.mark.all_layouts
def test_what_a_hang_waits_for_is_named(new: Callable[..., Job]) -> None:
    job = new("1:another:8:2", "2:skips:16:1", "3:loads:24:0")
    job.run()
    other, one, loader = of_kind(job, "autopsy")
    assert [e.fields["how"] for e in (other, one, loader)] == [OTHER_CALL, "", LOADER], job.story()
    assert loader.fields["rank"] == 0 and "at load_batch (" in loader.text
    assert (one.fields["rank"], one.fields["verdict"]) == (1, "hang"), job.story()
    assert "rank 1 has not called barrier #" in one.text
    waits = kept(one).verdict.waiting
    assert len(waits) == 1 and "ranks 0,2" in waits[0] and "in barrier #" in waits[0], waits
    assert (other.fields["rank"], other.fields["verdict"]) == (2, "hang"), job.story()
    assert "rank 2 is in all_reduce #" in other.text and "the others in barrier #" in other.text


@pytest.mark.all_layouts
def test_a_lost_node_is_named(new: Callable[..., Job]) -> None:
    job = new(spares=1)
    job.run((8, lambda job: job.cluster.kill_node("n2") and None))
    assert verdicts(job) == [(-1, "n2", "node loss")], job.story()


@pytest.mark.all_layouts
def test_a_rank_that_leaves_with_success_is_named(new: Callable[..., Job]) -> None:
    """The others wait for as long as run_resilient does: nobody has failed."""
    job = new("1:leave_quietly:8:1", hang_seconds=600.0)
    job.run()
    assert verdicts(job) == [(1, "n1", "left early")], job.story()


@needs_network
@pytest.mark.all_layouts
def test_a_cut_network_is_named(new: Callable[..., Job]) -> None:
    def cut(job: Job) -> None:
        assert job.network is not None
        job.network.cut(["n1"])

    timing = Timing(heartbeat=0.25, lease=3.0, node_timeout=4.0)
    job = new(nodes=2, protect="xor:2", spares=1, networked=True, timing=timing, hang_seconds=600.0)
    job.run((8, cut))
    assert verdicts(job) == [(-1, "n1", "cut network")], job.story()


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB more than a trainer has when it enters."""
    counter = oom_counter(os.getpid())
    if counter is None or not os.access(counter.parent, os.W_OK):
        pytest.skip("no memory cgroup can be made here")
    folder = counter.parent / f"megatron-ft-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.limit_in_bytes" if (CGROUP_ROOT / "memory").exists() else "memory.max"
        (folder / name).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.all_layouts
def test_the_oom_killer_is_told_from_a_kill(new: Callable[..., Job], small_cgroup: Path) -> None:
    # A busy machine takes longer to fill the memory than a hang may last.
    job = new("1:memory:8:1", "2:killed:16:2", hang_seconds=60.0)
    job.environment = {**job.environment, "MEGATRON_FT_TEST_CGROUP": str(small_cgroup)}
    job.run()
    assert verdicts(job) == [(1, "n1", "out of memory"), (2, "n2", "signal")], job.story()
    assert "not by the OOM killer" in of_kind(job, "autopsy")[1].text
