"""SnapshotManager on real arenas, in one process."""

from __future__ import annotations

import _pickle
import ctypes
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import first_meta_block
from megatron_ft.core.errors import (
    ConfigError,
    CorruptBlockError,
    LayoutMismatchError,
    UnencodableError,
)
from megatron_ft.trainer import engine
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.fill import CHUNK_BYTES
from megatron_ft.trainer.identity_check import sharing_storage
from megatron_ft.trainer.interrupt import RestartRequested
from megatron_ft.trainer.manager import SnapshotManager, _close_all
from megatron_ft.trainer.restore import SealedShard
from tests.support.captures import (
    BLOCK,
    WAIT,
    FakeSmp,
    GatedCopier,
    bits,
    capture,
    gated,
    make_manager,
    saved,
)
from tests.support.small_training import advance, fingerprint, make_training


def test_restored_training_is_bit_identical_to_one_never_interrupted(smp: FakeSmp) -> None:
    state = make_training()
    manager = make_manager(smp)
    for iteration in (1, 2, 3):
        with manager.fence():
            advance(state, iteration)
    ticket = capture(smp, manager, state, 3)
    assert ticket.captured.result(WAIT) and not ticket.skipped
    for iteration in (4, 5):
        with manager.fence():
            advance(state, iteration)
    expected = fingerprint(state)
    manager.close()

    smp.offer_last()
    fresh = make_training(seed=99)
    parameters = list(fresh["model"].parameters())
    progress = fresh["progress"]
    second = make_manager(smp)
    assert second.load(into=fresh) == 3
    assert all(a is b for a, b in zip(parameters, fresh["model"].parameters(), strict=True))
    assert fresh["progress"] is progress and progress["seen"] == [1, 2, 3]
    for iteration in (4, 5):
        advance(fresh, iteration)
    assert fingerprint(fresh) == expected
    assert smp.restored_calls[0] == ticket.snapshot
    second.prepare(fresh)
    second.close()


def test_a_close_that_was_interrupted_is_done_again(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy thread and its arena would stay, and the process could not restart."""
    threads = threading.active_count()
    manager = make_manager(smp)
    assert capture(smp, manager, make_training()).captured.result(WAIT)
    detach = CpuCopier.detach

    def interrupted(_: CpuCopier) -> None:
        monkeypatch.setattr(CpuCopier, "detach", detach)
        raise RestartRequested

    monkeypatch.setattr(CpuCopier, "detach", interrupted)
    with pytest.raises(RestartRequested):
        manager.close()
    assert manager._captures.is_open
    _close_all()
    assert not manager._captures.is_open and threading.active_count() == threads


def test_neither_a_capture_nor_a_load_pickles_anything(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("something was pickled or unpickled")

    state, fresh = make_training(), make_training(seed=99)
    advance(state, 1)
    for module, name in itertools.product(
        (pickle, _pickle), ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")
    ):
        monkeypatch.setattr(module, name, forbidden)
    manager = make_manager(smp)
    ticket = capture(smp, manager, state)
    assert ticket.captured.result(WAIT) and not ticket.skipped
    manager.close()
    smp.offer_last()
    make_manager(smp).load(into=fresh)
    assert fingerprint(fresh) == fingerprint(state)


def test_a_value_that_cannot_be_stored_stops_the_start_and_later_costs_a_snapshot(
    smp: FakeSmp,
) -> None:
    state: dict[str, Any] = {"weight": torch.ones(8), "schedule": {"warmup": [lambda step: step]}}
    with pytest.raises(UnencodableError, match=r"schedule/warmup/0 .*function.*register_class"):
        make_manager(smp).prepare(state)
    schedule, state["schedule"] = state["schedule"], {"warmup": [1]}
    manager = make_manager(smp)
    assert capture(smp, manager, state).captured.result(WAIT)
    state["schedule"] = schedule
    assert not capture(smp, manager, state, 2, 1).captured.result(WAIT)
    assert manager.stats.abandoned == 1 and "schedule/warmup/0" in str(smp.abandoned_ids)
    state["schedule"] = {"warmup": [2]}
    assert capture(smp, manager, state, 3, 1).captured.result(WAIT)
    manager.close()


def test_a_declined_snapshot_is_not_loaded_and_its_permit_is_missed(smp: FakeSmp) -> None:
    state = {"weight": torch.randn(1000), "iteration": 0}
    manager = make_manager(smp)
    capture(smp, manager, state, 5)
    manager.close()
    smp.offer_last()
    smp.sequence = 0  # a new incarnation
    second = make_manager(smp)
    assert second.offered_iteration == 5
    assert "structures" in second.offered_objects()
    second.decline("older on disk", 3)
    second.decline("again", 3)
    assert [told[1:] for told in smp.declines] == [("older on disk", 3)]
    assert second.offered_iteration == -1 and second.load(into=state) == 0
    second.prepare(state)
    first = smp.grant(8)  # counted from iteration 5, which training has left behind
    assert second.save(3, state).skipped and smp.missed_ids == [first]
    smp.grant(4)
    assert second.save(4, state).captured.result(WAIT)
    second.close()


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    """Each of torch's dense dtypes, as a vector and in another order."""
    named = [getattr(torch, name) for name in dir(torch)]
    made = {}
    for dtype in sorted({one for one in named if isinstance(one, torch.dtype)}, key=str):
        if str(dtype).startswith("torch.q"):
            continue  # quantized: more than a dtype
        # Any bits will do, but for bool.
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (2, 36 * dtype.itemsize))
        for name, row in zip(("", "turned "), raw.to(torch.uint8), strict=True):
            made[f"{name}{dtype}"] = row.clone().view(dtype)
        made[f"turned {dtype}"] = made[f"turned {dtype}"].view(4, 9).t()
    return made


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    """Every dtype and odd shape that a state may hold."""
    torch.manual_seed(3)
    return {
        **tensors_of_all_dtypes(),
        "fp32": torch.randn(100, 37),
        "bf16": torch.randn(1001).bfloat16(),
        "fp16": torch.randn(5, 5).half(),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "int64": torch.randint(-(2**60), 2**60, (7,)),
        "uint8": torch.randint(0, 255, (13,), dtype=torch.uint8),
        "bool": torch.rand(17) > 0.5,
        "complex": torch.randn(9, dtype=torch.complex64),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "strided": torch.randn(20, 30).t(),
        "large": torch.randn(300_000),
    }


