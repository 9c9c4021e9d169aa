"""Tensors that were filled one by one and turn out to share memory: whose bytes are there now?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.shard import LayoutEntry
from megatron_ft.trainer.addresses import reach_bytes
from megatron_ft.trainer.binding import live_part, stored_view


class Filled(NamedTuple):
    """A tensor that was given the bytes of an entry."""

    entry: LayoutEntry
    tensor: torch.Tensor

    def holds(self, region: torch.Tensor) -> bool:
        """Whether it has them still."""
        now = live_part(self.tensor.detach().resolve_conj().resolve_neg(), self.entry)
        return torch.equal(_bytes(now.cpu()), _bytes(stored_view(region, self.entry)))


def require_all_held(filled: Sequence[Filled], region: torch.Tensor) -> None:
    """LayoutMismatchError if filling one tensor has changed another.

    A plan makes one entry of what lies within a contiguous tensor; others that overlap, such as
    transposed weights that are tied, have bytes of their own each.  These are equal if the
    tensors shared memory when they were saved as well.
    """
    places = [(one.tensor.data_ptr(), reach_bytes(one.tensor)) for one in filled]
    wrong = [filled[n].entry.name for n in that_touch(places) if not filled[n].holds(region)]
    if wrong:
        raise LayoutMismatchError(
            f"{len(wrong)} tensors share memory with others here and have other values than those "
            f"in the snapshot: {', '.join(sorted(wrong)[:8])}. Give each tensor memory of its own, "
            "as in the run that saved it"
        )


def that_touch(places: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the (address, length) that overlap another."""
    order = sorted((n for n, (_, length) in enumerate(places) if length), key=places.__getitem__)
    linked: list[list[int]] = []
    end = -1
    for number in order:
        start, length = places[number]
        if start >= end:
            linked.append([])
        linked[-1].append(number)
        end = max(end, start + length)
    return sorted(number for group in linked if len(group) > 1 for number in group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
