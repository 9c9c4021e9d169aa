"""Copies from a mapped region into live tensors, by several threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatron_ft.capture.copier import CopyItem, batches
from megatron_ft.capture.cpu import move_serially
from megatron_ft.capture.threads import spare_threads

PIECE_BYTES = 16 << 20
"""What one thread copies at a time."""


class Span(NamedTuple):
    """Bytes to copy: addresses of target and source, and how many."""

    target: int
    source: int
    length: int


class Copies(NamedTuple):
    """What a restore copies: plain bytes, and tensors that need more than that.

    Both ends of the spans must stay where they are until all was copied.
    """

    spans: list[Span]
    items: list[CopyItem]

    def halves(self) -> tuple[Copies, Copies]:
        """The first and the second half of both."""
        spans, items = len(self.spans) // 2, len(self.items) // 2
        return (
            Copies(self.spans[:spans], self.items[:items]),
            Copies(self.spans[spans:], self.items[items:]),
        )


def copy_in_threads(copies: Copies) -> None:
    """Copy everything, with this rank's share of the cores."""
    with ThreadPoolExecutor(spare_threads()) as pool:
        plain = pool.map(_copy_spans, _gathered(copies.spans, PIECE_BYTES))
        others = pool.map(_copy_batch, batches(copies.items, PIECE_BYTES))
        for done in (plain, others):
            for _ in done:
                pass


def _gathered(spans: Iterable[Span], piece_bytes: int) -> Iterator[list[Span]]:
    """Spans cut into pieces, and pieces gathered up to ``piece_bytes``."""
    batch: list[Span] = []
    room = piece_bytes
    for target, source, length in spans:
        at = 0
        while at < length:
            step = min(length - at, room)
            batch.append(Span(target + at, source + at, step))
            at, room = at + step, room - step
            if not room:
                yield batch
                batch, room = [], piece_bytes
    if batch:
        yield batch


def _copy_spans(spans: Sequence[Span]) -> None:
    for span in spans:
        ctypes.memmove(*span)


def _copy_batch(batch: Sequence[CopyItem]) -> None:
    # In each thread: the mode belongs to the thread.
    with torch.no_grad():
        move_serially(batch)
