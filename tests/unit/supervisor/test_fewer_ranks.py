"""Continuing with fewer ranks: which numbers will do, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkpoint.decide import Decision
from megatron_ft.checkpoint.disk_format import folder_name
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import find
from megatron_ft.checkpoint.live import open_live, scan
from megatron_ft.checkpoint.native import TRACKER, checkpoint_folder
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.cli.training_command import check_torchrun
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import Ancestor, RankRule, ShardPlacement
from megatron_ft.core.scheme import NO_PARITY, Scheme
from megatron_ft.erasure.stripes import members_of, possible_scheme
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.megatron.fewer_ranks import refusals, rule_of
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.disk_restore import DiskRestores
from megatron_ft.supervisor.elastic import fewer_nodes, shrink
from megatron_ft.supervisor.events import JobEvent, Observers
from megatron_ft.supervisor.job_state import JobRecord, JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.spec import JobSpec, Shapes
from tests.support.disk_samples import JOB, SHARDS, Memory

SEATS = {name: ShardPlacement(rank, (), 1) for rank, name in enumerate(SHARDS)}
NODES = ("n0", "n1", "n2", "n3", "n4", "n5")
SCHEMES = [Scheme("none", 1, 0), Scheme("xor", 1, 1), Scheme("rs", 2, 1), Scheme("rs", 2, 2)]
RULES = st.builds(
    lambda replica, factor, batches: RankRule(replica * factor, replica, batches),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 1, 2]),
    st.integers(1, 24),
)


SHAPES = st.dictionaries(st.integers(1, 6), st.sampled_from([None, (), ("--flag",)]), max_size=3)


def possible(
    nodes: Any, per_node: int, rule: RankRule, domains: Any, scheme: Scheme, shapes: Shapes
) -> bool:
    ranks = len(nodes) * per_node
    fits = not ranks % rule.multiple and not rule.micro_batches % (ranks // rule.replica)
    if not (shapes[len(nodes)] is not None if len(nodes) in shapes else fits):
        return False
    largest = max(map(len, members_of(nodes, domains).values()))
    return not scheme.parity_members or bool(possible_scheme(len(nodes), largest, scheme))


@given(
    left=st.integers(0, 6),
    before=st.integers(1, 7),
    per_node=st.sampled_from([1, 2, 4]),
    rule=RULES,
    racks=st.lists(st.sampled_from("abc"), min_size=6, max_size=6),
    scheme=st.sampled_from(SCHEMES),
    shapes=SHAPES,
)
def test_the_most_nodes_that_will_do_are_found(
    left: int,
    before: int,
    per_node: int,
    rule: RankRule,
    racks: list[str],
    scheme: Scheme,
    shapes: Shapes,
) -> None:
    nodes, domains = NODES[:left], dict(zip(NODES, racks, strict=True))
    spec = asked(ranks_per_node=per_node, domains=domains, shapes=shapes)
    chosen, reasons = fewer_nodes(spec, nodes, before, rule, scheme)
    counts = range(len(chosen) + 1, min(left, before - 1) + 1)
    assert not chosen or possible(chosen, per_node, rule, domains, scheme, shapes)
    assert len(set(chosen)) == len(chosen) < before and set(chosen) <= set(nodes)
    assert not any(
        possible(some, per_node, rule, domains, scheme, shapes)
        for count in counts
        for some in itertools.combinations(nodes, count)
    )
    assert [reason.split(" ")[0] for reason in reasons] == [str(n) for n in reversed(counts)]


def asked(**given: Any) -> JobSpec:
    settings = SnapshotConfig(protect="none")
    return JobSpec(name="job", command=("true",), nodes=7, settings=settings, **given)


def test_shapes_go_before_the_rule() -> None:
    """Four ranks hold one copy of the model: without other arguments three nodes will not do."""
    rule = RankRule(4, 4, 8)
    for shapes, count, said in (
        ({}, 0, "3 ranks are not a multiple of 4"),
        ({3: ("--flag",)}, 3, ""),
        ({3: None, 2: ()}, 2, "3 nodes: --shapes forbids it"),
    ):
        chosen, reasons = fewer_nodes(asked(shapes=shapes), NODES[:3], 4, rule)
        assert len(chosen) == count and said in " ".join(reasons), (shapes, reasons)


def megatron(**changes: Any) -> SimpleNamespace:
    """Megatron's arguments of 16 ranks: tp 2, pp 2, dp 4."""
    known: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "data_parallel_size": 4,
        "micro_batch_size": 2,
        "global_batch_size": 24,
        "ckpt_format": "torch_dist",
        "load": "/data/exports",
        "use_distributed_optimizer": True,
        "_is_global_batch_size_explicitly_specified": True,
    }
    return SimpleNamespace(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, RankRule(4, 4, 12)),
        ({"context_parallel_size": 2}, RankRule(8, 8, 12)),
        ({"num_experts": 8, "expert_model_parallel_size": 4}, RankRule(16, 4, 12)),
        (
            {"num_experts": 8, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
            RankRule(8, 4, 12),
        ),
        ({"num_distributed_optimizer_instances": 2}, RankRule(8, 4, 12)),
        ({"rampup_batch_size": ["8", "16", "1000"]}, RankRule(4, 4, 4)),
        ({"eval_global_batch_size": 16, "eval_micro_batch_size": 2}, RankRule(4, 4, 4)),
        ({"virtual_pipeline_model_parallel_size": 2}, RankRule(4, 4, 6)),
    ],
)
def test_megatrons_arguments_say_with_how_many_ranks(
    changes: dict[str, Any], rule: RankRule
) -> None:
    assert rule_of(megatron(**changes)) == rule
    assert not rule.against(rule.multiple), "one copy of the model always works"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"_is_global_batch_size_explicitly_specified": False}, "without --global-batch-size"),
        ({"step_batch_size_schedule": "0:4"}, "--step-batch-size-schedule"),
    ],
)
def test_flags_that_would_keep_megatron_from_it_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    found = refusals(megatron(**changes))
    assert [words in line for line in found] == [True] * bool(words), found


