"""megatron-ft as the peers are measured; the digests are on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.methods import InMemory, State, saved_at_last
from benchmarks.peers.peer import Peer


class MegatronFt(Peer):
    """SnapshotManager, under `megatron-ft run`."""

    decides = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._method = InMemory(folder)
        self._required = False

    def save(self, iteration: int, state: State) -> bool:
        """Capture where the job has agreed to."""
        return self._method.save(iteration, state)

    def save_alone(
        self, iteration: int, state: State, compute: Callable[[], object]
    ) -> tuple[int, float]:
        """Capture as soon as the job agrees to."""
        self._required = True
        return saved_at_last(self._method, iteration, state, compute)

    def fence(self) -> None:
        """Wait for the copy."""
        self._method.fence()

    def settle(self) -> None:
        """Wait until the last snapshot is protected by parity and committed."""
        kept = self._method.committed()
        if self._required and not kept:
            raise RuntimeError("the snapshot was given up")
        self._required = False

    def pause(self, paused: bool) -> None:
        """As `megatron-ft pause` and `resume`."""
        self._method.pause(paused)

    def idle(self) -> None:
        """Wait for the last snapshot."""
        self._method.idle()

    def load(self, state: State) -> None:
        """Restore in place."""
        self._method.load(state)

    def close(self) -> None:
        """Leave the SMP."""
        self._method.close()