def memory(tensor: torch.Tensor) -> bytes:
    """All bytes of a tensor of any dtype, in the order of its memory."""
    storage = tensor.untyped_storage()
    # bytes(storage) would make a number of each byte: seven seconds for 2 MB.
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same form, with other bits."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    made.untyped_storage().fill_(1)
    return made


@pytest.mark.parametrize("slot", [0, 1])
def test_round_trip_of_every_kind_of_tensor(smp: FakeSmp, slot: int) -> None:
    state = tensors_of_all_kinds()
    wanted = {name: memory(tensor) for name, tensor in state.items()}
    saved(smp, state, slot)
    fresh = {name: like(tensor) for name, tensor in state.items()}
    identity = dict(fresh)
    make_manager(smp).load(into=fresh)
    assert {name: memory(tensor) for name, tensor in fresh.items()} == wanted
    assert all(fresh[name] is identity[name] for name in fresh)


@pytest.mark.parametrize("place", ["plain", "inside", "counted"])
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda tensor: tensor.to("meta"),
        lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    ],
)
def test_what_is_not_dense_is_refused_at_the_start(
    smp: FakeSmp, make: Callable[[torch.Tensor], torch.Tensor], place: str
) -> None:
    odd = make(torch.ones(200, 200))
    sampler = Sampler(odd)
    states = {"plain": {"odd": odd}, "inside": {"all": {"odd": odd}}, "counted": {"it": sampler}}
    with pytest.raises(ConfigError, match=r"tensor '.*' is .*: only dense tensors"):
        make_manager(smp).prepare(states[place])


