"""What a capture leaves in its slot, and when it is not sealed though all was copied."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.core.identity import SnapshotId
from megatron_ft.trainer.cpu import CpuCopier
from tests.support.captures import BLOCK, WAIT, FakeSmp, make_manager


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
