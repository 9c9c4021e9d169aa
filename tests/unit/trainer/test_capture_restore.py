"""Restores of odd tensors, of damage anywhere, and into states that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ft.core import copy_crc
from megatron_ft.core.errors import ConfigError, CorruptBlockError, LayoutMismatchError
from megatron_ft.trainer.binding import region_tensor, stored_view
from megatron_ft.trainer.fill import CHUNK_BYTES, PIECE_BYTES
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state
from tests.support.captures import BLOCK, FakeSmp, bits, make_manager, saved
from tests.support.copies import each_way


def flip(smp: FakeSmp, at: int) -> None:
    """One bit of what was sealed is another one now."""
    assert smp.arena is not None
    smp.arena.data(0, writable=True)[at] ^= 1


def test_a_large_tensor_that_is_not_contiguous_is_loaded_in_place(smp: FakeSmp) -> None:
    columns = PIECE_BYTES // 4 // 1000 + 1
    turned = torch.randn(1000, columns).t()
    saved(smp, {"turned": turned})
    fresh = {"turned": torch.zeros(1000, columns).t()}
    address = fresh["turned"].data_ptr()
    make_manager(smp).load(into=fresh)
    assert bits(fresh["turned"]) == bits(turned)
    assert fresh["turned"].data_ptr() == address and not fresh["turned"].is_contiguous()


def negated() -> torch.Tensor:
    return torch.randn(700)._neg_view()


def conjugated() -> torch.Tensor:
    return torch.randn(700, dtype=torch.complex64).conj()


@pytest.mark.parametrize("make", [negated, conjugated])
def test_a_tensor_with_a_lazy_sign_is_loaded_by_its_values(
    smp: FakeSmp, make: Callable[[], torch.Tensor]
) -> None:
    value, fresh = make(), {"lazy": make()}
    saved(smp, {"lazy": value})
    make_manager(smp).load(into=fresh)
    assert torch.equal(fresh["lazy"], value)
    assert fresh["lazy"].is_neg() == value.is_neg()
    assert fresh["lazy"].is_conj() == value.is_conj()


@pytest.mark.parametrize("apart", [True, False])
def test_lazy_signs_do_not_hide_what_shares_memory(smp: FakeSmp, apart: bool) -> None:
    """What lies there is compared by its values, as it was stored."""

    def make(apart: bool) -> dict[str, torch.Tensor]:
        memory = torch.arange(1.0, 129.0)._neg_view()
        return {"one": memory[:64], "two": memory[64:] if apart else memory[32:96]}

    state = make(apart)
    saved(smp, state)
    fresh = make(False)
    if apart:
        with pytest.raises(LayoutMismatchError, match="share memory"):
            make_manager(smp).load(into=fresh)
    else:
        assert make_manager(smp).load(into=fresh) == 1
        assert all(torch.equal(fresh[name], state[name]) for name in state)


def half_negated() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.randn(700)
    return memory, memory._neg_view()[100:400]


def half_conjugated() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.randn(700, dtype=torch.complex64)
    return memory, memory.conj()


@pytest.mark.parametrize("names", [("base", "view"), ("view", "base")])
@pytest.mark.parametrize("make", [half_negated, half_conjugated])
def test_a_view_with_a_lazy_sign_is_stored_beside_its_base(
    smp: FakeSmp, make: Callable[[], tuple[torch.Tensor, torch.Tensor]], names: tuple[str, str]
) -> None:
    """Who reads the bytes knows of no sign: an export, a checkpoint on disk."""
    state = dict(zip(names, make(), strict=True))
    saved(smp, state)
    assert smp.arena is not None
    region = region_tensor(smp.arena.data(0))
    for entry in plan_state(MappingState(state), split_bytes=1 << 30).entries:
        assert torch.equal(stored_view(region, entry), state[entry.name].resolve_conj())
    fresh = dict(zip(names, make(), strict=True))
    assert make_manager(smp).load(into=fresh) == 1
    assert all(torch.equal(fresh[name], state[name]) for name in state)


CHUNKS = 5


@pytest.mark.usefixtures(each_way.__name__)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damage_in_any_chunk_of_a_shard_is_found(smp: FakeSmp, chunk: int) -> None:
    """They are loaded in two halves, which a small shard has not."""
    record = saved(smp, {"weights": torch.ones(CHUNKS * CHUNK_BYTES // 4)})
    assert record.tensor_bytes == CHUNKS * CHUNK_BYTES
    at = chunk * CHUNK_BYTES + 7 * BLOCK + 5
    flip(smp, at)
    fresh = {"weights": torch.zeros(CHUNKS * CHUNK_BYTES // 4)}
    with pytest.raises(CorruptBlockError, match=rf" 1 of its blocks .*\({at // BLOCK}\)"):
        make_manager(smp).load(into=fresh)
    # The library leaves out the block, else the chunk that it lies in is left out.
    width = CHUNK_BYTES if copy_crc.load() is None else BLOCK
    loaded = fresh["weights"].view(-1, width // 4)
    bad = loaded[at // width]
    assert not bad.any() and loaded.sum() == loaded.numel() - bad.numel()
    assert smp.corrupt_calls == [(record.snapshot, 1)]


def test_damaged_objects_are_not_shown_before_a_load_either(smp: FakeSmp) -> None:
    record = saved(smp, {"weights": torch.ones(10), "steps": 7})
    flip(smp, record.meta_offset + record.meta_bytes - 1)
    with pytest.raises(CorruptBlockError, match="do not match their digests"):
        make_manager(smp).offered_objects()


def test_nothing_is_written_into_a_tensor_of_another_width(smp: FakeSmp) -> None:
    """It would be written beyond its end."""
    saved(smp, {"weights": torch.ones(1000)})
    memory = torch.zeros(2000, dtype=torch.float16)
    with pytest.raises(LayoutMismatchError, match=r"weights is float16\[1000\], in the snapshot"):
        make_manager(smp).load(into={"weights": memory[:1000]})
    assert not memory.any()


class Made:
    """An object that has its tensors only once it has loaded them; ``change`` is done to them."""

    def __init__(self, content: dict[str, Any], change: Callable[[Any], Any] = dict) -> None:
        self.content, self._change = content, change

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.content = self._change(content)


def test_views_into_tensors_that_are_made_by_the_load_have_their_own_bytes(smp: FakeSmp) -> None:
    flat = torch.randn(30_000)
    content = {"flat": flat, "part": flat[10_000:20_000].view(100, 100)}
    saved(smp, {"made": Made(content), "weights": torch.ones(10)})
    fresh = Made({})
    make_manager(smp).load(into={"made": fresh, "weights": torch.zeros(10)})
    assert {name: bits(tensor) for name, tensor in fresh.content.items()} == {
        name: bits(tensor) for name, tensor in content.items()
    }
    assert fresh.content["part"].data_ptr() == fresh.content["flat"].data_ptr() + 40_000


def test_an_object_that_loads_into_another_form_is_refused(smp: FakeSmp) -> None:
    """All bytes had fitted before it did."""
    content = {"big": torch.ones(10_000)}
    saved(smp, {"made": Made(content)})
    fresh = Made({"big": torch.zeros(10_000)}, lambda loaded: {"big": loaded["big"][:9000]})
    with pytest.raises(LayoutMismatchError, match=r"made/big is float32\[9000\], in the snapshot"):
        make_manager(smp).load(into={"made": fresh})


def refuse(content: Any) -> Any:
    raise RuntimeError("no such field")


def test_nobody_trains_on_what_an_object_refused_to_load(smp: FakeSmp) -> None:
    """Its tensors are the snapshot's by then, and the objects after it are not."""
    saved(smp, {"weights": torch.ones(2000), "made": Made({"n": 1}), "step": {"n": 7}})
    fresh: dict[str, Any] = {
        "weights": torch.zeros(2000),
        "made": Made({"n": 0}, refuse),
        "step": {"n": 0},
    }
    manager = make_manager(smp)
    with pytest.raises(RuntimeError, match="no such field"):
        manager.load(into=fresh)
    assert fresh["weights"].all() and fresh["step"] == {"n": 0}
    for go_on in (lambda: manager.prepare(fresh), lambda: manager.save(1, fresh)):
        with pytest.raises(CorruptBlockError, match="must not train on it"):
            go_on()
    manager.close()


def freed(numel: int) -> torch.Tensor:
    """As a framework leaves a tensor of which it keeps only shards."""
    tensor = torch.ones(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("numel", [5, 100_000])
def test_a_tensor_without_memory_is_not_written_to(smp: FakeSmp, numel: int) -> None:
    saved(smp, {"a": torch.ones(50), "whole": torch.ones(numel)})
    fresh = {"a": torch.zeros(50), "whole": freed(numel)}
    with pytest.raises(ConfigError, match=rf"'whole' of shape \[{numel}\] has no memory"):
        make_manager(smp).load(into=fresh)
    assert not fresh["a"].any()


@pytest.mark.parametrize("numel", [5, 100_000])
def test_a_tensor_without_memory_is_refused_before_training(smp: FakeSmp, numel: int) -> None:
    with pytest.raises(ConfigError, match=rf"'whole' of shape \[{numel}\] has no memory"):
        make_manager(smp).prepare({"a": torch.ones(50), "whole": freed(numel)})
