"""Megatron continues with fewer data-parallel ranks when a node is lost and no spare is left.

Its snapshot is reshaped in memory.  The oracle is Megatron alone: an unbroken run that saves a
checkpoint of the same iteration itself, and a run of fewer ranks that loads it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.checkpoint.drained import find
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.orders import Timing
from tests.support.fates import in_incarnation
from tests.support.jobs import Fault, Job
from tests.support.megatron_fewer import NO_DROPOUT, program
from tests.support.megatron_jobs import (
    LONG_JOB,
    check_fewer_ranks,
    compare_fewer_ranks,
    steps_after,
    train_alone,
)
from tests.support.megatron_layouts import EP2, PP2, TP2

pytestmark = LONG_JOB

OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")
RESHARDABLE = ("--dist-ckpt-optim-fully-reshardable",)


def command(folder: Path, corpus: Path, flags: Sequence[str]) -> tuple[str, ...]:
    ours = {"snapshot-interval": 2, "on-no-spare": "shrink"}
    words = [word for name, value in ours.items() for word in (f"--inmem-{name}", str(value))]
    training = [*program().flags(corpus, folder / "trace"), *NO_DROPOUT, *flags]
    return (sys.executable, *training, "--inmem-snapshot", *words)


def shrinking_job(
    folder: Path,
    corpus: Path,
    flags: Sequence[str],
    *,
    nodes: int = 4,
    ranks_per_node: int = 1,
    protect: str = "xor:2",
) -> Job:
    return Job(
        folder,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        protect=protect,
        command=command(folder, corpus, flags),
        environment=program().environment(folder / "trace"),
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
    job = shrinking_job(tmp_path, megatron_corpus, flags)
    made.append(job)
    job.run((6, lose("n3")), (22, in_incarnation(2, lose("n1"))))
    (line,) = told(job, "shrunk")
    assert "2 nodes instead of 4, 2 ranks: n0, n1" in line, job.story()
    assert "n2 takes the place of n1" in told(job, "spare"), job.story()
    assert [source for _, source in job.restores()] == ["parity", "parity"], job.story()
    last = next(e.fields["iteration"] for e in job.events if e.kind == "reshaped")
    check_fewer_ranks(program(), megatron_corpus, tmp_path, last, *NO_DROPOUT, *flags)


ONE_STAGE = ("--pipeline-model-parallel-size", "1")
VOCABULARY = ("--vocab-size", "383")
"""With the token that ends a document 384, padded to the same with one and two tensor ranks."""


def test_the_same_job_is_started_again_in_another_layout(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """TP2xDP2, then DP4: as Megatron alone that loads its own checkpoint of that iteration."""
    job = shrinking_job(tmp_path, megatron_corpus, (*VOCABULARY, *TP2))
    made.append(job)
    with pytest.raises(asyncio.CancelledError):
        job.run((6, Job.interrupt))
    job.command = command(tmp_path, megatron_corpus, VOCABULARY)
    job.run()
    (line,) = told(job, "reshaped")
    assert "4 shards reshaped to 4" in line, job.story()
    last = next(e.fields["iteration"] for e in job.events if e.kind == "reshaped")
    own, alone = tmp_path / "own", tmp_path / "alone"
    flags = (*NO_DROPOUT, *VOCABULARY, *RESHARDABLE)
    saving = ("--save", str(own), "--save-interval", str(last))
    train_alone(program(), megatron_corpus, tmp_path / "whole", *flags, *TP2, *saving, ranks=4)
    loading = ("--load", str(own), "--ckpt-step", str(last))
    train_alone(program(), megatron_corpus, alone, *flags, *loading, ranks=4)
    compare_fewer_ranks(program(), tmp_path / "trace", alone, last, ranks=4)


def test_two_nodes_continue_with_other_flags_and_four_with_the_old_ones(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """TP2xPP2, then TP2, then TP2xPP2: as Megatron alone that loads its own checkpoints."""
    # Encoders must be up before it ends.
    long = ("--train-iters", "120")
    job = shrinking_job(tmp_path, megatron_corpus, (*TP2, *PP2, *long))
    job.more["shapes"] = {2: ONE_STAGE}
    made.append(job)
    # Before trainers start: growth waits for their first boundary, not training for growth.
    job.at_event = {"rebuilt": lambda job: job.cluster.revive("n3")}
    job.run((6, lose("n3")))
    first, second = (e.fields["iteration"] for e in job.events if e.kind == "reshaped")
    starts = ["with --pipeline-model-parallel-size 1" in t for t in told(job, "trainers_started")]
    assert starts == [False, True, False], job.story()
    assert "2 nodes instead of 4, 2 ranks: n0, n1" in told(job, "shrunk")[0], job.story()
    assert "continuing with 4 instead of 2" in told(job, "grown")[0], job.story()
    flags, own = (*NO_DROPOUT, *RESHARDABLE, *TP2, *long), tmp_path / "own"
    saving = ("--save", str(own), "--save-interval")
    for ranks, begin, end, layout in (
        (4, 0, first, PP2),
        (2, first, second, ONE_STAGE),
        (4, second, 0, PP2),
    ):
        more = [*layout, *((*saving, str(end), "--exit-interval", str(end)) if end else ())]
        more += ["--load", str(own), "--ckpt-step", str(begin)] if begin else []
        train_alone(
            program(), megatron_corpus, tmp_path / f"alone{begin}", *flags, *more, ranks=ranks
        )
        wanted = steps_after(tmp_path / f"alone{begin}", ranks - 1, begin)
        found = steps_after(tmp_path / "trace", ranks - 1, begin)
        assert wanted and {at: found[at] for at in wanted} == wanted
    longer = replace(program(), iterations=120)
    compare_fewer_ranks(longer, tmp_path / "trace", tmp_path / f"alone{second}", second, 4)


def test_what_cannot_go_on_stops_with_its_memory_drained(
    made: list[Job], tmp_path: Path, megatron_corpus: Path
) -> None:
    """A copy of the model takes all four ranks."""
    job = shrinking_job(tmp_path, megatron_corpus, (*TP2, *PP2))
    job.more |= {"drain_dir": tmp_path / "drains", "drain_interval": 10_000}
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((6, lose("n3")))
    (line,) = told(job, "not_shrunk")
    assert "3 ranks are not a multiple of 4" in line, line
    assert find(tmp_path / "drains")[0], job.story()
