"""Restores into tensors on a device, by way of page-locked buffers.

Each thread verifies blocks while it copies them into a buffer of its own, and queues the copies
from there on a side stream: the arena need not be page-locked, and no byte of a block reaches the
device before the block was found right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ft.arena.digest import BlockCheck
from megatron_ft.core.fault_points import reach
from megatron_ft.trainer.copier import CopyItem, move
from megatron_ft.trainer.fill import BlockRanges, in_threads

logger = logging.getLogger(__name__)

UNIT_BYTES = 8 << 20
"""Bytes of a buffer, at least one block: long copies, and a cache still holds it as it leaves."""

BUFFERS = 2
"""Of each thread: one is filled while the other one leaves."""


def unit_blocks(block_bytes: int) -> int:
    """Number of blocks that a buffer takes."""
    return max(1, UNIT_BYTES // block_bytes)


class DeviceStream:
    """Copies to one device, on a stream of its own; several threads may use it.

    ``cuda`` is torch.cuda, or something with the same names.
    """

    def __init__(self, device: int, cuda: Any = None) -> None:
        """Waits for all that was begun on the device: first values may come on any stream."""
        self._cuda, self._warned = torch.cuda if cuda is None else cuda, False
        self._cuda.synchronize(device)
        self._stream = self._cuda.Stream(device=device)

    def buffer(self, length: int) -> torch.Tensor:
        """Page-locked memory; where that is refused other memory, from which copies are slower."""
        try:
            return torch.empty(length, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            text = "no page-locked memory for a restore, which is slower without it: %s; raise the "
            if not self._warned:
                logger.warning(text + "limit of locked memory (ulimit -l)", error)
            self._warned = True
            return torch.empty(length, dtype=torch.uint8)

    def copy(self, items: Sequence[CopyItem]) -> Any:
        """Queue copies; the event of their end."""
        with self._cuda.stream(self._stream):
            move(items, non_blocking=True)
            done = self._cuda.Event(blocking=True)
            done.record(self._stream)
        return done

    def finish(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


class BouncedCopy:
    """Copies spans of a region to a device, none of them before its blocks were found right."""

    def __init__(
        self,
        check: BlockCheck,
        cuts: BlockRanges,
        targets: Sequence[torch.Tensor],
        stream: DeviceStream,
    ) -> None:
        """``targets``: flat bytes of the spans that ``cuts`` were made of, a buffer at a time."""
        self._check, self._cuts, self._targets, self._stream = check, cuts, targets, stream

    def run(self, threads: int = 0) -> list[int]:
        """Copy all spans; returns the bad blocks, out of whose buffers nothing was copied.

        All are looked at, by so many threads; 0: by the machine.  Nothing is under way afterwards.
        """
        left, bad, cuts = iter(self._cuts.chunks), list[int](), self._cuts
        middle = len(cuts.chunks) // 2

        def work() -> None:
            length = cuts.step * self._check.block_bytes
            buffers: list[tuple[torch.Tensor, Any]] = []
            for chunk in left:
                if chunk == middle:
                    reach("restore.half")
                if len(buffers) < BUFFERS:
                    buffers.append((self._stream.buffer(length), None))
                buffer, leaves = buffers.pop(0)
                if leaves is not None:
                    leaves.synchronize()
                blocks = cuts.blocks_of(chunk)
                found = self._check.bounce(blocks.start, blocks.stop, buffer.numpy())
                bad.extend(found)
                buffers.append((buffer, None if found else self._send(chunk, buffer)))

        try:
            with torch.no_grad():
                in_threads(work, threads)
        finally:
            # Queued copies read buffers and write to tensors whatever happens here.
            self._stream.finish()
        return sorted(bad)

    def _send(self, chunk: int, buffer: torch.Tensor) -> Any:
        cuts = self._cuts
        pieces = slice(cuts.ends[chunk], cuts.ends[chunk + 1])
        start = chunk * cuts.step * self._check.block_bytes
        columns = cuts.spans, cuts.skipped, cuts.offsets - start, cuts.lengths
        items = [
            CopyItem(buffer[at : at + length], self._targets[span][skipped : skipped + length])
            for span, skipped, at, length in zip(
                *(column[pieces].tolist() for column in columns), strict=True
            )
        ]
        return self._stream.copy(items) if items else None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a flat one."""
    return tensor.view(-1).view(torch.uint8)


def cut_for_buffers(
    offsets: list[int], tensors: Sequence[torch.Tensor], tensor_bytes: int, block_bytes: int
) -> BlockRanges:
    """Spans of a region that begins with ``tensor_bytes``, cut where buffers end."""
    lengths = [tensor.nbytes for tensor in tensors]
    blocks = -(-tensor_bytes // block_bytes)
    return BlockRanges.of(offsets, lengths, blocks, block_bytes, unit_blocks(block_bytes))
