"""The doctor's numbers of nodes with which a job would continue are those of the job itself."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.cli.doctor.checks import continuations, fewer, spares
from megatron_ft.cli.doctor.report import Finding, Severity
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ProtectionError
from megatron_ft.core.identity import RankRule
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.megatron.fewer_ranks import arguments_of, refusals, rule_of
from megatron_ft.supervisor.elastic import shrink
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.spec import JobSpec
from tests.support.doctor_facts import asked, facts


def continued(spec: JobSpec, rule: RankRule, left: int, folder: Path) -> tuple[int, Scheme] | None:
    """Number of nodes and scheme with which a real job continues with its first nodes alone."""
    names = [f"n{number}" for number in range(spec.nodes)]
    with JobState(folder / f"state-{left}", spec.name) as state:
        state.update(active=tuple(names), rank_rule=rule)
        cluster = VirtualCluster(spec.name, names, folder / "root")
        members = Membership(spec, cluster, state, cast(Any, SimpleNamespace(fleet=None)))
        admitted: Any = dict.fromkeys(names[:left])
        job = SimpleNamespace(spec=spec, state=state, members=members, emit=Observers().emit)
        if not shrink(cast(Any, job), admitted):
            return None
        return len(members.active), members.seats.scheme


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 6),
    per_node=st.sampled_from([1, 2, 4]),
    replica=st.sampled_from([1, 2, 4]),
    batches=st.integers(1, 24),
    racks=st.lists(st.sampled_from("abcdef"), min_size=6, max_size=6),
    protect=st.sampled_from(["none", "xor:2", "rs:2+1", "rs:3+1", "rs:2+2", "replica:2"]),
)
def test_doctor_and_job_agree(
    nodes: int, per_node: int, replica: int, batches: int, racks: list[str], protect: str
) -> None:
    rule, names = RankRule(replica, replica, batches), tuple(f"n{n}" for n in range(nodes))
    domains = dict(zip(names, racks, strict=False))
    chosen = SnapshotConfig(protect=protect, on_no_spare="shrink")
    with tempfile.TemporaryDirectory() as folder:
        try:
            spec = JobSpec(
                name="job", command=("true",), nodes=nodes, ranks_per_node=per_node,
                domains=domains, settings=chosen,
            )  # fmt: skip
            job = {continued(spec, rule, left, Path(folder)) for left in range(1, nodes)}
        except ProtectionError:  # such a job does not start
            return
    wished = asked(
        protect=protect, active=names, spares=(), ranks_per_node=per_node, domains=domains
    )
    found, skipped = continuations(wished, rule)
    assert set(found) == job - {None} and len(set(found)) == len(found)
    numbers = {count for count, _ in found} | {int(why.split()[0]) for why in skipped}
    assert numbers == set(range(1, nodes))


MEGATRON = "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8".split()


def shrinking(*flags: str, **changes: Any) -> list[Finding]:
    args = arguments_of([*MEGATRON, *flags])
    rule = None if args is None else rule_of(args)
    given = {"on_no_spare": "shrink", "ranks_per_node": 1, "rank_rule": rule, **changes}
    return fewer(facts(job=asked(**given)))


def test_numbers_schemes_and_reasons_are_said() -> None:
    (said,) = shrinking()
    assert said.verdict is Severity.OK
    assert "continues with 2 nodes (rs:1+1)" in said.text
    assert "not with 3 nodes: the 8 micro-batches" in said.text and "not with 1 nodes" in said.text
    (said,) = shrinking("--tensor-model-parallel-size=4")
    assert said.verdict is Severity.WARNING and "3 ranks are not a multiple of 4" in said.text
    many = tuple(f"n{n}" for n in range(40))
    (said,) = shrinking(active=many)
    assert said.text.count("not with") == 4 and "nor with 32 other numbers" in said.text


def test_shapes_are_said() -> None:
    shapes = {3: ("--pipeline-model-parallel-size", "3"), 2: None, 1: ("--flag", "a b")}
    (said,) = shrinking("--pipeline-model-parallel-size=4", shapes=shapes)
    assert "continues with 3 nodes (rs:2+1) with --pipeline-model-parallel-size 3" in said.text
    assert "not with 2 nodes: --shapes forbids it" in said.text
    (said,) = shrinking("--yaml-cfg", "x", shapes=shapes)
    assert "3 nodes with --pipeline-model-parallel-size 3, 2 nodes forbidden" in said.text
    assert said.text.endswith("1 nodes with --flag 'a b'")


def test_what_the_doctor_cannot_know_the_ranks_say() -> None:
    for flags in (["--yaml-cfg", "x"], ["--num-experts", "many"], ["--use-checkpoint-args"]):
        (said,) = shrinking(*flags)
        assert "its ranks say at the start" in said.text, flags
    assert arguments_of(["python", "train.py"]) is None
    assert not shrinking(on_no_spare="stop")


def test_a_batch_that_would_follow_the_ranks_is_refused() -> None:
    args = arguments_of(["pretrain_gpt.py", "--micro-batch-size", "2"])
    assert args is not None
    (why,) = refusals(args)
    (said,) = shrinking(shrink_refusals=(why,))
    assert said.verdict is Severity.REFUSED and "--global-batch-size" in said.text


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_job_that_shrinks_needs_no_spare(shrinks: bool) -> None:
    (said,) = spares(facts(job=asked(spares=(), on_no_spare="shrink" if shrinks else "stop")))
    assert said.verdict is (Severity.OK if shrinks else Severity.WARNING)
