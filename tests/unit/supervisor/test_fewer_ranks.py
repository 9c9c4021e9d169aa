"""Continuing with fewer ranks: which numbers will do, what is refused, and what must be on disk."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkpoint.decide import Decision, Quarantine
from megatron_ft.checkpoint.disk_format import folder_name
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import find
from megatron_ft.checkpoint.live import open_live, scan
from megatron_ft.checkpoint.native import TRACKER, checkpoint_folder, naming
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.cli.training_command import check_torchrun
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError, ProtectionError
from megatron_ft.core.identity import Ancestor, RankRule, ShardPlacement
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import check_domains
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.megatron.fewer_ranks import refusals, rule_of
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.disk_restore import DiskRestores
from megatron_ft.supervisor.emergency_drain import NOTHING, EmergencyDrain, fewer_nodes
from megatron_ft.supervisor.events import JobEvent, Observers
from megatron_ft.supervisor.job_state import JobRecord, JobState
from megatron_ft.supervisor.membership import Inventories, Membership
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.spec import JobSpec
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


def possible(nodes: Any, per_node: int, rule: RankRule, domains: Any, scheme: Scheme) -> bool:
    ranks = len(nodes) * per_node
    if ranks % rule.multiple or rule.micro_batches % (ranks // rule.replica):
        return False
    try:
        check_domains(nodes, domains, scheme)
    except ProtectionError:
        return False
    return True


@given(
    left=st.integers(0, 6),
    before=st.integers(1, 7),
    per_node=st.sampled_from([1, 2, 4]),
    rule=RULES,
    racks=st.lists(st.sampled_from("abc"), min_size=6, max_size=6),
    scheme=st.sampled_from(SCHEMES),
)
def test_the_most_nodes_that_will_do_are_found(
    left: int, before: int, per_node: int, rule: RankRule, racks: list[str], scheme: Scheme
) -> None:
    nodes, domains = NODES[:left], dict(zip(NODES, racks, strict=True))
    chosen, reasons = fewer_nodes(nodes, before, per_node, rule, domains, scheme)
    counts = range(len(chosen) + 1, min(left, before - 1) + 1)
    assert not chosen or possible(chosen, per_node, rule, domains, scheme)
    assert len(set(chosen)) == len(chosen) < before and set(chosen) <= set(nodes)
    assert not any(
        possible(some, per_node, rule, domains, scheme)
        for count in counts
        for some in itertools.combinations(nodes, count)
    )
    assert [reason.split(" ")[0] for reason in reasons] == [str(n) for n in reversed(counts)]


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
            {
                "num_experts": 8,
                "expert_model_parallel_size": 4,
                "expert_tensor_parallel_size": 1,
            },
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
        ({"load": "/data/other"}, "give --load /data/exports"),
        ({"load": None}, "give --load /data/exports"),
        ({"finetune": True}, "--finetune"),
        ({"no_load_optim": True}, "--no-load-optim"),
        ({"no_save_rng": True}, "--no-save-rng"),
        ({"ckpt_step": 5}, "--ckpt-step"),
        ({"override_ckpt_iteration": 5}, "--override-ckpt-iteration"),
        ({"override_ckpt_iteration": 0}, "--override-ckpt-iteration"),
        ({"ckpt_format": "torch"}, "exports are torch_dist"),
        ({"_is_global_batch_size_explicitly_specified": False}, "without --global-batch-size"),
        ({"data_parallel_size": 64, "overlap_grad_reduce": True}, "fully-reshardable"),
        (
            {"data_parallel_size": 32, "context_parallel_size": 2, "overlap_grad_reduce": True},
            "fully-reshardable",
        ),
        ({"data_parallel_size": 64}, ""),
        ({"data_parallel_size": 64, "overlap_grad_reduce": True, "ddp_bucket_size": 9}, ""),
        (
            {
                "data_parallel_size": 64,
                "overlap_grad_reduce": True,
                "dist_ckpt_optim_fully_reshardable": True,
            },
            "",
        ),
    ],
)
def test_flags_that_would_keep_megatron_from_it_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    found = refusals(megatron(**changes), Path("/data/exports"))
    assert [words in line for line in found] == [True] * bool(words), found


def test_a_release_that_does_not_remember_the_batch_size_is_asked_by_its_value() -> None:
    args = megatron(global_batch_size=8)
    del args._is_global_batch_size_explicitly_specified
    assert len(refusals(args, Path("/data/exports"))) == 1


def test_a_program_that_says_nothing_is_refused_only_where_it_must_say() -> None:
    ranks = Registration(1)
    ranks.layouts["dp0"] = m.Prepare("dp0", 1, 2)
    assert ranks.rank_rule(needed=False) is None
    with pytest.raises(ConfigError, match="DeepSpeed and plain PyTorch do not"):
        ranks.rank_rule(needed=True)
    ranks.layouts["dp0"] = m.Prepare("dp0", 1, 2, RankRule(1, 1, 4))
    assert ranks.rank_rule(needed=True) == RankRule(1, 1, 4)


def test_what_it_needs_of_other_settings_is_said() -> None:
    with pytest.raises(ConfigError, match=r"shrink.*give drain_dir, drain_interval and drain_ex"):
        SnapshotConfig(on_no_spare="shrink", drain_dir=Path("d"), drain_interval=1)
    with pytest.raises(ConfigError, match="--nnodes 2: drop the flag"):
        check_torchrun(["torchrun", "--nnodes", "2", "train.py"], 2, 1, fewer=True)
    with pytest.raises(ConfigError, match="--checkpoint-dir is /own"):
        spec_of(Path("root"), checkpoint_dir=Path("/own"))


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


class Members:
    """Two nodes, of which one is left."""

    active: list[str]

    def __init__(self) -> None:
        self.active = ["n0", "n1"]

    @property
    def ranks(self) -> int:
        return len(self.active)

    def usable(self, admitted: Inventories) -> list[str]:
        return ["n1"]

    def shrink_to(self, nodes: list[str]) -> None:
        self.active = nodes


def try_to_shrink(
    folder: Path,
    exports: bool,
    memory: int = 10,
    committed: bool = True,
    quarantine: Quarantine = Quarantine(),  # noqa: B008  (a frozen value)
) -> tuple[bool, list[JobEvent], Any]:
    """A job of two shards whose newest drained iteration is 10; ``memory`` is what memory has."""
    spec = spec_of(folder)
    record = JobRecord(
        2, "job", JOB, 0, b"", active=("n0", "n1"), shards=SEATS, committed=committed,
        lineage=(Ancestor(1, None),), rank_rule=RankRule(1, 1, 4),
        quarantine=quarantine,
    )  # fmt: skip
    events: list[JobEvent] = []
    observers = Observers()
    observers.add(events.append)

    async def export_durable(node: str, directory: Path) -> None:
        if exports:
            write_export(directory, 10)

    parts: Any = SimpleNamespace(
        state=SimpleNamespace(record=record),
        members=Members(),
        disk=DiskRestores(spec, VirtualCluster("job", ["n0", "n1"], folder / "root")),
    )
    coordinator: Any = SimpleNamespace(durable=None, observers=observers)
    drains: Any = SimpleNamespace(export_durable=export_durable)
    recovery: Any = SimpleNamespace(memory=lambda _: Decision(None, memory, False, (), {}))
    emergency = EmergencyDrain(
        spec, parts.state, coordinator, parts.members, drains, parts.disk, recovery
    )
    inventories: Any = {"n1": None}
    went_on = asyncio.run(emergency.shrink(inventories))
    return went_on, events, parts


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


def test_nodes_are_given_up_only_once_the_export_is_on_disk(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory")
    memory.commit(1, 10)
    drained(memory, tmp_path / "disk")
    went_on, events, parts = try_to_shrink(tmp_path, exports=False)
    assert not went_on and parts.members.active == ["n0", "n1"]
    assert "should hold iteration 10; its newest is -1" in events[-1].text
    went_on, events, parts = try_to_shrink(tmp_path, exports=True, memory=12)
    assert not went_on and "should hold iteration 12; its newest is 10" in events[-1].text
    went_on, events, parts = try_to_shrink(tmp_path, exports=True)
    assert went_on and parts.members.active == ["n1"]
    assert events[-1].kind == "shrunk"


def test_what_the_framework_saved_itself_is_as_good(tmp_path: Path) -> None:
    write_export(tmp_path / "exports", 12)
    went_on, _, _ = try_to_shrink(tmp_path, exports=False, memory=11)
    assert went_on


def test_what_is_newer_is_not_trusted_once_the_job_was_rolled_back(tmp_path: Path) -> None:
    """Its number says nothing of the incarnation that it is of."""
    rewound = Quarantine().rewound(11).settled()
    write_export(tmp_path / "exports", 12)
    memory = Memory(tmp_path / "memory")
    memory.commit(1, 10)
    drained(memory, tmp_path / "disk")
    went_on, events, _ = try_to_shrink(tmp_path, exports=False, quarantine=rewound)
    assert not went_on and "12, maybe of what the job was rolled back from" in events[-1].text
    went_on, _, _ = try_to_shrink(tmp_path, exports=True, quarantine=rewound)
    assert went_on


def test_what_the_framework_saved_since_a_rollback_is_as_good(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory")
    memory.commit(1, 10)
    drained(memory, tmp_path / "disk")
    write_export(tmp_path / "exports", 12)
    rewound = Quarantine().rewound(11).settled(naming(tmp_path / "exports"))

    def try_it() -> tuple[bool, bool]:
        """Whether fewer nodes continue, and whether a recovery would rather have what was
        drained."""
        went_on, _, parts = try_to_shrink(tmp_path, exports=False, quarantine=rewound)
        choice = asyncio.run(parts.disk.look(NOTHING, parts.state.record))
        return went_on, choice.taken is not None

    assert try_it() == (False, True)
    write_export(tmp_path / "exports", 13)
    assert try_it() == (True, False)


def test_a_job_that_never_committed_has_nothing_to_lose(tmp_path: Path) -> None:
    assert try_to_shrink(tmp_path, exports=False, memory=-1, committed=False)[0]


def test_shards_of_the_older_shape_are_forgotten_with_its_nodes(tmp_path: Path) -> None:
    """A shard in memory belongs to the job only as long as its notes say where it is."""
    cluster = VirtualCluster("job", ["n0", "n1"], tmp_path / "root")
    with JobState(tmp_path / "state", "job") as state:
        state.update(active=("n0", "n1"), shards=SEATS)
        coordinator: Any = SimpleNamespace(timing=Timing())
        members = Membership(spec_of(tmp_path), cluster, state, coordinator)
        assert members.places() == dict(zip(SHARDS, ("n0", "n1"), strict=True))
        members.shrink_to(["n1"])
        assert (state.record.active, members.places(), members.ranks) == (("n1",), {}, 1)


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
            _, source = restores.decision(one, held, ["n0", "n1"], corrupt)
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
        _, source = restores.decision(one, held, ["n0", "n1"], ())
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
