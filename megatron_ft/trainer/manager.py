"""The public interface of a trainer: load, save, fence."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.config import SnapshotConfig
from megatron_ft.core import private_files
from megatron_ft.core.environment import IMPORTS_NAME, NODE_DIR, ProcessEnvironment
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.identity import RankRule
from megatron_ft.core.identity import shard_id as make_shard_id
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import ReshapeOffer, RestoreOffer, TrainerClient
from megatron_ft.trainer import notices, resumable_loader
from megatron_ft.trainer.calls import RECORDER
from megatron_ft.trainer.capture import CaptureController
from megatron_ft.trainer.capture_arena import PlannedState, plan_start
from megatron_ft.trainer.copier import Copier
from megatron_ft.trainer.engine import choose_copier
from megatron_ft.trainer.fences import Fences
from megatron_ft.trainer.heartbeats import TrainerWatch
from megatron_ft.trainer.loader_habits import Clock
from megatron_ft.trainer.mapping import State, StateAdapter
from megatron_ft.trainer.pending_restore import PendingRestore
from megatron_ft.trainer.state import TrainingState, TrainsInPlace
from megatron_ft.trainer.stats import CaptureStats, Warner
from megatron_ft.trainer.teardown import on_teardown
from megatron_ft.trainer.ticket import Ticket
from megatron_ft.trainer.usage import ManagersOfProcess, StepThread, iteration_number

logger = logging.getLogger(__name__)


def env_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def connect(rank: int) -> TrainerClient:
    """The connection to the node's SMP; NotUnderSupervisorError if there is no supervisor."""
    return TrainerClient(ProcessEnvironment.from_env(), rank, env_int("LOCAL_RANK", 0))


def watch(rank: int) -> TrainerWatch:
    """The watch of this process; errors as ``connect``."""
    return TrainerWatch.start(ProcessEnvironment.from_env(), rank)


class _Registered(NamedTuple):
    """The arena of this rank, and the layout that it is to hold."""

    arena: m.Prepared
    plan: PlannedState


def note_imports() -> None:
    """Note what this process has imported, for trainer hosts to do ahead.

    A start that is slower is all that follows where it cannot be written.
    """
    if env_int("LOCAL_RANK", 0) == 0 and NODE_DIR in os.environ:
        with suppress(OSError, MegatronFTError):
            names = json.dumps(list(sys.modules)).encode()
            private_files.rewrite_file(Path(os.environ[NODE_DIR], IMPORTS_NAME), names)


_open: set[SnapshotManager] = set()
"""Managers of this process that were not closed.

They are kept alive here: a training function that was interrupted has dropped its own, whose
copy thread still maps the arena.
"""


_managers = ManagersOfProcess()


def _close_all() -> None:
    for manager in list(_open):
        manager.close(at_once=True)
    _managers.restarted()


on_teardown(_close_all)


def _say_ends() -> None:
    for manager in list(_open):
        manager.say_end()


# For scripts that end without `close`.
atexit.register(_say_ends)


