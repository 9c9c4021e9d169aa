"""The public interface of a trainer: load, save, fence."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.fewer_ranks import RankRule
from megatron_ft.core.identity import shard_id as make_shard_id
from megatron_ft.trainer import supervised
from megatron_ft.trainer.adapter import State, StateAdapter
from megatron_ft.trainer.boundary import Boundary
from megatron_ft.trainer.captures import Captures
from megatron_ft.trainer.client_protocol import SnapshotClient
from megatron_ft.trainer.clients import active_clients
from megatron_ft.trainer.copier import Copier
from megatron_ft.trainer.engine import CaptureEngine
from megatron_ft.trainer.fence import Fence
from megatron_ft.trainer.late_iterators import LateIterators
from megatron_ft.trainer.offered import OfferedSnapshot
from megatron_ft.trainer.plan import check_replicas, plan_state
from megatron_ft.trainer.preparation import choose_copier, required_bytes
from megatron_ft.trainer.quiet import windows
from megatron_ft.trainer.state import HasCheckpointForm
from megatron_ft.trainer.stats import CaptureStats
from megatron_ft.trainer.ticket import Ticket
from megatron_ft.trainer.warner import Warner
from megatron_ft.trainer.watch.trainer import TrainerWatch

logger = logging.getLogger(__name__)


class Hookable(Protocol):
    """What register_fence needs of an optimizer."""

    def register_step_pre_hook(self, hook: Any, /) -> Any:
        """Call ``hook(optimizer, args, kwargs)`` before each step."""


class SnapshotManager:
    """Takes snapshots of one trainer rank's state into host memory, and restores them.

    Calling sequence: ``load`` once before training; ``save`` at the end of every
    iteration (it captures only where the job agreed to, and skips otherwise); the
    optimizer steps inside ``fence()``, or ``register_fence(optimizer)`` once; ``close``.
    All calls come from the training thread.  After start-up no call raises because of a
    snapshot: what fails is warned of, counted in ``stats`` and reported to the SMP.

    ``state`` is a mapping of names to tensors, DTensors, objects with state_dict and
    load_state_dict, or small values that core.objects.encode takes; or a TrainingState.
    """

    def __init__(
        self,
        config: SnapshotConfig | None = None,
        *,
        shard_id: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        coordinates: tuple[int, ...] = (),
        replicated: Mapping[str, Any] | None = None,
        rank_rule: RankRule | None = None,
        client: SnapshotClient | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Connect to nothing yet; ``load`` or the first ``save`` does.

        ``rank`` and ``world_size`` default to the variables RANK and WORLD_SIZE,
        ``shard_id`` to data-parallel rank ``rank``.  ``coordinates`` are the
        model-parallel ones without the data-parallel one.  ``replicated`` maps prefixes
        of tensor names to the process group whose ranks hold the same bits: each rank
        captures a part of the large ones, and a restore gives every rank the same whole.
        Leave out what is only nearly equal, or restored ranks continue from a mixture.
        ``rank_rule`` says with how many ranks the program could go on from a checkpoint.
        Raises NotUnderSupervisorError outside ``megatron-ft run`` unless ``client`` is given.
        """
        self.config = config or SnapshotConfig.from_env()
        self.rank = supervised.number("RANK", 0) if rank is None else rank
        self.world_size = supervised.number("WORLD_SIZE", 1) if world_size is None else world_size
        self.shard_id = shard_id or make_shard_id(dp=self.rank)
        self.stats = CaptureStats()
        gradients = self.config.straggler_percent > 0
        self.watch = (
            TrainerWatch(None, self.rank) if client else supervised.watch(self.rank, gradients)
        )
        self._client = client or supervised.connect(self.rank)
        self._copier, self._rank_rule = copier, rank_rule
        self._adapt = StateAdapter(replicated)
        self._warn = Warner(logger)
        self._fence = Fence(self.config.fence_timeout_seconds, self.stats)
        self._offered = OfferedSnapshot(self._client, self.shard_id, coordinates, self.world_size)
        self._captures = Captures(self._client, self.stats, self.config.loss_gate, self._warn)
        self._boundary = Boundary(
            self._captures,
            self._fence,
            self._adapt,
            self.stats,
            self._warn,
            self.config.fixed_interval,
        )
        self._hooks: list[Any] = []
        self._late_iterators = LateIterators(self._warn_of_late_iterator)

    @property
    def offered_iteration(self) -> int:
        """The iteration of the snapshot that the job offers this rank, -1 if there is none.

        Asks the SMP the first time.
        """
        offer = self._offered.get()
        return -1 if offer is None else offer.record.iteration

    def offered_objects(self) -> dict[str, Any]:
        """The small objects of the offered snapshot, their digests checked; {} if there is none."""
        return self._offered.objects()

    def expect_load(self) -> None:
        """Make the offered snapshot quick to read, in a thread, while something else is done.

        For callers that know that ``load`` will follow, and have a model to build before.
        """
        self._offered.expect()

    def decline(self, reason: str = "the script declined it", iteration: int = -1) -> None:
        """Start without the offered snapshot; all ranks must, or none.

        It stays in memory, and would be offered again, until a newer one is committed.  The job
        reports the ``reason``, and the ``iteration`` of the checkpoint that training resumes
        from instead (-1: it starts from scratch).
        """
        self._offered.decline(reason, iteration)

    def load(self, into: State) -> int:
        """Restore the snapshot that the job agreed on, in place; its iteration, or 0 if none.

        Every block's digest is checked before a byte of it is loaded.  Raises CorruptBlockError
        naming the blocks, or LayoutMismatchError naming the tensors that differ.  After a
        CorruptBlockError tensors may hold a part of the snapshot: ``prepare``, ``save`` and
        fences then raise it again, and the process has to end.
        """
        offer = self._offered.get()
        if offer is None:
            logger.info("rank %d (%s): no snapshot to load", self.rank, self.shard_id)
            return 0
        started = time.monotonic()
        self._offered.load(offer, self._adapt(into), self.config.replicated_split_bytes)
        self.stats.committed(offer.record.iteration, protected=False)
        seconds = time.monotonic() - started
        self.watch.restored(seconds)
        self._offered.say_restored(offer, seconds, aloud=self.rank == 0)
        if isinstance(into, Mapping):
            self._late_iterators.begin()
        return offer.record.iteration

    def prepare(self, state: State) -> None:
        """Plan the layout and wait for the arena; the first ``save`` does it if you do not.

        Call it when the state is complete: an optimizer's moments exist after its first
        step or a load.  Blocks until all ranks have come here; raises what start-up can
        raise (ArenaMemoryError, LayoutMismatchError, UnencodableError, ControlPlaneError).
        """
        captures = self._captures
        assert captures.engine is None, "prepare was called twice"
        self._offered.require_whole()
        self._offered.get()
        self._late_iterators.end()
        if isinstance(state, Mapping):
            self._warn_of_clients()
        adapted = self._adapt(state)
        layout = plan_state(adapted, self.config.replicated_split_bytes)
        check_replicas(adapted, layout)
        self._offered.check(layout)
        form = adapted.checkpoint_form() if isinstance(adapted, HasCheckpointForm) else b""
        captures.form = form
        path = self._client.prepare(
            layout.hash(),
            required_bytes(layout, adapted.objects(), form),
            self.config.fixed_interval,
            timeout=self.config.register_timeout_seconds,
            rank_rule=self._rank_rule,
        )
        copier = self._copier or choose_copier(adapted, self.config.copy_piece_bytes)
        captures.engine = CaptureEngine(
            path,
            self.shard_id,
            layout,
            copier,
            self._client.begins,
            captures.on_sealed,
            captures.on_abandoned,
        )
        self.watch.training()

    def save(self, iteration: int, state: State) -> Ticket:
        """Say that ``iteration`` has ended, and capture it if the job permits; returns at once.

        Call it at every iteration boundary, on all ranks.
        """
        if self._captures.engine is None:
            self.prepare(state)
        captures = self._captures
        try:
            self.watch.iteration_ended(iteration)
            windows().check()
            captures.times.end(time.monotonic(), self.stats.stall_seconds)
            ticket = self._boundary.take(iteration, state, declined=self._offered.declined)
            captures.times.begin(time.monotonic(), self.stats.stall_seconds, captures.under_way)
            return ticket
        except Exception as error:
            # Snapshots are a service to training and must never end it.
            self._warn("save", "save(%d) failed: %r; training goes on", iteration, error)
            return self._boundary.skip(iteration)

    def report_loss(self, loss: float) -> None:
        """Tell the loss of the iteration that is about to end; before its ``save``.

        With the setting ``loss_gate`` a loss that is not finite, or a spike, keeps the
        snapshots of the state before and after it from replacing the last good one.  A rank that
        reports once must do so in every iteration; ranks without a loss never do.
        """
        for snapshot, problem in self._captures.verdicts.report(loss):
            self._captures.judge(snapshot, problem)

    @contextmanager
    def fence(self) -> Iterator[None]:
        """Around whatever changes captured tensors: waits for a running copy, and only then.

        The wait is at most ``fence_timeout_seconds``; then the capture is abandoned.
        """
        self._before_step()
        yield

    def forget_tensors(self) -> None:
        """Let go of the tensors that were captured, so that their memory can be given back.

        For calls that free it or replace them (offloading, for one): before such a call, inside
        ``fence()``.  Waits for a running copy, as a fence does, and is no fence itself.  What a
        TrainingState remembers is its own to let go of.
        """
        captures = self._captures
        self._fence.hold(captures.run)
        self._adapt.forget_tensors()
        if captures.engine is not None:
            captures.engine.binding.forget()

    def register_fence(self, optimizer: Hookable) -> Any:
        """Put the fence before each ``optimizer.step()``; returns the hook's handle."""
        handle = optimizer.register_step_pre_hook(
            lambda _optimizer, _args, _kwargs: self._before_step()
        )
        self._hooks.append(handle)
        groups = getattr(optimizer, "param_groups", ())
        self.watch.follow(parameter for group in groups for parameter in group["params"])
        return handle

    def close(self) -> None:
        """Let a running capture end, then unmap the arena and leave the SMP."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._late_iterators.end()
        self.watch.close()
        captures = self._captures
        engine, captures.engine = captures.engine, None
        try:
            if engine is not None:
                self._fence.wait(captures.run)
                engine.close(self.config.fence_timeout_seconds)
                for snapshot in captures.verdicts.end():
                    captures.judge(snapshot, "")
        finally:
            self._client.close()

    def _warn_of_clients(self) -> None:
        """What such a library keeps is in a snapshot only if the mapping has it."""
        if self.rank == 0 and (found := active_clients()):
            self._warn(
                "clients",
                "%s keeps training state of its own: the count of steps, schedules, the position "
                "in the data. A snapshot holds what its mapping names and nothing else. After "
                "a restore the script has to bring all the rest to the restored iteration",
                ", ".join(sorted(found)),
            )

    def _warn_of_late_iterator(self) -> None:
        self._warn(
            "iterator",
            "a pass over a DataLoader was begun after the restore: it draws from the random "
            "states that were restored, so training differs from the run that was lost. Put "
            "deepspeed_ext.ResumableLoader(loader) into the state and iterate that, or begin the "
            "pass before load()",
        )

    def _before_step(self) -> None:
        self._offered.require_whole()
        self.watch.step()
        self._fence.wait(self._captures.run)
