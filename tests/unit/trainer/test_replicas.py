"""Digests of replicas: every flipped bit is found, clean states never differ, and who is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc.node_messages import REPLICA_DIGEST_BYTES
from megatron_ft.supervisor.replicas import ReplicaComparison
from megatron_ft.trainer import replicas
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.replicas import ROW_BYTES, ReplicaDigester, digests_of, folded
from megatron_ft.trainer.state import live_tensors
from tests.support.captures import FakeSmp, capture, make_manager
from tests.support.small_training import make_training, train_step

FLIPS, CLEAN = 1000, 5000
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
)


@contextmanager
def as_rank(rank: int, world: int = 3) -> Iterator[None]:
    """Inside, this process is one of several that never talk."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a tensor that is contiguous."""
    data = tensor.detach().view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


def sample(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Bytes of every kind as a tensor; of booleans the two that there are."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,)).bool()
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 4096, 3 * ROW_BYTES + 5])
def test_each_flipped_bit_changes_what_host_and_device_would_digest(
    dtype: torch.dtype, size: int
) -> None:
    tensor, chance = sample(dtype, size), random.Random(size)
    before, device = digests_of([tensor]), folded(tensor)
    for _ in range(50):
        bit = chance.randrange(8 * tensor.nbytes)
        flip(tensor, bit)
        assert digests_of([tensor]) != before
        assert not torch.equal(folded(tensor), device)
        flip(tensor, bit)
    assert digests_of([tensor]) == before and torch.equal(folded(tensor), device)


def test_the_device_digest_finds_flips_that_cancel_in_a_sum() -> None:
    tensor = torch.zeros(4 * ROW_BYTES // 8, dtype=torch.int64)
    clean, chance = folded(tensor), random.Random(3)
    for _ in range(100):
        first, second = chance.sample(range(tensor.numel()), 2)
        sign = 64 * first + 63, 64 * second + 63
        for bit in sign:
            flip(tensor, bit)
        assert not torch.equal(folded(tensor), clean)
        tensor.zero_()
        tensor[first], tensor[second] = 1, -1
        assert not torch.equal(folded(tensor), clean)
        tensor.zero_()


def test_a_view_at_an_odd_place_is_digested_as_its_copy() -> None:
    whole = sample(torch.bfloat16, 2 * ROW_BYTES)
    for view in (whole[3:], whole[1:20000], whole[::3], whole.view(-1, 2).t()):
        assert digests_of([view]) == digests_of([view.clone()])
        assert torch.equal(folded(view), folded(view.contiguous().clone()))


class Replicas:
    """The states of several ranks of one training, all in this process."""

    def __init__(self, ranks: int, exceptions: str = "") -> None:
        self.trainings: list[dict[str, Any]] = []
        self.states: list[MappingState] = []
        self.lives: list[dict[str, torch.Tensor]] = []
        self.digesters = [ReplicaDigester(1, exceptions) for _ in range(ranks)]
        for rank, digester in enumerate(self.digesters):
            with as_rank(rank, ranks):
                training = make_training()
                train_step(training["model"], training["optimizer"])
                training["model"] = DistributedDataParallel(training["model"])
                self.trainings.append(training)
                self.states.append(MappingState(training))
                self.lives.append(live_tensors(self.states[-1]))
                digester.digests(self.states[-1], self.lives[-1], lambda: False)
        self.comparison = ReplicaComparison()
        assert not self.blamed()

    def tensors(self, rank: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, (tensor, _) in self.states[rank].compared().items()}

    def step(self) -> None:
        """Change all ranks in the same way."""
        for rank in range(len(self.states)):
            torch._foreach_mul_([t.detach() for t in self.tensors(rank).values()], 0.999)

    def blamed(self) -> frozenset[str]:
        """The ranks that a comparison blames now."""
        taken = zip(self.digesters, self.states, self.lives, strict=True)
        reports = {
            f"dp{rank}": digester.digests(state, live, lambda: False)
            for rank, (digester, state, live) in enumerate(taken)
        }
        assert all(reports.values())
        verdict = self.comparison.compare(reports, {shard: shard for shard in reports})
        assert not verdict.unlike
        return verdict.shards


def test_a_thousand_flips_of_weights_and_moments_are_found_and_blamed() -> None:
    ranks = Replicas(3)
    chance, seen = random.Random(11), set[str]()
    for _ in range(FLIPS):
        rank = chance.randrange(3)
        name, tensor = chance.choice(list(ranks.tensors(rank).items()))
        bit = chance.randrange(8 * tensor.nbytes)
        flip(tensor, bit)
        assert ranks.blamed() == {f"dp{rank}"}, f"bit {bit} of {name} on rank {rank}"
        flip(tensor, bit)
        assert not ranks.blamed()
        seen.add(name)
    assert seen == set(ranks.tensors(0))


@pytest.mark.slow
@pytest.mark.all_layouts
def test_five_thousand_equal_snapshots_raise_no_alarm() -> None:
    ranks = Replicas(2)
    for _ in range(CLEAN):
        ranks.step()
        assert not ranks.blamed()


def test_of_two_ranks_both_are_blamed_and_an_exception_is_not_looked_at() -> None:
    ranks = Replicas(2, exceptions="model/module.0.*, nothing")
    flip(ranks.tensors(1)["model/module.0.weight"], 5)
    assert not ranks.blamed()
    flip(ranks.tensors(1)["model/module.3.weight"], 5)
    assert ranks.blamed() == {"dp0", "dp1"}


def test_what_a_mapping_is_taken_to_have_alike() -> None:
    """Weights below DDP and their moments; no buffers, no generators, no other module's."""
    ranks = Replicas(2)
    found = set(ranks.tensors(0))
    assert {"model/module.0.weight", "optimizer/state/0/exp_avg"} <= found
    assert not {name for name in found if "running" in name or "rng" in name}
    alone = MappingState(make_training())
    alone.refresh()
    assert not alone.compared()
    other = torch.nn.Linear(8, 8)
    mixed = ranks.trainings[0] | {
        "other": other,
        "optimizer": torch.optim.SGD(
            [*ranks.trainings[0]["model"].parameters(), *other.parameters()]
        ),
    }
    state = MappingState(mixed)
    state.refresh()
    assert all(name.startswith("model/") for name in state.compared())


def test_many_small_tensors_share_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MOST_PARTS", 4)
    ranks = Replicas(3)
    (names,) = ranks.comparison.names.values()
    assert len(names) == 4 and all(name.endswith(" more") for name in names)
    for tensor in ranks.tensors(2).values():
        flip(tensor, 0)
        assert ranks.blamed() == {"dp2"}
        flip(tensor, 0)
        assert not ranks.blamed()


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (3, [1, 4])])
def test_every_so_many_snapshots_are_compared(every: int, due: list[int]) -> None:
    digester = ReplicaDigester(every, "")
    assert [s for s in range(1, 5) if digester.due(SnapshotId(2, s))] == due


