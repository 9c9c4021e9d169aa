"""What a capture leaves in its slot, and when it is not sealed though all was copied."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.core import copy_crc
from megatron_ft.core.identity import SnapshotId
from megatron_ft.trainer.cpu import CpuCopier
from tests.support.captures import BLOCK, WAIT, FakeSmp, make_manager
from tests.support.copies import each_way


def test_padding_is_nobodys_whatever_earlier_captures_have_left(smp: FakeSmp) -> None:
    """A slot is longer than most shards in it, and zeroing the rest would cost time each time."""
    state: dict[str, Any] = {"weights": torch.ones(3000), "objects": "a" * 5000}
    first = make_manager(smp)
    first.prepare(state)
    first.close()
    assert smp.arena is not None
    smp.arena.data(0, writable=True)[:] = 255
    manager = make_manager(smp)
    manager.prepare(state)
    longest = 0
    for iteration, length in enumerate((10, 5000, 20), 1):
        state["objects"] = "a" * length
        snapshot = smp.grant(iteration)
        manager.save(iteration, state)
        smp.wait_ended()
        record, data = smp.sealed_records[snapshot], smp.arena.data(0)
        assert digest.verify_shard(data, record, BLOCK) == []
        longest = max(longest, record.used_bytes)
        assert (data[longest:] == 255).all()
    manager.close()


def test_a_seal_that_broke_off_leaves_nothing_in_the_next_one(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"weights": torch.ones(3000), "objects": ""}
    manager = make_manager(smp)
    manager.prepare(state)

    def capture(iteration: int, length: int) -> SnapshotId:
        state["objects"] = "a" * length
        snapshot = smp.grant(iteration)
        manager.save(iteration, state)
        smp.wait_ended()
        return snapshot

    def broken(*_: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(digest, "digest_blocks", broken)
        assert "injected" in smp.abandoned_ids[capture(1, 9000)]
    sealed = capture(2, 10)
    assert smp.arena is not None
    assert digest.verify_shard(smp.arena.data(0), smp.sealed_records[sealed], BLOCK) == []
    manager.close()


def odd_state() -> dict[str, Any]:
    """Tensors with gaps between them, strided, of no elements and of several blocks."""
    sizes = (3, 70_000, 1, 0, 12_345)
    state: dict[str, Any] = {f"w{n}": torch.rand(size) for n, size in enumerate(sizes)}
    return {**state, "strided": torch.rand(300, 200).t(), "bytes": torch.ones(5, dtype=torch.uint8)}


@pytest.mark.usefixtures(each_way.__name__)
def test_every_way_of_copying_seals_what_verifies(smp: FakeSmp) -> None:
    """Whatever lay in the slot before."""
    state = odd_state()
    first = make_manager(smp)
    first.prepare(state)
    first.close()
    assert smp.arena is not None
    smp.arena.data(0, writable=True)[:] = 255
    manager = make_manager(smp, copier=CpuCopier(100_000))
    manager.prepare(state)
    snapshot = smp.grant(1)
    manager.save(1, state)
    smp.wait_ended()
    region, record = smp.arena.data(0), smp.sealed_records[snapshot]
    assert digest.verify_shard(region, record, BLOCK) == []
    manager.close()
    smp.offer_last()
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert make_manager(smp).load(into=fresh) == 1
    assert all(torch.equal(fresh[name], state[name]) for name in state)


class Spoiling(CpuCopier):
    """Memory loses a bit between the copy and the seal."""

    smp: FakeSmp

    def copy(self, items: Any, *others: Any) -> bool:
        complete = super().copy(items, *others)
        if any(target.nbytes > BLOCK for _, target in items):
            assert self.smp.arena is not None
            self.smp.arena.data(0, writable=True)[3 * BLOCK + 7] ^= 1
        return complete


@pytest.mark.skipif(copy_crc.load() is None, reason=copy_crc.describe())
def test_a_bit_that_the_arena_loses_before_the_seal_is_found(smp: FakeSmp) -> None:
    copier = Spoiling(1 << 20)
    copier.smp = smp
    manager, state = make_manager(smp, copier=copier), {"weights": torch.ones(300_000)}
    manager.prepare(state)
    snapshot = smp.grant(1)
    manager.save(1, state)
    smp.wait_ended()
    assert smp.arena is not None
    assert digest.verify_shard(smp.arena.data(0), smp.sealed_records[snapshot], BLOCK) == [3]
    manager.close()


class RevokedAtItsEnd(CpuCopier):
    """Has copied everything when the permit is taken back."""

    smp: FakeSmp

    def copy(self, *arguments: Any) -> bool:
        complete = super().copy(*arguments)
        self.smp.revoke()
        return complete


def test_a_permit_that_is_revoked_after_the_copy_seals_nothing(smp: FakeSmp) -> None:
    copier = RevokedAtItsEnd(1 << 20)
    copier.smp = smp
    manager, state = make_manager(smp, copier=copier), {"weights": torch.ones(3000)}
    manager.prepare(state)
    snapshot = smp.grant(1)
    ticket = manager.save(1, state)
    smp.wait_ended()
    assert ticket.captured.result(WAIT)
    assert smp.sealed_records == {} and "revoked" in smp.abandoned_ids[snapshot]
    manager.close()


class Attaching(CpuCopier):
    """Notes how many slots of ``slot_bytes`` it was given."""

    slot_bytes = 0

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self._bytes = 0
        self.twice = Event()

    @property
    def given(self) -> float:
        return self._bytes / self.slot_bytes

    def attach(self, region: Any) -> None:
        super().attach(region)
        self._bytes += region.nbytes
        if self.given == 2:
            self.twice.set()


def half_made(smp: FakeSmp, state: dict[str, Any]) -> Arena:
    """An arena for a state, with the memory of one slot."""
    first = make_manager(smp)
    first.prepare(state)
    first.close()
    assert smp.arena is not None
    header = smp.arena.header
    smp.arena.close()
    smp.arena = Arena.create(smp.path, header, replace=True, first_slot=True)
    assert smp.arena.holes
    return smp.arena


def test_a_slot_is_attached_when_it_has_memory_and_captures_do_not_wait(smp: FakeSmp) -> None:
    state = {"weights": torch.ones(1 << 20)}
    arena, copier = half_made(smp, state), Attaching()
    copier.slot_bytes = arena.header.geometry.data_bytes
    manager = make_manager(smp, copier=copier)
    manager.prepare(state)
    assert copier.given == 1 and arena.holes
    snapshot = smp.grant(1, 0)
    manager.save(1, state)
    smp.wait_ended()
    assert snapshot in smp.sealed_records and arena.holes, "nothing of the other slot was touched"
    arena.complete(lambda: True)
    assert copier.twice.wait(WAIT) and copier.given == 2
    snapshot = smp.grant(2, 1)
    manager.save(2, state)
    smp.wait_ended()
    assert snapshot in smp.sealed_records
    manager.close()


def test_a_trainer_that_ends_first_waits_for_no_memory(smp: FakeSmp) -> None:
    state, copier = {"weights": torch.ones(1 << 20)}, Attaching()
    arena = half_made(smp, state)
    copier.slot_bytes = arena.header.geometry.data_bytes
    manager = make_manager(smp, copier=copier)
    manager.prepare(state)
    manager.close()
    assert copier.given == 1 and arena.holes
