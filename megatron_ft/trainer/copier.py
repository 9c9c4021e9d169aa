"""Copies of live tensors into an arena, without stopping training: the promise of every copier.

Copies are cut in pieces, so that they can be stopped in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.core.cores import MOST_THREADS, own_cores

PIECE_BYTES = 16 << 20
"""Copies are cut in pieces of this size: a stop is noticed between them."""

ShouldStop = Callable[[], bool]

Bytes = npt.NDArray[np.uint8]


RANGE_BYTES = 64 << 20
"""Memory is made ready for copies in ranges that end at addresses divisible by this: a call for
a whole slot could hold up other threads of the process for its whole time."""


class CopyItem(NamedTuple):
    """One copy: ``target`` is a view of the arena with the shape and dtype of ``source``."""

    source: torch.Tensor
    target: torch.Tensor


class CopyList(list[CopyItem]):
    """Copies that are made again and again: the list never changes.

    In ``plan`` a copier keeps what it found out about its tensors.  The list's owner drops it
    when one of them is given other memory, or another form.
    """

    plan: Any = None


class Copier(Protocol):
    """Moves tensors into an arena.

    Calling sequence: ``attach`` once with the data regions of the slots; then for each
    snapshot ``stage`` and ``mark`` in the training thread at the iteration boundary and
    ``copy`` in the copy thread; ``detach`` before the regions are unmapped.
    """

    def attach(self, region: Bytes) -> None:
        """Make one of the ``ranges`` of a data region ready as a target; called once for each."""

    def stage(self, items: Sequence[CopyItem]) -> list[CopyItem]:
        """Secure tensors that forward may change; returns what ``copy`` has still to move."""

    def mark(self) -> Any:
        """Remember this point of the training thread's work: copies must come after it."""

    @property
    def pool(self) -> Executor | None:
        """Threads that digest what the copier has brought; None where its own thread does."""

    def copy(
        self,
        items: Sequence[CopyItem],
        mark: Any,
        should_stop: ShouldStop,
        arrivals: Arrivals | None = None,
    ) -> bool:
        """Copy all items; True when every byte has arrived.

        ``should_stop`` is asked before each piece; True ends the copy and False is returned.
        On every way out, exceptions included, nothing writes to the targets any more.
        ``arrivals`` gets each piece, which lies in its region, when that is there.
        """

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """A context in the copy thread whose device work follows the mark; training continues.

        All of it is done when the context is left.
        """

    def enter_thread(self) -> None:
        """Called once in the copy thread before its first copy."""

    def detach(self) -> None:
        """Forget the regions; no copy may be running."""


def spare_threads() -> int:
    """Threads that verify and copy at a restore, where no setting says how many."""
    return min(MOST_THREADS, own_cores())


def ranges(address: int, length: int) -> Iterator[tuple[int, int]]:
    """First and last offset of each range of memory that begins at ``address``."""
    first = RANGE_BYTES - address % RANGE_BYTES
    edges = [0, *range(first, length, RANGE_BYTES), length]
    return pairwise(edges)


def pieces(item: CopyItem, piece_bytes: int) -> Iterator[CopyItem]:
    """Cut a copy so that it can be stopped in between.

    Nothing is cut of what is not contiguous, on either side: its flattening would be a copy.
    """
    source, target = item
    if source.nbytes <= piece_bytes or not (source.is_contiguous() and target.is_contiguous()):
        yield item
        return
    step = max(1, piece_bytes // source.element_size())
    flat_source, flat_target = source.view(-1), target.view(-1)
    for start in range(0, flat_source.numel(), step):
        yield CopyItem(flat_source[start : start + step], flat_target[start : start + step])


MAX_BATCH = 256
"""Most tensors in one call: a stop is noticed between calls."""


def batches(items: Iterable[CopyItem], piece_bytes: int) -> Iterator[list[CopyItem]]:
    """Pieces, with neighbours gathered up to ``piece_bytes``.

    One call for many small tensors, made with move(), takes the GIL once and not for
    each of them: thousands of calls would fight with the training thread for it.
    """
    batch: list[CopyItem] = []
    gathered = 0
    for item in items:
        for piece in pieces(item, piece_bytes):
            if batch and (gathered + piece.source.nbytes > piece_bytes or len(batch) == MAX_BATCH):
                yield batch
                batch, gathered = [], 0
            batch.append(piece)
            gathered += piece.source.nbytes
    if batch:
        yield batch


def note(arrivals: Arrivals, batch: Sequence[CopyItem]) -> None:
    """Digest what a batch has brought; its bytes are there."""
    targets = [target for _, target in batch]
    arrivals.read([one.data_ptr() for one in targets], [one.nbytes for one in targets])


def move(batch: Sequence[CopyItem], non_blocking: bool = False) -> None:
    """Copy a batch; with ``non_blocking`` a pinned target is complete when its stream is."""
    targets = [target for _, target in batch]
    torch._foreach_copy_(targets, [source for source, _ in batch], non_blocking)
