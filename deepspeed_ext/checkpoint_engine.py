"""DeepSpeed's checkpoint engine, wrapped: a checkpoint counts once every rank has written it.

The files are those of the inner engine.  DeepSpeed's rank 0 names a checkpoint in ``latest`` when
it has committed its own files; here it does when all ranks have, which they agree on within a
stated time.  The module defines a subclass of DeepSpeed's, so it is imported when an engine exists,
not with the package.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)

from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.checkpoint.native import LATEST
from megatron_ft.core.errors import CheckpointSaveError, ControlPlaneError, explain

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
"""Extra wait of the other ranks, so that rank 0's decision reaches them before they time out."""


class Agreement:
    """Meetings of all ranks, numbered; every rank comes to each of them once, or is missed.

    They go through the job's key-value store, not through collectives: a rank that failed
    elsewhere can still report it, a rank that is gone is named, and nothing is left half-joined.
    ``store`` is a torch.distributed.Store that all ranks share, ``name`` distinguishes agreements
    in it.  Rank 0 collects and decides, so the cost grows with the number of ranks, not with its
    square.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta, name: str = ""
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._seconds = timeout.total_seconds()
        self._prefix = f"deepspeed_ext/agreement{name}"
        self._meeting = 0

    def meet(self, subject: str, failure: str = "") -> dict[int, str]:
        """Wait for every rank; what has failed, by rank, the same on all of them.

        ``failure`` says what failed here.  ControlPlaneError names ranks that did not come
        within the timeout; ``subject`` says for what, as "all files are written".
        """
        if self._rank:
            self.leave(failure)
        else:
            self._decide(failure)
        key, limit = self._key("decision"), time.monotonic() + self._seconds + _GRACE_SECONDS
        missing, failures = [0], {}
        if self._appears(key, limit):
            missing, failures = json.loads(self._store.get(key))
        if missing:
            raise ControlPlaneError(
                f"ranks {missing} did not report within {self._seconds:.0f} s that {subject}: see "
                "their logs; DEEPSPEED_TIMEOUT (minutes) sets how long the others wait"
            )
        return {int(rank): text for rank, text in failures.items()}

    def leave(self, failure: str) -> None:
        """Report to the next meeting, and do not wait for it."""
        self._meeting += 1
        if self._rank:
            self._store.set(self._key(f"rank{self._rank}"), failure)
        else:
            self._announce([], {0: failure})

    def _decide(self, own_failure: str) -> None:
        """Rank 0: collect what the others report, and announce it."""
        self._meeting += 1
        deadline = time.monotonic() + self._seconds
        failures, missing = {0: own_failure} if own_failure else {}, []
        for rank in range(1, self._world_size):
            key = self._key(f"rank{rank}")
            # Once the time is over each of the rest is checked once.
            if not self._appears(key, deadline):
                missing.append(rank)
            elif text := self._store.get(key).decode():
                failures[rank] = text
            self._store.delete_key(key)
        self._announce(missing, failures)

    def _announce(self, missing: list[int], failures: dict[int, str]) -> None:
        self._store.set(self._key("decision"), json.dumps([missing, failures]))
        # A rank at this meeting has read the decision of the one before the last.
        self._store.delete_key(self._key("decision", self._meeting - 2))

    def _key(self, name: str, meeting: int | None = None) -> str:
        return f"{self._prefix}/{self._meeting if meeting is None else meeting}/{name}"

    def _appears(self, key: str, deadline: float) -> bool:
        # Asked again and again: a wait would hold the client that process groups use as well.
        try:
            while not self._store.check([key]):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            raise ControlPlaneError(
                f"rank {self._rank} lost the job's key-value store, which rank 0 or the launcher "
                f"serves: {error}"
            ) from error
        return True


_agreements = itertools.count()


def world_agreement(timeout: timedelta | None = None) -> Agreement:
    """The agreement of all ranks; the timeout is DeepSpeed's own unless given.

    Ranks make theirs in the same order, as they do with process groups.
    """
    from deepspeed.constants import default_pg_timeout
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    place = distributed.get_rank(), distributed.get_world_size()
    limit = default_pg_timeout if timeout is None else timeout
    return Agreement(_get_default_store(), *place, limit, str(next(_agreements)))


class SnapshotCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Delegates to ``inner``; ``commit`` returns only if every rank has saved and committed.

    A call that fails on one rank is kept until ``commit``, so that all ranks go through the
    same barriers of DeepSpeed; then that rank raises what it met, and the others
    CheckpointSaveError, which names it.
    """

    def __init__(self, inner: CheckpointEngine, agreement: Agreement | None = None) -> None:
        # The base class knows no more than a name; its parameters are the inner engine's.
        self.name, self.inner = inner.name, inner
        self._agreement = agreement or world_agreement()
        self._failure: Exception | None = None
        self._written: list[Path] = []
        self._publishes = self._writes_latest = self._awaited = False

    @contextmanager
    def publishing(self, publishes: bool, writes_latest: bool) -> Iterator[None]:
        """One ``save_checkpoint`` that DeepSpeed runs inside this with ``save_latest=False``.

        ``publishes`` is what the user asked for; ``writes_latest`` says that this rank is to
        write it.  An error that only this rank meets is reported to the ranks that wait for it.
        """
        self._end()
        self._publishes, self._writes_latest, self._awaited = publishes, writes_latest, True
        try:
            yield
        except BaseException as error:
            if self._awaited:
                self._agreement.leave(explain(error))
            raise
        finally:
            self._end()
            self._publishes = self._writes_latest = False

    def create(self, info: CheckpointCommitInfo) -> None:
        self._attempt(self.inner.create, self._as_asked(info))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._attempt(self.inner.makedirs, path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Have the inner engine write one file; nothing more once something has failed."""
        self._attempt(self.inner.save, state_dict, path)
        self._written.append(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.inner.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Collective: the checkpoint is complete and on the disk, and ``latest`` names it.

        Outside :meth:`publishing` it waits for nobody: ``save_16bit_model`` writes on rank 0 alone,
        and some scripts call it there alone.
        """
        self._settle(info, "all its files are written")
        self._attempt(self.inner.commit, self._as_asked(info))
        self._attempt(self._make_durable)
        self._settle(info, "its files are committed")
        if self._publishes:
            if self._writes_latest:
                self._attempt(self._write_latest, info)
            self._settle(info, "`latest` is written")
        self._end()
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self.inner.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        return bool(self.inner.preserves_storage_sharing())

    def __getattr__(self, name: str) -> Any:
        # Whatever else an engine offers to those who know it.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _as_asked(self, info: CheckpointCommitInfo) -> CheckpointCommitInfo:
        return dataclasses.replace(info, save_latest=info.save_latest or self._publishes)

    def _attempt(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            return
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._failure = error

    def _settle(self, info: CheckpointCommitInfo, subject: str) -> None:
        """Raise what failed here or, if others wait for it, on any rank."""
        own = self._failure
        where = f"checkpoint {info.tag!r} in {info.save_dir}"
        failures = {-1: explain(own)} if own else {}
        try:
            if self._awaited:
                failures = self._agreement.meet(f"of {where} {subject}", failures.get(-1, ""))
        except BaseException:
            self._end()
            raise
        if not failures:
            return
        self._end()
        if own is not None:
            raise own
        reports = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
        raise CheckpointSaveError(
            f"{where} is incomplete, so `latest` still names the one before it. {reports}"
        )

    def _end(self) -> None:
        self._failure, self._written, self._awaited = None, [], False

    def _make_durable(self) -> None:
        disk = DiskCalls()
        present = [path for path in self._written if path.is_file()]
        for path in present:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                disk.sync(descriptor)
            finally:
                os.close(descriptor)
        for folder in {path.parent for path in present}:
            disk.sync_folder(folder)

    def _write_latest(self, info: CheckpointCommitInfo) -> None:
        DiskCalls().write_file(Path(info.save_dir, LATEST), [info.tag.encode()])
