"""A node with the copy library and one without it read each other's arenas."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from megatron_ft.arena.arena import Arena
from megatron_ft.core import copy_crc
from megatron_ft.core.errors import CorruptBlockError
from tests.support.captures import BLOCK, FakeSmp, bits, make_manager, saved

pytestmark = pytest.mark.skipif(copy_crc.load() is None, reason=copy_crc.describe())
WAYS = ("one pass", "two passes")


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if way == "two passes":
        monkeypatch.setattr(copy_crc, "find", lambda: "left out by a test")


def odd_state(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every width, of no element, with gaps, and over edges of blocks."""
    drawn = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (9 * BLOCK + 5,), dtype=torch.uint8, generator=drawn)
    plane = torch.randn(63, 65, generator=drawn)
    return {
        "bytes": raw,
        "flags": raw[:777] > 99,
        "half": plane.to(torch.bfloat16),
        "turned": plane.t(),
        "every second": plane[:, ::2],
        "complex": torch.complex(plane, plane + 1),
        "scalar": plane[0, 0].clone(),
        "none": plane[:0],
        "wide": torch.randn(3 * BLOCK // 8 + 1, dtype=torch.float64, generator=drawn),
    }


@pytest.mark.parametrize(("captured", "restored"), [*product(WAYS, WAYS)])
def test_each_restores_what_the_other_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: str, restored: str
) -> None:
    state, smp = odd_state(1), FakeSmp(tmp_path)
    use(captured, monkeypatch)
    record = saved(smp, state)
    use(restored, monkeypatch)
    fresh = odd_state(2)
    manager = make_manager(smp)
    assert manager.load(into=fresh) == 1
    manager.close()
    assert {name: bits(one) for name, one in fresh.items()} == {
        name: bits(one) for name, one in state.items()
    }
    # A bit that is wrong in the arena is found by the node that reads it.
    with Arena.open(smp.path) as arena:
        arena.data(0, writable=True)[record.tensor_bytes // 2] ^= 1
    last = make_manager(smp)
    with pytest.raises(CorruptBlockError):
        last.load(into=odd_state(3))
    last.close()