class Sampler:
    """Something of the user's that has a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.value = content["value"]


def test_tied_weights_and_views_are_stored_once(smp: FakeSmp) -> None:
    embedding = torch.nn.Embedding(500, 16)
    head = torch.nn.Linear(16, 500, bias=False)
    head.weight = embedding.weight
    flat = torch.randn(8192)
    state = {"model": torch.nn.ModuleDict({"embedding": embedding, "head": head}), "flat": flat}
    state["part"] = flat[1024:3072].view(64, 32)
    manager = make_manager(smp)
    capture(smp, manager, state)
    assert smp.costs[0][3] == embedding.weight.nbytes + flat.nbytes
    wanted = bits(flat), bits(embedding.weight)
    manager.close()
    smp.offer_last()
    with torch.no_grad():
        flat.zero_()
        head.weight.zero_()
    make_manager(smp).load(into=state)
    assert (bits(flat), bits(embedding.weight)) == wanted
    untied = torch.nn.ModuleDict(
        {"embedding": embedding, "head": torch.nn.Linear(16, 500, bias=False)}
    )
    with pytest.raises(LayoutMismatchError, match=r"model/head\.weight"):
        make_manager(smp).load(into={**state, "model": untied})


def turned(apart: bool) -> dict[str, torch.Tensor]:
    """Of other strides than the planner compares, two tensors or twice the same one."""
    one, two = torch.ones(8, 4).t(), torch.zeros(8, 4).t()
    return {"one": one, "two": two if apart else one}


def overlapping(apart: bool) -> dict[str, torch.Tensor]:
    """Neither lies within the other, but some elements are of both."""
    memory = torch.cat([torch.ones(64), torch.zeros(64)])
    return {"one": memory[:64], "two": memory[64:] if apart else memory[32:96]}


@pytest.mark.parametrize("make", [turned, overlapping])
def test_tensors_that_share_memory_only_where_they_are_loaded_are_refused(
    smp: FakeSmp, make: Callable[[bool], dict[str, torch.Tensor]]
) -> None:
    saved(smp, make(True))
    with pytest.raises(LayoutMismatchError, match="share memory"):
        make_manager(smp).load(into=make(False))


@pytest.mark.parametrize("make", [turned, overlapping])
def test_tensors_that_shared_memory_when_they_were_saved_may_share_it(
    smp: FakeSmp, make: Callable[[bool], dict[str, torch.Tensor]]
) -> None:
    state = make(False)
    state["two"] += torch.rand(state["two"].shape)
    saved(smp, state)
    fresh = make(False)
    assert make_manager(smp).load(into=fresh) == 1
    assert all(torch.equal(fresh[name], state[name]) for name in state)


def test_a_record_that_is_not_of_its_layout_is_refused(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = digest.seal

    def other(data: Any, tensor_bytes: int, **more: Any) -> Any:
        return seal(data, tensor_bytes=tensor_bytes + 64, **more)

    state = {"weights": torch.ones(1000)}
    with monkeypatch.context() as patch:
        patch.setattr(digest, "seal", other)
        saved(smp, state)
    with pytest.raises(LayoutMismatchError, match=r"4032 bytes.*4096.*restore another snapshot"):
        make_manager(smp).load(into=state)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12))
def test_places_that_touch_others_are_all_found(places: list[tuple[int, int]]) -> None:
    bytes_of = [set(range(start, start + length)) for start, length in places]
    touching = {
        n
        for n, one in enumerate(bytes_of)
        for m, two in enumerate(bytes_of)
        if n != m and one & two
    }
    assert set(sharing_storage(places)) == touching


def test_a_tensor_of_fewer_elements_than_it_shows_is_refused_at_the_start(smp: FakeSmp) -> None:
    """It could be captured, and not be filled again."""
    state = {"mask": torch.ones(8, 1).expand(8, 4), "row": torch.ones(3).expand(1, 3)}
    with pytest.raises(ConfigError, match=r"'mask' is expanded.*\.clone\(\)"):
        make_manager(smp).prepare(state)
    state["mask"] = state["mask"].clone()
    make_manager(smp).prepare(state)


@pytest.mark.parametrize("use_fence", [True, False])
def test_nothing_torn_is_sealed(smp: FakeSmp, use_fence: bool) -> None:
    state = {"weights": torch.zeros(200_000)}
    manager, copier = gated(smp, state)
    snapshot = smp.grant(1)
    manager.save(1, state)
    assert copier.started.wait(WAIT)
    if use_fence:
        _open_while_fenced(manager, copier)
        with manager.fence():
            state["weights"] += 1.0
    else:
        state["weights"] += 1.0
        copier.gate.set()
    smp.wait_ended()
    if use_fence:
        record = smp.sealed_records[snapshot]
        assert smp.arena is not None
        assert not smp.arena.data(0)[: record.tensor_bytes].view("f4").any()
    else:
        assert "weights changed outside of a fence" in smp.abandoned_ids[snapshot]
    manager.close()


def _open_while_fenced(manager: SnapshotManager, copier: GatedCopier) -> None:
    """Let the copy continue once the training thread has waited for it for 0.2 s."""

    def waits() -> bool:
        run = manager._captures._run
        return run is not None and run._fence_entered is not None

    def open_gate() -> None:
        deadline = time.monotonic() + WAIT
        while not waits() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        copier.gate.set()

    threading.Thread(target=open_gate, daemon=True).start()


def test_without_any_fence_save_waits_for_its_copy(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(200_000)}
    copier = GatedCopier()
    manager = make_manager(smp, copier=copier)
    manager.prepare(state)
    smp.grant(1)
    _open_while_fenced(manager, copier)
    ticket = manager.save(1, state)
    assert manager._captures._run.moved.is_set()  # type: ignore[union-attr]
    assert ticket.captured.result(WAIT)
    manager.close()


class Views:
    """A TrainingState that makes views each time, and one tensor that a step may change."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weights": self.weights.detach()}

    def boundary_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def objects(self) -> dict[str, Any]:
        return {}

    def replicas(self) -> dict[str, Any]:
        return {}

    def load(self, objects: dict[str, Any]) -> None:
        """The tensor is all."""


