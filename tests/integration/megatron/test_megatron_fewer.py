"""Megatron continues with fewer data-parallel ranks when a node is lost and no spare is left.

The oracle is Megatron alone: an unbroken run that saves a checkpoint of the same iteration
itself, and a run of fewer ranks that loads it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ft.checkpoint.drained import find
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.orders import Timing
from tests.support.disk_jobs import stop_until_drained
from tests.support.fates import in_incarnation
from tests.support.jobs import Fault, Job
from tests.support.megatron_fewer import program
from tests.support.megatron_jobs import LONG_JOB, check_fewer_ranks
from tests.support.megatron_layouts import EP2, PP2, TP2

pytestmark = LONG_JOB

OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")
RESHARDABLE = ("--dist-ckpt-optim-fully-reshardable",)


def shrinking_job(
    folder: Path,
    corpus: Path,
    flags: Sequence[str],
    *,
    drain_interval: int,
    nodes: int = 4,
    ranks_per_node: int = 1,
    protect: str = "xor:2",
) -> Job:
    exports, drains, trace = folder / "exports", folder / "drains", folder / "trace"
    ours = {
        "snapshot-interval": 2,
        "on-no-spare": "shrink",
        "drain-dir": drains,
        "drain-interval": drain_interval,
        "drain-export-dir": exports,
    }
    words = [word for name, value in ours.items() for word in (f"--inmem-{name}", str(value))]
    training = [*program().flags(corpus, trace), *flags, "--load", str(exports)]
    exports.mkdir()
    return Job(
        folder,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        protect=protect,
        command=(sys.executable, *training, "--inmem-snapshot", *words),
        environment=program().environment(trace),
        drain_dir=drains,
        drain_interval=drain_interval,
        drain_export_dir=exports,
        checkpoint_dir=exports,
        on_no_spare="shrink",
        timing=Timing(lease=30.0, node_timeout=45.0),
    )


def lose(node: str) -> Fault:
    def strike(job: Job) -> None:
        job.cluster.kill_node(node)

    return strike


def told(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.events if event.kind == kind]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="plain"),
        pytest.param(OVERLAPPED, id="overlap"),
        pytest.param(RESHARDABLE, id="full"),
        pytest.param(TP2, id="tp2"),
        pytest.param(PP2, id="pp2"),
        pytest.param(EP2, id="ep2"),
    ],
)
def test_two_of_four_nodes_go_on_as_megatron_alone_would(
    made: list[Job], tmp_path: Path, megatron_corpus: Path, flags: tuple[str, ...]
) -> None:
    """After it, a node is lost again, and the one that was left over takes its place."""
    job = shrinking_job(tmp_path, megatron_corpus, flags, drain_interval=10_000)
    made.append(job)
    job.run((6, lose("n3")), (22, in_incarnation(2, lose("n1"))))
    (line,) = told(job, "shrunk")
    assert "2 nodes instead of 4, 2 ranks: n0, n1" in line, job.story()
    assert "n2 takes the place of n1" in told(job, "spare"), job.story()
    assert [source for _, source in job.restores()] == ["parity"], job.story()
    last = next(e.fields["iteration"] for e in job.events if e.kind == "exported")
    check_fewer_ranks(program(), megatron_corpus, tmp_path, last, *flags)


def test_a_node_of_two_ranks_goes_on_from_what_was_drained(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """Without parity the other node's shards are lost: what is on disk serves."""
    job = shrinking_job(
        tmp_path,
        megatron_corpus,
        TP2,
        drain_interval=10,
        nodes=2,
        ranks_per_node=2,
        protect="none",
    )
    made.append(job)

    def lose_once_drained(job: Job) -> None:
        stop_until_drained(job, 1)
        job.cluster.kill_node("n1")

    job.run((10, lose_once_drained))
    (line,) = told(job, "shrunk")
    assert "1 nodes instead of 2, 2 ranks: n0" in line, job.story()
    last = int(told(job, "from_disk")[0].rsplit("_", 1)[1])
    check_fewer_ranks(program(), megatron_corpus, tmp_path, last, *TP2)


def test_a_supervisor_that_dies_meanwhile_is_followed_by_one_that_goes_on(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """Before the shape changes, right after it, and before the fewer ranks are started."""
    job = shrinking_job(tmp_path, megatron_corpus, (), drain_interval=10_000)
    made.append(job)
    faults = [(6, lose("n3"))]
    for kind in ("drained", "shrunk", "from_disk"):
        job.at_event = {kind: Job.interrupt}
        with pytest.raises(asyncio.CancelledError):
            job.run(*faults)
        faults = []
    job.run()
    assert told(job, "finished") and len(told(job, "shrunk")) == 1, job.story()
    starts = [text.rsplit("_", 1)[1] for text in told(job, "from_disk")]
    assert len(set(starts)) == 1, job.story()
    check_fewer_ranks(program(), megatron_corpus, tmp_path, int(starts[0]))


def test_what_cannot_go_on_stops_with_its_memory_drained(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """Four micro-batches cannot be shared by three ranks, and stripes need three nodes."""
    job = shrinking_job(tmp_path, megatron_corpus, (), drain_interval=10_000)
    job.protect = "rs:2+1"
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((6, lose("n3")))
    (line,) = told(job, "not_shrunk")
    assert "cannot be shared by 3 data-parallel ranks" in line and "needs 3 nodes" in line
    assert find(tmp_path / "drains")[0], job.story()
