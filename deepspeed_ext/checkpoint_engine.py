"""DeepSpeed's checkpoint engine, wrapped: a checkpoint counts once every rank has written it.

The files are those of the inner engine.  DeepSpeed's rank 0 names a checkpoint in ``latest`` when
it has committed its own files; here it does when all ranks have.  The module defines a subclass of
DeepSpeed's, so it is imported when an engine exists, not with the package.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)

from deepspeed_ext.agreement import Agreement, world_agreement
from deepspeed_ext.plain_state import detached, safe_to_load
from megatron_ft.checkpoint.durable import Disk
from megatron_ft.checkpoint.native import LATEST
from megatron_ft.core.errors import CheckpointSaveError


class SnapshotCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Delegates to ``inner``; ``commit`` returns only if every rank has saved and committed.

    A call that fails on one rank is kept until ``commit``, so that all ranks go through the
    same barriers of DeepSpeed; then that rank raises what it met, and the others
    CheckpointSaveError, which names it.  Commits are synchronous for every inner engine: a
    decoupled one still has live tensors in hand when ``save_checkpoint`` would return.
    """

    def __init__(self, inner: CheckpointEngine, agreement: Agreement | None = None) -> None:
        # The base class knows no more than a name; its parameters are the inner engine's.
        self.name = inner.name
        self.inner = inner
        self._agreement = agreement or world_agreement()
        self._failure: Exception | None = None
        self._written: list[Path] = []
        self._writes_latest = False
        self._publishes = False
        self._awaited = False

    @contextmanager
    def publishing(self, publishes: bool, writes_latest: bool) -> Iterator[None]:
        """One ``save_checkpoint`` that DeepSpeed runs inside this with ``save_latest=False``.

        ``publishes`` is what the user asked for; ``writes_latest`` says that this rank is to
        write it.  An error that only this rank meets is told to those that wait for it.
        """
        self._reset()
        self._publishes, self._writes_latest, self._awaited = publishes, writes_latest, True
        try:
            yield
        except BaseException as error:
            if self._awaited:
                self._agreement.leave(_text(error))
            raise
        finally:
            self._reset()
            self._publishes = self._writes_latest = self._awaited = False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint, or another set of files (``save_16bit_model``)."""
        self._attempt(self.inner.create, self._as_asked(info))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder as the inner engine does."""
        self._attempt(self.inner.makedirs, path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Have the inner engine write one file; nothing more once something has failed."""
        if self.inner.is_decoupled():
            state_dict = detached(state_dict)
        self._attempt(self.inner.save, state_dict, path)
        self._written.append(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """What the inner engine reads, with DeepSpeed's own classes allowed to be in it."""
        with safe_to_load():
            return self.inner.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Collective: the checkpoint is complete and on the disk, and ``latest`` names it.

        Outside :meth:`publishing` neither: ``save_16bit_model`` writes on rank 0 alone, and some
        scripts call it there alone.
        """
        if not self._awaited:
            return self._commit_alone(info)
        self._settle(info, "all its files are written")
        self._attempt(self.inner.commit, self._as_asked(info))
        self._attempt(self._make_durable)
        self._settle(info, "its files are committed")
        if self._publishes:
            if self._writes_latest:
                self._attempt(self._write_latest, info)
            self._settle(info, "`latest` is written")
        self._awaited = False
        self._reset()
        return True

    def _commit_alone(self, info: CheckpointCommitInfo) -> bool:
        self._attempt(self.inner.commit, self._as_asked(info))
        self._attempt(self._make_durable)
        failure = self._failure
        self._reset()
        if failure is not None:
            raise failure
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As the inner engine."""
        return bool(self.inner.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """As the inner engine."""
        return bool(self.inner.preserves_storage_sharing())

    def is_decoupled(self) -> bool:
        """Never: DeepSpeed would name a decoupled checkpoint later, or in pipelines not at all."""
        return False

    def cleanup(self) -> None:
        """End what the inner engine has started; DeepSpeed calls it for decoupled engines only."""
        self.inner.cleanup()

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
        own = self._failure
        where = f"checkpoint {info.tag!r} in {info.save_dir}"
        try:
            failures = self._agreement.meet(f"of {where} {subject}", _text(own) if own else "")
        except BaseException:
            self._give_up()
            raise
        if not failures:
            return
        self._give_up()
        if own is not None:
            raise own
        told = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
        raise CheckpointSaveError(
            f"{where} is incomplete, so `latest` still names the one before it. {told}"
        )

    def _give_up(self) -> None:
        self._awaited = False
        self._reset()

    def _reset(self) -> None:
        self._failure = None
        self._written = []

    def _make_durable(self) -> None:
        disk = Disk()
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
        Disk().write_file(Path(info.save_dir, LATEST), [info.tag.encode()])


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