class Alike:
    """A state with one weight that two ranks have alike, and a way to fail."""

    def __init__(self, group: Any, fails: bool = False) -> None:
        self.weight, self._group, self._fails = torch.ones(5000), group, fails

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"master": torch.zeros(5)}

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def objects(self) -> dict[str, Any]:
        return {}

    def replicas(self) -> dict[str, Any]:
        return {}

    def load(self, objects: dict[str, Any]) -> None:
        raise NotImplementedError

    def compared(self) -> dict[str, tuple[torch.Tensor, Any]]:
        if self._fails:
            raise RuntimeError("no such group")
        return {"weight": (self.weight, self._group)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_is_sealed_with_the_digests_or_without(smp: FakeSmp, fails: bool) -> None:
    with as_rank(1, 2):
        state = Alike(torch.distributed.group.WORLD, fails)
        manager = make_manager(smp, settings={"compare_replicas": 1})
        capture(smp, manager, state, 1)
        smp.wait_ended()
        manager.close()
    (found,) = smp.replicas.values()
    if fails:
        assert found == ()
        return
    (one,) = found
    assert len(one.digests) == REPLICA_DIGEST_BYTES and one.names == ()
    alone = ReplicaDigester(1, "")
    with as_rank(0, 2):
        state = Alike(torch.distributed.group.WORLD)
        (first,) = alone.digests(state, {}, lambda: False)
    assert (first.group, first.digests, first.names) == (one.group, one.digests, ("weight",))
    state.weight[7] = 2.0
    assert alone.digests(state, {}, lambda: False)[0].digests != one.digests
    assert alone.digests(state, {}, lambda: True) == ()