def test_a_release_that_does_not_remember_the_batch_size_is_asked_by_its_value() -> None:
    args = megatron(global_batch_size=8)
    del args._is_global_batch_size_explicitly_specified
    assert len(refusals(args)) == 1


def test_a_program_that_says_nothing_is_refused_only_where_it_must_say() -> None:
    ranks = Registration(1)
    ranks.layouts["dp0"] = m.Prepare("dp0", 1, 2)
    assert ranks.rank_rule(needed=False) is None
    with pytest.raises(ConfigError, match='DeepSpeed with "train_batch_size"'):
        ranks.rank_rule(needed=True)
    ranks.layouts["dp0"] = m.Prepare("dp0", 1, 2, RankRule(1, 1, 4))
    assert ranks.rank_rule(needed=True) == RankRule(1, 1, 4)


def test_what_it_needs_of_other_settings_is_said() -> None:
    with pytest.raises(ConfigError, match="--nnodes 2: drop the flag"):
        check_torchrun(["torchrun", "--nnodes", "2", "train.py"], 2, 1, fewer=True)


def spec_of(folder: Path, restore_from: Path | None = None, **changes: Any) -> JobSpec:
    given: dict[str, Any] = {
        "drain_dir": folder / "disk",
        "drain_interval": 1,
        "drain_export_dir": folder / "exports",
        "checkpoint_dir": folder / "exports",
        "protect": "none",
        "on_no_spare": "shrink",
    }
    settings = SnapshotConfig(**{**given, **changes})
    return JobSpec(
        name="job", command=("true",), nodes=2, settings=settings, restore_from=restore_from
    )


