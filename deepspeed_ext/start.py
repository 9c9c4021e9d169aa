"""The start of an engine's training: from memory, disk or scratch, decided once by all ranks.

An engine is complete only when its constructor has returned, and where it starts from is known only
when the script loads a checkpoint, or reads a counter of the engine or its first batch without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from deepspeed_ext import client_state, resumable_loader
from deepspeed_ext.checkpoint_engine import world_agreement
from deepspeed_ext.client_state import ClientState
from deepspeed_ext.counter_reads import SECONDS, CounterReads
from deepspeed_ext.resumable_loader import DataPosition
from deepspeed_ext.saving import Checkpoints
from deepspeed_ext.state import RANDOM, EngineState
from deepspeed_ext.state_parts import RandomStates
from megatron_ft.config.json_section import FOLLOWS_ENGINE
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.loader_position import awaiting_batch
from megatron_ft.trainer.start_choice import (
    WISH,
    DiskStart,
    RankView,
    StartDecision,
    agree,
    supervisor_chose_disk,
)

if TYPE_CHECKING:
    from megatron_ft.trainer.manager import SnapshotManager


class EarlyStart:
    """One decision of all ranks, for the next engine of this process.

    For clients that count steps and skip data before they make their engine.
    ``place`` is that of the rank, as of attachment.place_of; ``objects`` are the small objects of
    the offered snapshot.
    """

    waiting: ClassVar[EarlyStart | None] = None

    def __init__(self, manager: SnapshotManager, place: Mapping[str, Any]) -> None:
        self.manager, self.place = manager, place
        self.objects = manager.offered_objects()
        self.from_memory = False
        # Of an engine it asks for this alone.
        self.checkpoints = Checkpoints(SimpleNamespace(load_universal_checkpoint=lambda: False))
        EarlyStart.waiting = self

    @classmethod
    def claim(cls) -> EarlyStart | None:
        waiting, EarlyStart.waiting = EarlyStart.waiting, None
        return waiting

    def entries(self, client: str) -> Mapping[str, Any]:
        """The state that an adapter gave to the offered snapshot; {} if another did, or none."""
        found = (self.objects.get(client_state.NAME) or {}).get("entries") or {}
        return found if found.get(client_state.CLIENT) == client else {}

    def decide(self, client: str, load_dir: str | None, problem: str = "") -> bool:
        """Decide whether memory serves in the place of the checkpoint in ``load_dir``.  Collective.

        ``problem`` says why this rank cannot use the snapshot.
        """
        offered, disk, is_new = self.manager.offered_iteration, DiskStart(-1), False
        if load_dir is not None:
            disk, is_new = self.checkpoints.find(load_dir, None, offered, self.objects)
        if offered >= 0 and not self.entries(client):
            problem = f"the snapshot does not hold the state of {client}"
        state = self.objects.get(client_state.NAME) or {}
        problem = str(state.get("refused") or problem)
        view = RankView(offered, disk, supervisor_chose_disk(), is_new, problem)
        start = agree(view, self.manager)
        if start is not None and self.place["rank"] == 0:
            print(f"[megatron-ft] {announcement(start, offered, disk)}", flush=True)
        self.from_memory = start is not None and start.from_memory
        return self.from_memory


def announcement(start: StartDecision, offered: int, disk: DiskStart) -> str:
    """A sentence for the user about a decision; ``offered`` is the step of the snapshot."""
    if start.from_memory or disk.iteration >= 0:
        return f"starting from {'memory' if start.from_memory else 'disk'}: {start.reason}"
    return (
        f"warning: starting from scratch, not from the snapshot of step {offered}: {start.reason}"
    )


LOAD_FIRST = (
    "the script trains without calling engine.load_checkpoint: call it at every start, before the "
    "first batch is read, with the folder of its checkpoints, even if that is empty. Or read the "
    "batches from `loader = deepspeed_ext.ResumableLoader(loader)`"
)
_ANEW = f'To start anew on purpose, set "{FOLLOWS_ENGINE}": false in the inmem_snapshot section'


class ScriptState(NamedTuple):
    """The parts of a snapshot that the script decides about, of one engine."""

    checkpoints: Checkpoints
    data: DataPosition
    client: ClientState


class EngineSnapshots:
    """The manager and the state of one engine, made when they are first needed; None before."""

    def __init__(
        self, engine: Any, script: ScriptState, make_manager: Callable[[], SnapshotManager]
    ) -> None:
        self.manager: SnapshotManager | None = None
        self.state: EngineState | None = None
        self._engine, self._script, self._make_manager = engine, script, make_manager

    def made_manager(self) -> SnapshotManager:
        if self.manager is None:
            self.manager = self._make_manager()
        return self.manager

    def made_state(self) -> EngineState:
        if self.state is None:
            parts: dict[str, Any] = {
                resumable_loader.NAME: self._script.data,
                client_state.NAME: self._script.client,
                WISH: self._script.checkpoints,
                RANDOM: RandomStates(),
            }
            self.state = EngineState(self._engine, parts)
        return self.state

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Fence captures, pause the hang watch and forget tensors, which are replaced inside."""
        if self.manager is None:
            yield
            return
        with self.manager.fence(), self.manager.watch.pause():
            self.manager.forget_tensors()
            if self.state is not None:
                self.state.forget_tensors()
            yield

    def close(self) -> None:
        manager, self.manager, self.state = self.manager, None, None
        if manager is not None:
            manager.close()