def test_tensors_that_are_forgotten_give_their_memory_back(smp: FakeSmp) -> None:
    memory = np.zeros(200_000, np.float32)
    freed, state = weakref.ref(memory), Views(torch.from_numpy(memory))
    del memory
    manager = make_manager(smp)
    manager.forget_tensors()
    for iteration in (1, 2):
        with manager.fence():
            pass
        capture(smp, manager, state, iteration, slot=iteration % 2)
    with manager.fence():
        manager.forget_tensors()
        state.weights.data = torch.ones(200_000)
    assert freed() is None
    capture(smp, manager, state, 3)
    assert smp.arena is not None and smp.arena.data(0)[:800_000].view("f4").all()
    manager.close()


def test_an_optimizer_in_a_mapping_gives_its_memory_back(smp: FakeSmp) -> None:
    module = torch.nn.Linear(400, 400)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    manager, state = make_manager(smp), {"model": module, "optimizer": optimizer}
    capture(smp, manager, state, 1)
    moments = optimizer.state[module.weight]
    moved = weakref.ref(moments["exp_avg"])
    with manager.fence():
        manager.forget_tensors()
        moments["exp_avg"] = moments["exp_avg"].clone()
    assert moved() is None
    capture(smp, manager, state, 2)
    manager.close()


def test_nothing_is_forgotten_while_a_copy_reads_it(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(200_000)}
    manager, copier = gated(smp, state)
    smp.grant(1)
    ticket = manager.save(1, state)
    assert copier.started.wait(WAIT)
    _open_while_fenced(manager, copier)
    manager.forget_tensors()
    assert manager._captures._run.moved.is_set()  # type: ignore[union-attr]
    assert ticket.captured.result(WAIT)
    manager.close()


def test_to_forget_tensors_is_no_fence(smp: FakeSmp) -> None:
    """Whoever calls it at an offload may still step without any fence."""
    state = {"weights": torch.zeros(200_000)}
    copier = GatedCopier()
    manager = make_manager(smp, copier=copier)
    manager.prepare(state)
    manager.forget_tensors()
    smp.grant(1)
    _open_while_fenced(manager, copier)
    manager.save(1, state)
    assert manager._captures._run.moved.is_set()  # type: ignore[union-attr]
    manager.close()


def test_a_fence_that_times_out_abandons_the_capture(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(200_000)}
    manager, copier = gated(smp, state, fence_timeout_seconds=0.05)
    snapshot = smp.grant(1)
    ticket = manager.save(1, state)
    with manager.fence():
        state["weights"] += 1.0
    assert not smp.abandoned_ids, "reported while the copier could still write"
    copier.gate.set()
    smp.wait_ended()
    assert "fence" in smp.abandoned_ids[snapshot] and not smp.sealed_records
    assert ticket.committed.result(WAIT) is False
    assert manager.stats.abandoned == 1 and manager.stats.stall_seconds >= 0.05
    second = capture(smp, manager, state, 2, slot=1)
    assert second.captured.result(WAIT)
    manager.close()