class SnapshotManager:
    """Takes snapshots of one trainer rank's state into host memory, and restores them.

    Calling sequence: ``load`` once before training; ``save`` at the end of every
    iteration (it captures only where the job agreed to, and skips otherwise); ``close``.
    Optimizers of torch wait for a running copy by themselves; what else changes captured tensors
    does so inside ``fence()``.
    ``last`` is the iteration with which training ends.  After an earlier end the job is not
    finished: see ``close``.
    All calls come from the training thread.  After start-up, which ends with the first ``save``,
    no call raises because of a snapshot: what fails is warned of, counted in ``stats`` and
    reported to the SMP.

    ``state`` is a mapping of names to tensors, DTensors, objects with state_dict and
    load_state_dict, or small values that core.objects.encode takes; or a TrainingState.
    Of modules and optimizers their own tensors are captured, whatever state_dict gives.
    """

    def __init__(
        self,
        config: SnapshotConfig | None = None,
        *,
        shard_id: str | None = None,
        rank: int | None = None,
        coordinates: tuple[int, ...] = (),
        replicated: Mapping[str, Any] | None = None,
        leave_out: Sequence[str] = (),
        rank_rule: RankRule | None = None,
        last: int = 0,
        client: TrainerClient | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Connect to nothing yet; ``load`` or the first ``save`` does.

        ``rank`` defaults to the variable RANK, ``shard_id`` to data-parallel rank ``rank``.
        ``coordinates`` are the model-parallel ones without the data-parallel one.
        ``replicated`` maps prefixes of tensor names to the process group whose ranks hold
        the same bits: each rank captures a part of the large ones, and a restore gives every
        rank the same whole.
        Leave out what is only nearly equal, or restored ranks continue from a mixture.
        ``leave_out`` are patterns, as of ``fnmatch``, of parameters and buffers of modules that are
        not captured, such as ``model/*.rope_cache``; a restore leaves them as the program made
        them.  Objects that are in no mapping by intent go there by their class.
        ``rank_rule`` says with how many ranks the program could resume from a checkpoint.
        ``last`` is the iteration with which training ends (0: the setting last_iteration).
        Raises NotUnderSupervisorError outside ``megatron-ft run``, and UsageError for a second
        manager of one process, unless ``client`` is given.
        """
        if client is None:
            _managers.require_first([manager.shard_id for manager in _open])
        self.config = config or SnapshotConfig.from_env()
        self.rank = env_int("RANK", 0) if rank is None else rank
        self.shard_id: str = shard_id or make_shard_id(dp=self.rank)
        self.stats = CaptureStats()
        self.watch = TrainerWatch(None, self.rank) if client else watch(self.rank)
        RECORDER.record_to(self.watch.file)
        self._client = client or connect(self.rank)
        self._copier, self._rank_rule = copier, rank_rule
        self._adapt = StateAdapter(replicated, leave_out)
        self._warn = Warner(logger)
        threads = self.config.fixed_copy_threads
        self._pending = PendingRestore(self._client, self.shard_id, coordinates, threads)
        self._captures = CaptureController(self._client, self.config, self.stats, self._warn)
        self._fences = Fences(self._before_step)
        self._registered: _Registered | None = None
        self._last, self._reached = last or self.config.last_iteration, -1
        self._said_end = self._unprotected = False
        self._thread, self._saved = StepThread(), False
        _open.add(self)

    @property
    def offered_iteration(self) -> int:
        """The iteration of the snapshot that the job offers this rank, -1 if there is none.

        Asks the SMP the first time.
        """
        offer = self._pending.get()
        return -1 if offer is None else offer.iteration

    def offered_objects(self) -> dict[str, Any]:
        """The small objects of the offered snapshot, their digests checked; {} if there is none."""
        return self._pending.objects()

    def decline(self, reason: str = "the script declined it", iteration: int = -1) -> None:
        """Start without the offered snapshot; all ranks must, or none.

        It stays in memory, and would be offered again, until a newer one is committed.  The job
        reports the ``reason``, and the ``iteration`` of the checkpoint that training resumes
        from instead (-1: it starts from scratch).
        """
        self._pending.decline(reason, iteration)

    def load(self, into: State) -> int:
        """Restore the snapshot that the job agreed on, in place; its iteration, or 0 if none.

        ConfigError names what of the state could not be captured or filled, also where there is
        nothing to load.  Every block's digest is checked before a byte of it is loaded.  Raises
        CorruptBlockError naming the blocks, or LayoutMismatchError naming the tensors that differ.
        After a CorruptBlockError tensors may hold a part of the snapshot: ``prepare``, ``save`` and
        fences then raise it again, and the process has to end.

        A snapshot of another layout is reshaped first: the call waits for all ranks, and raises
        what ``prepare`` can raise.
        """
        Clock.runs = True
        offer, state = self._pending.get(), self._adapt(into)
        self._reached = 0 if offer is None else offer.iteration
        if isinstance(state, TrainsInPlace) and not isinstance(offer, RestoreOffer):
            state.require_ready()
        if offer is None:
            logger.info("rank %d (%s): no snapshot to load", self.rank, self.shard_id)
            return 0
        if isinstance(offer, ReshapeOffer):
            self._pending.expect_reshape(state)
            self._registered = self._register(state)
            self._pending.reshaped(self._registered.arena)
            offer = self._pending.get()
        assert isinstance(offer, RestoreOffer)
        started = time.monotonic()
        self._pending.load(offer, state)
        self.stats.committed(offer.record.iteration, protected=False)
        seconds = time.monotonic() - started
        self.watch.restored()
        self._pending.report_restored(offer, seconds, aloud=self.rank == 0)
        return offer.record.iteration

    def prepare(self, state: State) -> None:
        """Plan the layout and wait for the arena; the first ``save`` does it if you do not.

        Call it when the state is complete: an optimizer's moments exist after its first
        step or a load.  Blocks until all ranks have come here; raises what start-up can
        raise (ArenaMemoryError, ConfigError, UnencodableError, ControlPlaneError), and
        UsageError if a snapshot is offered that was neither loaded nor declined.
        """
        assert not self._captures.is_open, "prepare was called twice"
        self._pending.require_whole()
        self._pending.require_answered()
        if self.rank == 0 and isinstance(state, Mapping):
            notices.warn_of_clients(self._warn)
        with self._pending.reporting():
            adapted = self._adapt(state)
            arena, plan = self._registered or self._register(adapted)
            self._registered = None
            copier = self._copier or choose_copier(adapted, self.config.fixed_copy_threads)
        # A restart has nothing new to say, and nothing to wait for.
        if self.rank == 0 and self._pending.restored is None:
            notices.say_what_is_captured(self.shard_id, adapted, plan.layout, self._warn)
        self._captures.open(Path(arena.arena), self.shard_id, plan.layout, copier, plan.form)
        self._fences.open()
        self.watch.training()

    def _register(self, state: TrainingState) -> _Registered:
        """Plan the layout, bring it to the job, and wait for the arena."""
        plan = plan_start(state, self._pending.restored, self._warn)
        # Before all ranks have come here, when the supervisor asks for it.
        note_imports()
        given = (
            self._pending.give_layout(plan.layout, plan.form) if self._pending.reshapes else None
        )
        try:
            arena = self._client.prepare(
                plan.required_bytes,
                self.config.fixed_interval,
                timeout=self.config.register_timeout_seconds,
                rank_rule=self._rank_rule,
            )
            return _Registered(arena, plan)
        finally:
            if given is not None:
                given.unlink(missing_ok=True)

    def save(self, iteration: int, state: State) -> Ticket:
        """Say that ``iteration`` has ended, and capture it if the job permits; returns at once.

        Call it at every iteration boundary, on all ranks, in the thread that steps the optimizer.
        Numbers may rise by any step that stays the same.  The first call alone raises: UsageError
        for a wrong number, and what ``prepare`` raises.
        """
        if not self._saved:
            iteration = iteration_number(iteration)
        resumable_loader.iteration_ended()
        captures = self._captures.is_open or self._begin(state)
        self._saved = True
        try:
            iteration = iteration_number(iteration)
            self._thread.require()
            self._reached = iteration
            seconds = self.watch.iteration_ended(iteration)
            if not captures:
                return self._captures.skip(iteration)
            return self._captures.end_iteration(
                iteration,
                lambda: self._adapted(state),
                declined=self._pending.declined,
                seconds=seconds,
            )
        except Exception as error:
            # Snapshots are a service to training and must never end it.
            kind = type(error).__name__
            self._warn(kind, "save(%s) failed: %r; training continues", iteration, error)
            return self._captures.skip(iteration)

    def _begin(self, state: State) -> bool:
        """As ``prepare``; False, with a warning, for what must not end a job that was restored."""
        self._pending.require_whole()
        if self._unprotected:
            return False
        try:
            self.prepare(state)
        except MegatronFTError as error:
            if self._pending.restored is None:
                raise
            self._unprotected = True
            self.watch.training()
            text = "no snapshot is taken before the next start: %s; training continues unprotected"
            self._warn("prepare", text, error)
        return self._captures.is_open

    @contextmanager
    def fence(self) -> Iterator[None]:
        """Context for code that changes captured tensors; waits for a running copy first.

        The wait is at most ``fence_timeout_seconds``; then the capture is abandoned.
        """
        self._before_step()
        yield

    def forget_tensors(self) -> None:
        """Let go of the tensors that were captured, so that their memory can be given back.

        For calls that free it or replace them (offloading, for one): before such a call, inside
        ``fence()``.  Waits for a running copy, as a fence does, but does not count as one.  A
        TrainingState lets go of its own references itself.
        """
        self._captures.let_go()
        self._adapt.forget_tensors()

    def register_fence(self, optimizer: Any) -> Any:
        """Put the fence before each ``optimizer.step()``; returns the handle that its
        ``register_step_pre_hook`` gives.

        From the first ``save`` on torch's optimizers are fenced by themselves, and what else in the
        state takes such hooks.
        """
        return self._fences.add(optimizer)

    def close(self, *, finished: bool | None = None, at_once: bool = False) -> None:
        """Let a running capture end, then unmap the arena and leave the SMP.

        ``finished`` is whether the program's plan is done.  By default it is once the last
        iteration has been saved, and not known without a ``last``.  After an earlier end, or an
        unknown one, the job's memory is drained or kept, and the next start resumes.
        ``at_once``: give the capture up.  A second call does nothing.
        """
        if not at_once:
            self.say_end(finished)
        self._fences.close()
        RECORDER.record_to(None)
        self.watch.close()
        if self._saved and self in _open:
            _managers.closed(self.shard_id)
        try:
            self._captures.close(at_once=at_once)
        finally:
            self._client.close()
        # Last: the teardown closes again what an interruption has left.
        _open.discard(self)

    def say_end(self, finished: bool | None = None) -> None:
        """Report, once, whether the plan is done, as far as that is known; as ``close`` does."""
        if finished is None and self._last > 0:
            finished = self._reached >= self._last
        if finished is None or self._said_end or self not in _open or not self._client.shard_id:
            return
        self._said_end = True
        self._client.ending(self._reached, finished)

    def _adapted(self, state: State) -> TrainingState:
        """The state to be captured; what has become a part of it is fenced."""
        if isinstance(state, Mapping):
            self._fences.cover(state)
        return self._adapt(state)

    def _before_step(self) -> None:
        self._pending.require_whole()
        self._thread.steps()
        self.watch.step()
        self._captures.fence()
