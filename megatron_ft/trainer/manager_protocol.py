"""The snapshot manager as an integration sees it, so that tests can put theirs in its place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_ft.trainer.stats import CaptureStats
from megatron_ft.trainer.watch.trainer import TrainerWatch


class Manager(Protocol):
    """What a run asks of its manager; see SnapshotManager."""

    @property
    def stats(self) -> CaptureStats:
        """What snapshots have cost so far, and how safe they are."""

    @property
    def offered_iteration(self) -> int:
        """Of the snapshot that this rank was offered, -1 if none."""

    @property
    def watch(self) -> TrainerWatch:
        """Where training is, for those who look for hangs."""

    def offered_objects(self) -> dict[str, Any]:
        """What the offered snapshot holds beside tensors; {} if none was offered."""

    def expect_load(self) -> None:
        """``load`` will follow once something else is done: make it quick meanwhile."""

    def decline(self, reason: str = ..., iteration: int = ...) -> None:
        """Start without the offered snapshot, as all ranks do; see SnapshotManager."""

    def load(self, into: Any) -> int:
        """Restore the offered snapshot in place; its iteration."""

    def prepare(self, state: Any) -> None:
        """Plan the layout and wait for the arena."""

    def save(self, iteration: int, state: Any) -> Any:
        """Say that an iteration has ended; captures it if the job permits."""

    def report_loss(self, loss: float) -> None:
        """The loss of the iteration that is about to end, for the loss gate."""

    def register_fence(self, optimizer: Any) -> Any:
        """Wait for a running capture before each of the optimizer's steps."""

    def fence(self) -> AbstractContextManager[None]:
        """Around whatever else changes captured tensors: waits for a running capture first."""

    def forget_tensors(self) -> None:
        """Let go of captured tensors, once no copy reads them: their memory is given back next."""

    def close(self) -> None:
        """End captures and leave."""