def test_a_job_that_shall_not_shrink_or_cannot_stays_as_it_is(tmp_path: Path) -> None:
    events: list[JobEvent] = []
    observers = Observers()
    observers.subscribe(events.append)
    left: Any = {"n1": None}
    for policy, rule, shrunk, text in (
        ("stop", RankRule(1, 1, 4), False, ""),
        ("shrink", None, False, "have not said yet"),
        ("shrink", RankRule(2, 1, 4), False, "not a multiple of 2"),
        ("shrink", RankRule(1, 1, 4), True, "1 nodes instead of 2, 1 ranks"),
    ):
        events.clear()
        cluster = VirtualCluster("job", ["n0", "n1"], tmp_path / "root")
        with JobState(tmp_path / f"{policy}-{rule}", "job") as state:
            state.update(active=("n0", "n1"), shards=SEATS, rank_rule=rule)
            spec = spec_of(tmp_path, on_no_spare=policy)
            members = Membership(spec, cluster, state, cast(Any, SimpleNamespace(fleet=None)))
            job = SimpleNamespace(spec=spec, state=state, members=members, emit=observers.emit)
            assert shrink(cast(Any, job), left) is shrunk
            assert members.active == (["n1"] if shrunk else ["n0", "n1"])
            assert [text in event.text for event in events] == ([True] if text else [])
            kept = (state.record.shards, state.record.sources)
            there = dict(zip(SHARDS, ("n0", "n1"), strict=True))
            assert kept == (({}, there) if shrunk else (SEATS, {}))


def drained(memory: Memory, into: Path) -> None:
    with open_newest(open_live(memory.root, memory.job)) as shards:
        folder = into / folder_name(JOB, 10, shards.info.snapshot)
        write_shards(shards, folder, seats=SEATS)
        publish(folder, shards.info, JOB, shards.lineage, len(shards))


def write_export(directory: Path, iteration: int) -> None:
    folder = checkpoint_folder(directory, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").touch()
    (directory / TRACKER).write_text(str(iteration))


def test_a_shard_that_is_damaged_in_memory_is_loaded_from_disk(tmp_path: Path) -> None:
    """Its header still says what the checkpoint says of it."""
    memory = Memory(tmp_path / "memory")
    memory.commit(1, 10)
    drained(memory, tmp_path / "disk")
    ((one, *_), _) = find(tmp_path / "disk", JOB)
    restores = DiskRestores(spec_of(tmp_path), VirtualCluster("job", ["n0", "n1"], tmp_path))
    snapshot = one.manifest.snapshot
    with scan([memory.folder(shard) for shard in SHARDS]) as found:
        held = Decision(snapshot, 10, False, (), dict(found.holdings))
        for corrupt in ((), ((SHARDS[0], snapshot),)):
            _, source = restores.decision(one, held, ["n0", "n1"], NO_PARITY, corrupt)
            assert source.shards == tuple(shard for shard, _ in corrupt)


def test_a_shard_of_other_bytes_under_the_same_name_is_loaded_from_disk(tmp_path: Path) -> None:
    memory, other = Memory(tmp_path / "memory"), Memory(tmp_path / "other", width=101)
    for each in (memory, other):
        each.commit(1, 10)
    drained(memory, tmp_path / "disk")
    ((one, *_), _) = find(tmp_path / "disk", JOB)
    restores = DiskRestores(spec_of(tmp_path), VirtualCluster("job", ["n0", "n1"], tmp_path))
    with scan([other.folder(shard) for shard in SHARDS]) as found:
        held = Decision(one.manifest.snapshot, 10, False, (), dict(found.holdings))
        _, source = restores.decision(one, held, ["n0", "n1"], NO_PARITY, ())
    assert source.shards == SHARDS


def test_what_the_user_gave_to_start_from_goes_before_the_frameworks_own_once(
    tmp_path: Path,
) -> None:
    """At the job's first start; what the framework saves afterwards counts."""
    memory = Memory(tmp_path / "memory")
    memory.commit(1, 10)
    drained(memory, tmp_path / "given")
    write_export(tmp_path / "exports", 12)
    spec = spec_of(tmp_path, restore_from=tmp_path / "given")
    restores = DiskRestores(spec, VirtualCluster("job", ["n0", "n1"], tmp_path))
    nothing = Decision(None, -1, False, (), {})
    for committed in (False, True):
        record = JobRecord(
            2, "job", JOB, 0, b"", active=("n0", "n1"), lineage=(Ancestor(1, None),),
            committed=committed,
        )  # fmt: skip
        choice = asyncio.run(restores.look(nothing, record))
        assert (choice.taken is None) is committed, choice.reasons
