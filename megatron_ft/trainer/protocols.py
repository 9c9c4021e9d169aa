"""The snapshot manager as an integration sees it, so that tests can put theirs in its place.

What the snapshot manager asks of its connection to the SMP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from megatron_ft.core.fewer_ranks import RankRule
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.trainer.stats import CaptureStats
from megatron_ft.trainer.watch.heartbeat import TrainerWatch

OutcomeCallback = Callable[[SnapshotId, str], None]


class RestoreOffer(Protocol):
    """A snapshot of this shard that lies ready in the node's memory."""

    @property
    def arena_path(self) -> Path:
        """The arena file that holds it."""

    @property
    def slot(self) -> int:
        """The slot of that arena."""

    @property
    def record(self) -> SealedRecord:
        """What the bytes must prove to be."""

    @property
    def source(self) -> str:
        """Where the bytes come from, for people: "memory" or "parity"."""


class SnapshotClient(Protocol):
    """One trainer's conversation with the SMP of its node.

    ``hello`` and ``prepare`` come from the training thread, before any capture.
    ``missed`` and ``abandoned`` may come from the training thread while ``begins`` and
    ``sealed`` come from the copy thread, so these must be safe to call from both and must not
    wait for an answer.
    """

    on_outcome: OutcomeCallback | None

    def hello(
        self, shard_id: str, coordinates: tuple[int, ...], world_size: int
    ) -> RestoreOffer | None:
        """Introduce the trainer; the answer is a snapshot to load, or None."""

    def prepare(
        self,
        layout_hash: bytes,
        required_bytes: int,
        interval: int,
        timeout: float = ...,
        rank_rule: RankRule | None = ...,
    ) -> Path:
        """Ask for an arena; returns its path when those of all ranks exist."""

    def begins(self, snapshot: SnapshotId, iteration: int, slot: int) -> None:
        """The slot is wanted now; its header says when it is this snapshot's."""

    def sealed(self, snapshot: SnapshotId, record: SealedRecord) -> None:
        """All bytes and digests are in the granted slot."""

    def missed(self, snapshot: SnapshotId) -> None:
        """The permitted iteration has passed without a capture."""

    def abandoned(self, snapshot: SnapshotId, reason: str) -> None:
        """The capture ended without a result; nothing writes to the slot any more."""

    def restored(self, snapshot: SnapshotId, seconds: float, source: str) -> None:
        """The shard was verified and loaded; returns when that outlives this process."""

    def declined(self, snapshot: SnapshotId, reason: str, iteration: int) -> None:
        """All ranks start without the offer: from a checkpoint of ``iteration``, -1: scratch."""

    def corrupt(self, snapshot: SnapshotId, blocks: int) -> None:
        """So many blocks of the offered shard failed their digests; none of them was loaded."""

    def cost(
        self,
        snapshot: SnapshotId,
        stall_seconds: float,
        copy_seconds: float,
        copied_bytes: int,
        iteration_seconds: float,
        shadow_seconds: float,
    ) -> None:
        """What a capture cost the training thread, and what iterations take beside."""

    def unfit(self, error: Exception) -> None:
        """The shard does not fit the snapshot; starting this trainer again will not help."""

    def close(self) -> None:
        """End the conversation."""


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
