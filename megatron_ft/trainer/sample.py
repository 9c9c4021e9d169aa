"""A sample of what is captured: finds writes to tensors that torch does not count.

C++ optimizers write through raw pointers, and so do numpy views, ``.data`` and replayed CUDA
graphs.  A few pieces of lazily copied tensors, drawn anew for each snapshot, are secured at the
boundary, where the state is right by definition: on a GPU in the order of training's own work, so
nobody waits for the device.  When the copy has ended they are compared with the arena.  So a
difference says that wrong bytes were captured, whenever they were written, and nothing else does:
to compare with live memory instead would miss a write before the copy began, and report one after
it has ended.  Half of the pieces are drawn by bytes and half by tensors, so small ones have their
turn.  Tensors with gaps in memory are left out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from megatron_ft.core.shard import LayoutEntry
from megatron_ft.trainer.addresses import DENSE, has_lazy_sign
from megatron_ft.trainer.copier import Bytes, CopyItem

PIECES = 24
PIECE_BYTES = 256
"""Pieces of one sample, and the length of each: some ten microseconds at a boundary."""


class Excerpt(NamedTuple):
    """A range of bytes of one tensor, as it is stored, and the same in memory.

    ``address`` is that of the tensor, of which ``skipped`` bytes precede the range.
    """

    entry: LayoutEntry
    start: int
    stop: int
    memory: torch.Tensor
    address: int
    skipped: int


class Sample(NamedTuple):
    """Pieces as they were at the boundary, of the tensors on one device.

    ``item`` is the copy of them to the host, to be made with the snapshot's.
    """

    pieces: list[Excerpt]
    item: CopyItem

    @classmethod
    def of(cls, pieces: list[Excerpt]) -> Sample:
        """Secure these pieces, in order with the training thread's work."""
        secured = torch.cat([piece.memory for piece in pieces])
        target = torch.empty(secured.shape, dtype=torch.uint8, device="cpu")
        return cls(pieces, CopyItem(secured, target))

    def miscaptured(self, region: Bytes) -> list[str]:
        """Names of tensors of which other bytes lie in the ``region`` of a slot; once copied."""
        was, wrong, position = self.item.target.numpy(), [], 0
        for piece in self.pieces:
            length = piece.stop - piece.start
            begin = piece.entry.offset + piece.start
            if (region[begin : begin + length] != was[position : position + length]).any():
                wrong.append(piece.entry.name)
            position += length
        return wrong

    def is_live(self) -> bool:
        """True if the pieces still hold these bytes; waits for their device.  Once copied."""
        now = torch.cat([piece.memory for piece in self.pieces]).cpu()
        return torch.equal(now, self.item.target)


class Sampler:
    """Draws samples of the lazily copied tensors of a layout."""

    def __init__(self, entries: Sequence[LayoutEntry]) -> None:
        self._entries = [entry for entry in entries if entry.nbytes]
        self._ends = list(accumulate(entry.nbytes for entry in self._entries))
        self._random = random.Random()  # training's own generators stay as they are
        self._drawn: dict[torch.device, list[Excerpt]] = {}

    @torch.no_grad()
    def samples(self, live: Mapping[str, torch.Tensor]) -> list[Sample]:
        """The sample that was drawn, as of now, for each device; with ``live`` drawn if need be."""
        pieces = list(chain.from_iterable(self._drawn.values()))
        before = [one.address for one in pieces] + [one.address + one.skipped for one in pieces]
        tensors = [live[one.entry.name] for one in pieces] + [one.memory for one in pieces]
        if not pieces or before != list(map(torch.Tensor.data_ptr, tensors)):
            self.draw(live)
        return list(map(Sample.of, self._drawn.values()))

    @torch.no_grad()
    def draw(self, live: Mapping[str, torch.Tensor]) -> None:
        """Choose what the next sample holds; in the copy thread, so that ``samples`` is short.

        What a device may still write to host memory is left out: it would have to be awaited.
        """
        drawn: dict[torch.device, list[Excerpt]] = {}
        for number in range(PIECES if self._entries else 0):
            entry, start, stop = self._range(by_bytes=number % 2 == 0)
            tensor = live[entry.name]
            skipped = entry.start * tensor.element_size() + start
            if (
                type(tensor) in DENSE
                # Of another form by now: a read behind its end would resize its storage.
                and skipped + stop - start <= tensor.nbytes
                and tensor.is_contiguous()
                and tensor.data_ptr()
                and not has_lazy_sign(tensor)
                and not (tensor.is_cpu and tensor.is_pinned())
            ):
                memory = _bytes_of(tensor, skipped, stop - start)
                piece = Excerpt(entry, start, stop, memory, tensor.data_ptr(), skipped)
                drawn.setdefault(tensor.device, []).append(piece)
        self._drawn = drawn

    def forget(self) -> None:
        self._drawn = {}

    def _range(self, *, by_bytes: bool) -> tuple[LayoutEntry, int, int]:
        place = self._random.randrange(self._ends[-1])
        index = bisect_right(self._ends, place)
        first = place - (self._ends[index] - self._entries[index].nbytes)
        if not by_bytes:
            index = self._random.randrange(len(self._entries))
            first = self._random.randrange(self._entries[index].nbytes)
        entry, start = self._entries[index], first // PIECE_BYTES * PIECE_BYTES
        return entry, start, min(start + PIECE_BYTES, entry.nbytes)


def _bytes_of(tensor: torch.Tensor, skipped: int, length: int) -> torch.Tensor:
    """Bytes of a contiguous tensor, by its storage: a view would keep it from being swapped."""
    first = tensor.storage_offset() * tensor.element_size() + skipped
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage(), first, (length,), (1,))