def test_missed_skipped_and_captured_are_told_apart(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(100)}
    manager = make_manager(smp)
    assert manager.save(1, state).skipped
    future = smp.grant(5)
    assert manager.save(2, state).skipped and not smp.missed_ids
    assert manager.save(6, state).skipped
    assert manager.save(7, state).skipped
    assert smp.missed_ids == [future]
    smp.grant(8)
    smp.revoke()
    assert manager.save(8, state).skipped
    assert len(smp.missed_ids) == 2
    # The first word may have died with an SMP: it is repeated for as long as it is asked for.
    assert manager.save(8, state).skipped
    assert len(smp.missed_ids) == 3
    ticket = capture(smp, manager, state, 9)
    assert not ticket.skipped and manager.save(9, state).skipped
    stats = manager.stats
    assert (stats.taken, stats.skipped, stats.missed, stats.abandoned) == (1, 7, 2, 0)
    assert smp.arena is not None and smp.arena.progress() == 9
    manager.close()


def test_a_permit_that_comes_during_a_capture_is_missed(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(200_000)}
    manager, copier = gated(smp, state)
    first = smp.grant(1)
    manager.save(1, state)
    second = smp.grant(2)
    assert manager.save(2, state).skipped
    assert smp.missed_ids == [second]
    copier.gate.set()
    smp.wait_ended()
    assert "revoked" in smp.abandoned_ids[first]
    manager.close()


