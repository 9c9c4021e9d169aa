"""The snapshot that the job offers a rank at its start: looked at, declined, or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ft.arena.arena import Arena
from megatron_ft.capture.client_protocol import RestoreOffer, SnapshotClient
from megatron_ft.capture.restore import compare, read_objects, restore_shard, verify
from megatron_ft.capture.state import TrainingState
from megatron_ft.errors import CorruptBlockError, LayoutMismatchError
from megatron_ft.shard import ShardLayout


class OfferedSnapshot:
    """What one rank starts from; asks the SMP when it is first needed.

    ``declined`` says that the rank starts without it, ``restored`` is the layout it had.
    """

    def __init__(
        self,
        client: SnapshotClient,
        shard_id: str,
        coordinates: tuple[int, ...],
        world_size: int,
    ) -> None:
        self.declined = False
        self.restored: ShardLayout | None = None
        self._client, self._shard_id = client, shard_id
        self._coordinates, self._world_size = coordinates, world_size
        self._offer: RestoreOffer | None = None
        self._greeted = False

    def get(self) -> RestoreOffer | None:
        """The offer, None if there is none or it was declined."""
        if not self._greeted:
            self._greeted = True
            self._offer = self._client.hello(self._shard_id, self._coordinates, self._world_size)
        return self._offer

    def objects(self) -> dict[str, Any]:
        """Its small objects, their digests checked; {} if there is none."""
        offer = self.get()
        if offer is None:
            return {}
        with self.telling(), Arena.open(offer.arena_path) as arena:
            verify(arena, offer.slot, offer.record, self._report_corrupt, objects_only=True)
            return read_objects(arena, offer.slot, offer.record)

    def decline(self) -> None:
        """Start without it; it stays in memory until a newer one is committed."""
        self.declined = self.get() is not None
        self._offer = None

    def load(self, offer: RestoreOffer, into: TrainingState, split_bytes: int) -> None:
        """Check every digest, then restore in place; errors as of SnapshotManager.load."""
        with self.telling():
            arena = Arena.open(offer.arena_path)
            try:
                verify(arena, offer.slot, offer.record, self._report_corrupt)
                self.restored = restore_shard(arena, offer.slot, offer.record, into, split_bytes)
            finally:
                arena.close_beside()

    def check(self, layout: ShardLayout) -> None:
        """LayoutMismatchError unless what was restored fits what is captured from now on."""
        if self.restored is not None:
            with self.telling():
                compare(self.restored, layout)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What keeps this shard from its snapshot is told to the job before it ends this rank."""
        try:
            yield
        except (LayoutMismatchError, CorruptBlockError) as error:
            if isinstance(error, LayoutMismatchError):
                self._client.unfit(error)
            # Closing sends what is queued; the process is about to end.
            self._client.close()
            raise

    def _report_corrupt(self, blocks: int) -> None:
        assert self._offer is not None
        self._client.corrupt(self._offer.record.snapshot, blocks)
