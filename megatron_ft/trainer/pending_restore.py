"""The snapshot that the job offers a rank at its start: read, declined, or loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.arena.arena import Arena
from megatron_ft.core import private_files
from megatron_ft.core.errors import CorruptBlockError, MegatronFTError, UsageError
from megatron_ft.core.shard import ShardLayout, pack_meta
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import ReshapeOffer, RestoreOffer, TrainerClient
from megatron_ft.trainer.restore import SealedShard, read_objects, restore_shard
from megatron_ft.trainer.state import TrainingState, require_reshapes

logger = logging.getLogger(__name__)


class RestoredShard(NamedTuple):
    """The layout of a shard that was loaded, and the bytes of a slot that it took."""

    layout: ShardLayout
    used_bytes: int


class PendingRestore:
    """The snapshot that one rank starts from; asks the SMP when it is first needed.

    ``declined`` says that the rank starts without it, ``restored`` is the shard it had,
    ``broken_off`` the error that ended a load, whose first bytes may be in tensors by then.
    """

    def __init__(
        self,
        client: TrainerClient,
        shard_id: str,
        coordinates: tuple[int, ...],
        threads: int = 0,
    ) -> None:
        """So many ``threads`` verify and copy; 0: by the machine."""
        self._threads = threads
        self.declined = False
        self.restored: RestoredShard | None = None
        self.broken_off: Exception | None = None
        self._client, self._shard_id, self._coordinates = client, shard_id, coordinates
        self._offer: RestoreOffer | ReshapeOffer | None = None
        self._greeted = False

    def get(self) -> RestoreOffer | ReshapeOffer | None:
        if not self._greeted:
            self._greeted = True
            self._offer = self._client.hello(self._shard_id, self._coordinates)
        return self._offer

    def objects(self) -> dict[str, Any]:
        """Its small objects, their digests checked; {} if there is none, or of another layout."""
        offer = self.get()
        if not isinstance(offer, RestoreOffer):
            return {}
        with self.reporting(), Arena.open(offer.arena_path) as arena:
            return read_objects(self._shard(arena, offer))

    def decline(self, reason: str, iteration: int) -> None:
        """Start without it, and report that; it stays in memory until a newer one is committed."""
        offer = self.get()
        if offer is not None:
            self._client.send(m.Declined(self._shard_id, offer.snapshot, reason, iteration))
            self.declined, self._offer = True, None

    @property
    def reshapes(self) -> bool:
        """True if the offer waits for the layout of this rank."""
        return isinstance(self._offer, ReshapeOffer)

    def expect_reshape(self, into: TrainingState) -> None:
        with self.reporting():
            require_reshapes(into).expect_reshape()

    def give_layout(self, layout: ShardLayout, form: bytes) -> Path:
        """Write, where encoders read it, the layout to which the shard is reshaped; the file."""
        path = Path(m.layout_path(str(self._client.node_folder() / self._shard_id)))
        private_files.replace_file(path, pack_meta(layout.to_bytes(), {}, form))
        return path

    def reshaped(self, prepared: m.Prepared) -> None:
        """Take the shard that was made of the snapshot as what is offered."""
        assert prepared.restore is not None, "the job fills every shard of a reshape"
        self._offer = RestoreOffer(
            Path(prepared.arena), prepared.slot, prepared.restore, "another layout"
        )

    def load(self, offer: RestoreOffer, into: TrainingState) -> None:
        """Restore in place, every block verified before it; errors as of SnapshotManager.load."""
        with self.reporting():
            arena = Arena.open(offer.arena_path)
            try:
                # The call alone holds the shard, whose memory is unmapped while what follows runs.
                layout = restore_shard(self._shard(arena, offer), into)
                self.restored = RestoredShard(layout, offer.record.used_bytes)
            except Exception as error:
                # After any error some tensors and small objects may be the snapshot's by now.
                self.broken_off = error
                raise
            finally:
                arena.close_beside()

    def _shard(self, arena: Arena, offer: RestoreOffer) -> SealedShard:
        return SealedShard(arena, offer.slot, offer.record, self._report_corrupt, self._threads)

    def report_restored(self, offer: RestoreOffer, seconds: float, *, aloud: bool) -> None:
        """Report to the job that its shard was loaded; ``aloud``: to the user as well."""
        record = offer.record
        text = (
            f"megatron-ft: {self._shard_id} restored iteration {record.iteration} "
            f"(snapshot {record.snapshot}) from {offer.source} in {seconds:.3f} s"
        )
        logger.info(text)
        if aloud:
            print(text, file=sys.stderr, flush=True)
        self._client.restored(record.snapshot)

    def require_whole(self) -> None:
        """CorruptBlockError if what was loaded is only a part of the snapshot, for any reason."""
        if self.broken_off is not None:
            raise CorruptBlockError(
                "this rank has loaded a part of a snapshot and must not train on it: end the "
                "process, so that the job recovers"
            ) from self.broken_off

    def require_answered(self) -> None:
        """UsageError if the offer was neither loaded nor declined: training began without it."""
        if (offer := self.get()) is not None and self.restored is None:
            with self.reporting():
                raise UsageError(
                    f"the job offers {self._shard_id} the snapshot of iteration {offer.iteration}, "
                    "and the script saves without it: it would train again from the beginning. "
                    "Call `iteration = snapshots.load(into=state)` before the loop and begin "
                    "behind that iteration, or snapshots.decline() on all ranks"
                )

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports to the job why this shard cannot be restored or captured, before that ends the
        rank: errors that another start would meet again, and wrong bytes.  Behind a restore no
        error ends it.
        """
        try:
            yield
        except MegatronFTError as error:
            fatal = error.lasting or isinstance(error, CorruptBlockError)
            if not fatal or self.restored is not None:
                raise
            if error.lasting:
                self._client.send(m.Unfit(self._shard_id, error))
            # Closing sends what is queued; the process is about to end.
            self._client.close()
            raise

    def _report_corrupt(self, blocks: int) -> None:
        assert isinstance(self._offer, RestoreOffer)
        self._client.send(m.CorruptShard(self._shard_id, self._offer.record.snapshot, blocks))