def test_nothing_is_written_before_the_smp_gives_the_slot(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds an older snapshot until then, which outlives a trainer that dies now."""
    monkeypatch.setattr(engine, "SLOT_SECONDS", 0.05)
    state = {"weights": torch.full((200_000,), 1.0), "counter": torch.tensor(1)}
    manager = make_manager(smp)
    capture(smp, manager, state, 1)
    assert smp.arena is not None
    before = smp.arena.data(0).tobytes()
    smp.gives = False
    state["weights"].fill_(2.0)
    state["counter"].fill_(2)
    snapshot = smp.grant(2, slot=0)
    assert not manager.save(2, state).captured.result(WAIT)
    smp.wait_ended()
    assert "its slot was not given" in smp.abandoned_ids[snapshot]
    assert smp.begun[-1] == snapshot and smp.arena.data(0).tobytes() == before
    smp.gives = True
    capture(smp, manager, state, 3)
    assert smp.arena.data(0).tobytes() != before
    manager.close()


def test_a_revoked_permit_ends_a_running_capture(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(200_000)}
    manager, copier = gated(smp, state)
    snapshot = smp.grant(1)
    ticket = manager.save(1, state)
    assert copier.started.wait(WAIT)
    smp.revoke()
    copier.gate.set()
    smp.wait_ended()
    assert "revoked" in smp.abandoned_ids[snapshot]
    assert ticket.captured.result(WAIT) is False
    manager.close()


@pytest.mark.parametrize("where", ["first byte", "middle", "objects", "digest table"])
def test_one_flipped_bit_is_found_and_no_object_is_loaded(smp: FakeSmp, where: str) -> None:
    state = make_training()
    advance(state, 1)
    record = saved(smp, state)
    offset = {
        "first byte": 0,
        "middle": record.tensor_bytes // 2,
        "objects": record.meta_offset + record.meta_bytes - 1,
        "digest table": record.digest_offset,
    }[where]
    with Arena.open(smp.path) as arena:
        arena.data(0, writable=True)[offset] ^= 1
    fresh = make_training(seed=5)
    before = fingerprint(fresh)
    second = make_manager(smp)
    with pytest.raises(CorruptBlockError, match="blocks of 4096 bytes"):
        second.load(into=fresh)
    assert smp.corrupt_calls[0][0] == record.snapshot and smp.corrupt_calls[0][1] >= 1
    if where in ("objects", "digest table"):
        assert fingerprint(fresh) == before


def test_a_load_lets_go_of_the_arena_before_it_returns(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its memory is unmapped in a thread, and not when the load's last variable ends."""
    state = {"w": torch.rand(20_000)}
    saved(smp, state)
    shards, let_go = list[weakref.ref[SealedShard]](), list[bool]()
    contents, close_beside = SealedShard.contents, Arena.close_beside

    def seen(shard: SealedShard) -> Any:
        shards.append(weakref.ref(shard))
        return contents(shard)

    def closing(arena: Arena) -> threading.Thread:
        let_go.append(all(shard() is None for shard in shards))
        return close_beside(arena)

    monkeypatch.setattr(SealedShard, "contents", seen)
    monkeypatch.setattr(Arena, "close_beside", closing)
    restarted = make_manager(smp)
    assert restarted.load(into={"w": torch.zeros(20_000)}) == 1
    assert shards and let_go == [True]


def test_nobody_trains_on_a_part_of_a_snapshot(smp: FakeSmp) -> None:
    """The last block of the tensors is bad: what precedes it was loaded when that is found."""
    state = {"w": torch.rand(1_200_000), "step": {"n": 7}}
    bad = first_meta_block(saved(smp, state), BLOCK) - 1
    assert smp.arena is not None
    smp.arena.data(0, writable=True)[bad * BLOCK + 1] ^= 1
    live, restarted = {"w": torch.zeros(1_200_000), "step": {"n": 0}}, make_manager(smp)
    with pytest.raises(CorruptBlockError, match=rf"1 of its blocks .* \({bad}\)"):
        restarted.load(into=live)
    assert live["step"] == {"n": 0}
    assert live["w"].nbytes >= 2 * CHUNK_BYTES
    loaded = live["w"].view(torch.uint8)
    assert not loaded[bad * BLOCK : (bad + 1) * BLOCK].any() and loaded[: 16 * BLOCK].any()
    optimizer = torch.optim.SGD([torch.nn.Parameter(live["w"])])
    restarted.register_fence(optimizer)
    for train in (optimizer.step, lambda: restarted.save(1, live), lambda: restarted.prepare(live)):
        with pytest.raises(CorruptBlockError, match="must not train on it"):
            train()
    restarted.close()
    smp.arena.data(0, writable=True)[bad * BLOCK + 1] ^= 1
    assert make_manager(smp).load(into=live) == 1
    assert torch.equal(live["w"], state["w"]) and live["step"] == {"n": 7}


class BrokenCopier(CpuCopier):
    """A copier that fails in one of its phases."""

    def __init__(self, phase: str) -> None:
        super().__init__(65536)
        self.phase = phase

    def stage(self, items: Any) -> Any:
        """Fail at the boundary."""
        if self.phase == "stage":
            raise RuntimeError("injected at the boundary")
        return super().stage(items)

    def copy(self, *arguments: Any) -> bool:
        """Fail in the copy thread."""
        if self.phase == "copy":
            raise RuntimeError("injected in the copy")
        return super().copy(*arguments)


@pytest.mark.parametrize("phase", ["stage", "copy", "objects", "seal"])
def test_errors_of_a_capture_never_reach_training(
    smp: FakeSmp, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"weights": torch.zeros(1000), "extra": 1}
    manager = make_manager(smp, copier=BrokenCopier(phase))
    manager.prepare(state)
    if phase == "objects":
        state["extra"] = lambda: None
    if phase == "seal":
        monkeypatch.setattr(digest, "seal", None)
    snapshot = smp.grant(1)
    ticket = manager.save(1, state)
    smp.wait_ended()
    assert snapshot in smp.abandoned_ids
    assert ticket.captured.result(WAIT) is (phase == "seal")
    assert ticket.committed.result(WAIT) is False
    manager.close()


def test_an_error_of_the_client_does_not_reach_training(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(1000)}
    manager = make_manager(smp)
    manager.prepare(state)
    smp.missed = None  # type: ignore[assignment,method-assign]
    smp.grant(1)
    assert manager.save(2, state).skipped
    manager.close()


def test_a_layout_that_changes_is_planned_anew_at_the_boundary(smp: FakeSmp) -> None:
    state: dict[str, Any] = {"weights": torch.zeros(1000)}
    manager = make_manager(smp)
    capture(smp, manager, state)
    for change in (
        {"weights": torch.ones(1001)},
        {"weights": torch.ones(1000), "more": torch.ones(3)},
        {},
        state,
    ):
        ticket = capture(smp, manager, change, 2, 1)
        assert ticket.captured.result(WAIT) and ticket.snapshot is not None
        smp.offer_last()
        fresh = {name: torch.zeros_like(value) for name, value in change.items()}
        assert make_manager(smp).load(into=fresh) == 2
        assert [*map(bits, fresh.values())] == [*map(bits, change.values())]
    assert manager.stats.abandoned == 0
    manager.close()


@pytest.mark.parametrize("change", [lambda t: t.resize_(9999), lambda t: t.resize_(20, 500)])
def test_a_tensor_that_takes_another_form_is_captured_in_it_at_the_next_boundary(
    smp: FakeSmp, change: Callable[[torch.Tensor], object]
) -> None:
    """It is the same object, so that only the copy thread sees it, and gives that snapshot up."""
    state: dict[str, Any] = {"weights": torch.zeros(10_000)}
    manager = make_manager(smp)
    capture(smp, manager, state)
    change(state["weights"])
    snapshot = smp.grant(2)
    assert not manager.save(2, state).captured.result(WAIT)
    smp.wait_ended()
    assert "layout has changed" in smp.abandoned_ids[snapshot]
    assert capture(smp, manager, state, 3).captured.result(WAIT)
    assert capture(smp, manager, state, 4, 1).captured.result(WAIT)
    smp.offer_last()
    fresh = {"weights": torch.zeros_like(state["weights"])}
    assert make_manager(smp).load(into=fresh) == 4
    assert bits(fresh["weights"]) == bits(state["weights"])
    manager.close()


def test_a_different_model_is_refused_by_name(smp: FakeSmp) -> None:
    state = make_training()
    advance(state, 1)
    saved(smp, state)
    other = make_training()
    other["model"][0] = torch.nn.Linear(8, 32, bias=False)
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    with pytest.raises(LayoutMismatchError, match=r"model/0\.bias"):
        make_manager(smp).load(into=other)
    other["model"][0] = torch.nn.Linear(8, 32).double()
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    with pytest.raises(LayoutMismatchError, match=r"model/0\.weight is float64"):
        make_manager(smp).load(into=other)
    with pytest.raises(LayoutMismatchError, match="schedule"):
        make_manager(smp).load(into={k: v for k, v in make_training().items() if k != "schedule"})


def test_outcomes_reach_the_ticket(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(1000)}
    manager = make_manager(smp)
    tickets = [capture(smp, manager, state, i, slot=i % 2) for i in (1, 2, 3)]
    assert smp.on_outcome is not None
    smp.on_outcome(tickets[0].snapshot, "protected")
    assert tickets[0].protected.result(WAIT) and not tickets[0].committed.done()
    smp.on_outcome(tickets[0].snapshot, "committed")
    assert tickets[0].committed.result(WAIT)
    smp.on_outcome(tickets[1].snapshot, "aborted")
    assert tickets[1].protected.result(WAIT) is False
    smp.on_outcome(tickets[2].snapshot, "committed")
    assert tickets[2].protected.result(WAIT) is False and tickets[2].committed.result(WAIT)
    stats = manager.stats
    assert (stats.protected_iteration, stats.committed_iteration) == (1, 3)
    manager.close()


def test_parity_of_a_snapshot_that_is_given_up_protects_nothing(smp: FakeSmp) -> None:
    state = {"weights": torch.zeros(1000)}
    manager = make_manager(smp)
    ticket = capture(smp, manager, state)
    assert smp.on_outcome is not None
    for outcome in ("protected", "aborted"):
        smp.on_outcome(ticket.snapshot, outcome)
    assert (manager.stats.protected_iteration, manager.stats.committed_iteration) == (-1, -1)
    manager.close()


def test_registered_fence_runs_before_every_step(smp: FakeSmp) -> None:
    model = torch.nn.Linear(100, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    copier = GatedCopier()
    manager = make_manager(smp, copier=copier)
    manager.register_fence(optimizer)
    optimizer.step()
    state = {"model": model}
    manager.prepare(state)
    smp.grant(1)
    before = bits(model.weight)
    ticket = manager.save(1, state)
    model(torch.ones(100)).sum().backward()
    _open_while_fenced(manager, copier)
    optimizer.step()
    assert ticket.captured.result(WAIT) and bits(model.weight) != before
    smp.wait_ended()
    assert smp.arena is not None
    assert before in smp.arena.data(0).tobytes()
    assert smp.costs[0][1] >= 0.1, "the wait counts as this snapshot's stall"
    manager.close()


def test_buffers_are_secured_at_the_boundary(smp: FakeSmp) -> None:
    norm = torch.nn.BatchNorm1d(4096)
    state = {"norm": norm}
    manager, copier = gated(smp, state)
    snapshot = smp.grant(1)
    manager.save(1, state)
    wanted = bits(norm.get_buffer("running_mean"))
    norm(torch.randn(8, 4096) + 5.0)
    copier.gate.set()
    smp.wait_ended()
    assert snapshot in smp.sealed_records
    manager.close()
    smp.offer_last()
    make_manager(smp).load(into=state)
    assert bits(norm.get_buffer("running_mean")) == wanted