class Phase(Enum):
    """Stages of the choice where one engine's training starts from."""

    OPEN = auto()
    """Nothing: the script has loaded and read nothing yet."""
    DISK = auto()
    """From the script's own checkpoint, or from scratch."""
    MEMORY = auto()
    """From memory, which was restored in the place of a load."""
    MEMORY_UNLOADED = auto()
    """From memory, which was restored before any load: the script may load yet."""


class EngineStart:
    """Decides once, with all other ranks, and restores if memory serves.

    ``phase`` says what is decided.  An error of a decision is raised again at every later attempt:
    a script that continued after it would train unprotected, or on a part of a snapshot.
    """

    def __init__(
        self,
        engine: Any,
        script: ScriptState,
        snapshots: EngineSnapshots,
        early: EarlyStart | None = None,
    ) -> None:
        self.phase = Phase.OPEN
        self._engine, self._script, self._snapshots = engine, script, snapshots
        self._early, self._restored = early, ""
        self._failure: Exception | None = None
        limit = timedelta(seconds=SECONDS)
        self._reads = CounterReads(engine, world_agreement(limit), self.reading)
        awaiting_batch.add(self)

    @contextmanager
    def lasting_failure(self) -> Iterator[None]:
        """Raise an error of this block again at every later attempt."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def serves(self, load_dir: str, tag: str | None) -> str:
        """Name of the restored snapshot if memory replaces this load; '' if DeepSpeed loads.

        Restores at the first such load.
        """
        find = partial(self._script.checkpoints.find, load_dir, tag)
        with self.lasting_failure():
            if self.phase is Phase.OPEN:
                self._decide(find, "", Phase.MEMORY)
            elif self.phase is Phase.MEMORY_UNLOADED and self._would_load(find(-1, {})[0]):
                raise ConfigError(
                    f"a batch or a counter was read, and the {self._restored} restored, before the "
                    f"script loads another state from {load_dir}: load before the first read"
                )
            elif self._restored:
                self.say(f"not loading {load_dir}: the {self._restored} was restored")
        return self._restored

    def _would_load(self, disk: DiskStart) -> bool:
        """True if a checkpoint goes before the state that was restored without a load."""
        return disk.goes_before(-1 if disk.asked else self._engine.global_steps)

    def reading(self, all_came: Callable[[], bool] = lambda: True) -> None:
        """Restore before the script gets a counter of the engine, or its first batch of a watched
        loader, if it loads nothing.

        Collective, once ``all_came`` is true.  The script is taken to load nothing if it did
        not in the snapshot's incarnation.
        """
        client = self._script.client
        promised = not (client.needs_load or client.objection())
        waits = self.phase is Phase.OPEN and self._early is None
        if not (waits and promised) or self._script.data.warning():
            return
        with self.lasting_failure():
            if not all_came():
                return
            manager = self._snapshots.made_manager()
            wish = manager.offered_objects().get(WISH) or {}
            # Where nothing is offered, a load may follow.
            if manager.offered_iteration >= 0 and "asked" not in wish:
                self._decide_unloaded("")

    def begin_training(self, *, client_ends: bool) -> None:
        """Decide if nothing was loaded, nor a watched loader read.  Collective then.

        ConfigError if a snapshot is to be restored: the script's first batch was read already, and
        would be another one than in the incarnation that was lost.
        """
        if self.phase is not Phase.OPEN:
            return
        client, warning = self._script.client, self._script.data.warning()
        # A pipeline that reads for itself has read nothing yet.
        waits = self._engine.pipeline_parallelism and not warning
        problem = "" if waits and not client.needs_load else LOAD_FIRST
        decided = self._decide_unloaded(problem) is not None or client_ends
        if decided or client.may_start_anew:
            return
        objection, loads = client.new_objection(), client.needs_load or self._script.data.warning()
        if reason := "; ".join(filter(None, [objection, loads and LOAD_FIRST])):
            self.say(f"warning: a restart of this job will be refused: {reason}. {_ANEW}")

    def _decide_unloaded(self, problem: str) -> StartDecision | None:
        """Decide without a load: for memory, if there is no ``problem``."""
        # Steps that were made before this engine was attached count as those of a checkpoint.
        disk = DiskStart(self._engine.global_steps or -1)
        return self._decide(lambda *_: (disk, False), problem, Phase.MEMORY_UNLOADED)

    def _decide(
        self,
        find: Callable[[int, dict[str, Any]], tuple[DiskStart, bool]],
        unloaded: str,
        memory: Phase,
    ) -> StartDecision | None:
        """Decide with all other ranks, and restore if memory serves, which is phase ``memory``.

        ``find`` gets the iteration and the objects of the offered snapshot; it gives what would
        be started from without it, and whether the script asks for that anew.  ``unloaded`` is
        the problem of a script that loads nothing.  None if no snapshot is offered.  ConfigError if
        training would begin at step 0 because the script cannot use the snapshot, which a mistake
        must not lose.
        """
        self.phase = Phase.DISK
        self.end()
        start = self._agreed(find, unloaded)
        if start is not None and start.from_memory:
            if self._early is not None and memory is Phase.MEMORY_UNLOADED:
                raise ConfigError(f"a snapshot is in memory, but {LOAD_FIRST}. It stays in memory")
            self._restored, self.phase = self._restore(), memory
        return start

    def _agreed(
        self, find: Callable[[int, dict[str, Any]], tuple[DiskStart, bool]], unloaded: str
    ) -> StartDecision | None:
        client, manager = self._script.client, self._snapshots.made_manager()
        if self._early is not None:
            return StartDecision(self._early.from_memory, "")
        offered, objects = manager.offered_iteration, manager.offered_objects()
        disk, is_new = find(offered, objects)
        # Of a snapshot of another layout, the objects come with the state.
        objection = client.objection(objects or None) if offered >= 0 else ""
        problem = "; ".join(filter(None, [objection, unloaded]))
        # An adapter can resume from its own checkpoints; its first start reports that.
        insists = not (client.may_start_anew or client.client)
        view = RankView(offered, disk, supervisor_chose_disk(), is_new, problem, insists=insists)
        start = agree(view, manager)
        if start is not None and start.refused:
            raise ConfigError(
                f"a snapshot of step {offered} is in memory, and this start would begin at step 0: "
                f"{start.reason}. The snapshot stays in memory. {_ANEW}"
            )
        if start is not None:
            self.say(announcement(start, offered, disk))
        return start

    def _restore(self) -> str:
        """Restore from memory; what ``load_checkpoint`` returns for the path."""
        started = time.perf_counter()
        iteration = self._snapshots.made_manager().load(into=self._snapshots.made_state())
        seconds = time.perf_counter() - started
        self.say(
            f"restored the in-memory snapshot of step {iteration} in {seconds:.2f} seconds; no "
            "checkpoint was read"
        )
        return f"in-memory snapshot of global_step{iteration}"

    def end(self) -> None:
        """Watch no more what the script reads."""
        self._reads.end()
        awaiting_batch.discard(self)

    def say(self, message: str) -> None:
        if self._engine.global_rank == 0:
            print(f"[megatron-ft] {message}", flush=True)
