"""What no way of saving can do without: a thread that copies the state and takes digests."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch

from benchmarks.methods import WAIT_SECONDS, Asked, State
from megatron_ft.arena.digest import digest_blocks, table_entries
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.core.isal import Bytes


class BareCopies(Asked):
    """Copies tensors to warm memory and takes the CRC of each block, as captures do.

    No message is sent, nothing is looked up, no other process runs: what slows training down
    here is the memory, the processor and the interpreter's lock.  ``copies`` and ``digests`` are
    those of the last save.
    """

    def __init__(self, folder: Path) -> None:
        self.copies: list[Bytes] = []
        self.digests: list[list[int]] = []
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None

    def save(self, iteration: int, state: State) -> bool:
        """Begin when the last one is done."""
        self.settle()
        sources = [tensor.view(torch.uint8).numpy() for tensor in state.values()]
        self.copies = self.copies or [np.ones_like(source) for source in sources]
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(sources, self._copied))
        self._thread.start()
        return True

    def _work(self, sources: list[Bytes], copied: threading.Event) -> None:
        try:
            for source, target in zip(sources, self.copies, strict=True):
                np.positive(source, out=target)
        finally:
            copied.set()
        self.digests = [digested(target) for target in self.copies]

    def fence(self) -> None:
        """Wait for the copy."""
        if self._thread is not None and not self._copied.wait(WAIT_SECONDS):
            raise TimeoutError(f"the bare copy did not end within {WAIT_SECONDS:.0f} s")

    def settle(self) -> None:
        """Wait for the CRCs."""
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
            if self._thread.is_alive():
                raise TimeoutError(f"the bare CRCs did not end within {WAIT_SECONDS:.0f} s")

    def close(self) -> None:
        """Let the thread end."""
        self.settle()


def digested(copied: Bytes) -> list[int]:
    """The CRC of each block of what was copied, as an arena has them."""
    table = np.empty(table_entries(copied.size, BLOCK_BYTES), np.uint64)
    digest_blocks(copied, BLOCK_BYTES, table)
    return [int(digest) for digest in table]
