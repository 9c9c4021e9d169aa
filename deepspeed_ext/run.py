"""Runs the snapshots of one engine, from its set-up to its end."""

from __future__ import annotations

import atexit
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from deepspeed_ext import client_state, resumable_loader
from deepspeed_ext.checkpoint_engine import world_agreement
from deepspeed_ext.client_state import ClientState
from deepspeed_ext.counter_reads import SECONDS, CounterReads
from deepspeed_ext.early_start import EarlyStart, announcement
from deepspeed_ext.resumable_loader import DataPosition
from deepspeed_ext.saving import Checkpoints
from deepspeed_ext.state import EngineState
from deepspeed_ext.state_parts import RandomStates
from megatron_ft.config import SnapshotConfig
from megatron_ft.config.json_section import FOLLOWS_ENGINE, Section
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.frameworks import Function
from megatron_ft.trainer.loader_position import awaiting_batch
from megatron_ft.trainer.start_choice import (
    WISH,
    DiskStart,
    RankView,
    StartDecision,
    agree,
    supervisor_chose_disk,
)
from megatron_ft.trainer.teardown import on_teardown

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from megatron_ft.trainer.manager import SnapshotManager


_LOAD_FIRST = (
    "the script trains without calling engine.load_checkpoint: call it at every start, before the "
    "first batch is read, with the folder of its checkpoints, even if that is empty. Or read the "
    "batches from `loader = deepspeed_ext.ResumableLoader(loader)`"
)
_ANEW = f'To start anew on purpose, set "{FOLLOWS_ENGINE}": false in the inmem_snapshot section'


class EngineRun:
    """One engine's snapshots.  Nothing collective happens before the first load or forward.

    The engine is complete only when its constructor has returned, and where it starts from is
    known only when the script loads a checkpoint, or reads a counter of the engine or its first
    batch without: until then this waits.
    """

    def __init__(
        self,
        engine: Any,
        section: Section,
        config: SnapshotConfig,
        make_manager: Callable[[], SnapshotManager],
        early: EarlyStart | None = None,
    ) -> None:
        self._engine, self._early = engine, early
        self._make_manager = make_manager
        self._manager: SnapshotManager | None = None
        self._state: EngineState | None = None
        self._warned_of = ""
        self._checkpoints = Checkpoints(engine)
        self._data = DataPosition(engine)
        self._client_state = ClientState(engine, section.client_state, section.follows_engine)
        if early is not None:
            self._checkpoints.asked = early.checkpoints.asked
        self._optimizers: Any = None
        self.client_ends, self._ended = early is not None, -1
        self._decided = self._began = self._unloaded = False
        self._restored = ""
        self._failure: Exception | None = None
        self._hook: Any = None
        _claim(engine)
        limit = timedelta(seconds=SECONDS)
        self._reads = CounterReads(engine, world_agreement(limit), self.reading)
        awaiting_batch.add(self)
        if not engine.pipeline_parallelism:
            self._hook = engine.register_forward_pre_hook(lambda *_: self.begin())

    def around_load(self, original: Function, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``load_checkpoint``: from memory if that is newer, else DeepSpeed's own.

        A load of weights alone is no resumption and goes to DeepSpeed; so does every load
        after training has begun.  Until then an incarnation that was restored from memory stays
        so: a script that loads twice has trained on what it loaded since.  One that was restored
        before any load stays so too.
        """
        given = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
        whole = given.get("load_optimizer_states", True) and not given.get("load_module_only")
        resumes = (whole or self._unloaded) and not self._began
        if resumes and self._serves(load_dir, given.get("tag")):
            return self._restored, self._client_state.result()
        with self._at_rest():
            result = original(load_dir, *args, **kwargs)
        if result[0] is not None:
            self._client_state.loaded(result[1])
        if self._state is not None:
            self._state.rescan()
        return result

    def _serves(self, load_dir: str, tag: str | None) -> bool:
        """True if memory serves in the place of this load; restores at the first such load."""
        find = partial(self._checkpoints.find, load_dir, tag)
        with self._lasting_failure():
            if not self._decided:
                start = self._decide(find)
                if start is not None and start.from_memory:
                    self._restored = self._restore()
            elif self._unloaded and self._would_load(find(-1, {})[0]):
                raise ConfigError(
                    f"a batch or a counter was read, and the {self._restored} restored, before the "
                    f"script loads another state from {load_dir}: load before the first read"
                )
            elif self._restored:
                self._print(f"not loading {load_dir}: the {self._restored} was restored")
        return bool(self._restored)

    def _would_load(self, disk: DiskStart) -> bool:
        """True if a checkpoint goes before the state that was restored without a load."""
        return disk.goes_before(-1 if disk.asked else self._engine.global_steps)

    def serve(self, client: str, load_dir: str) -> dict[str, Any] | None:
        """The client_state for an adapter, if memory serves and is restored in the place of the
        newest checkpoint in a folder; None if that is to be loaded."""
        self._client_state.client = client
        return self._client_state.result() if self._serves(load_dir, None) else None

    def around_move(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``offload_states`` or ``reload_states``: states get other memory, and free theirs."""
        with self._at_rest():
            return original(*args, **kwargs)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Fence captures, pause the hang watch and forget tensors, which are replaced inside."""
        if self._manager is None:
            yield
            return
        with self._manager.fence(), self._manager.watch.pause():
            self._manager.forget_tensors()
            if self._state is not None:
                self._state.forget_tensors()
            yield

    @contextmanager
    def _lasting_failure(self) -> Iterator[None]:
        """Raise an error of this block again at every later attempt.

        A script that continued after it would train unprotected, or on a part of a snapshot.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def begin(self) -> None:
        """Training begins: get an arena, and have optimizers fenced.  Collective.

        ConfigError if a snapshot is to be restored and the script has not loaded: its first
        batch was read already, and would be another one than in the incarnation that was lost.
        """
        if self._began:
            return
        with self._lasting_failure():
            self._begin()
        self._began = True
        awaiting_batch.discard(self)
        if self._hook is not None:
            self._hook.remove()

    def _begin(self) -> None:
        if not self._decided:
            self._begin_unloaded()
        state = self._made_state()
        assert self._manager is not None
        self._manager.prepare(state)
        state.before_training()
        self._manager.register_fence(state.inner_optimizer)
        self._optimizers = self._client_state.watch_optimizers(lambda: state.inner_optimizer)
        if not self.client_ends and (warning := self._data.warning()):
            self._print(f"warning: {warning}")
        self._warn_of_objection()

    def reading(self, all_came: Callable[[], bool] = lambda: True) -> None:
        """Restore before the script gets a counter of the engine, or its first batch of a watched
        loader, if it loads nothing.

        Collective, once ``all_came`` is true.  The script is taken to load nothing if it did
        not in the snapshot's incarnation.
        """
        promised = not (self._client_state.needs_load or self._client_state.objection())
        if self._decided or self._early is not None or not promised or self._data.warning():
            return
        with self._lasting_failure():
            if not all_came():
                return
            manager = self._made_manager()
            wish = manager.offered_objects().get(WISH) or {}
            # Where nothing is offered, a load may follow.
            if manager.offered_iteration >= 0 and "asked" not in wish:
                self._start_unloaded("")

    def _begin_unloaded(self) -> None:
        """Begin to train a script that loaded nothing and read no watched loader.  Collective."""
        # A pipeline that reads for itself has read nothing yet.
        waits = self._engine.pipeline_parallelism and not self._data.warning()
        problem = "" if waits and not self._client_state.needs_load else _LOAD_FIRST
        decided = self._start_unloaded(problem) is not None or self.client_ends
        if decided or self._client_state.may_start_anew:
            return
        self._warned_of = objection = self._client_state.objection()
        loads = self._client_state.needs_load or self._data.warning()
        if reason := "; ".join(filter(None, [objection, loads and _LOAD_FIRST])):
            self._print(f"warning: a restart of this job will be refused: {reason}. {_ANEW}")

    def _start_unloaded(self, problem: str) -> StartDecision | None:
        """Start without a load: from memory, if there is no ``problem``; as ``_decide``."""
        # Steps that were made before this engine was attached count as those of a checkpoint.
        disk = DiskStart(self._engine.global_steps or -1)
        start = self._decide(lambda *_: (disk, False), problem)
        if start is not None and start.from_memory:
            if self._early is not None:
                raise ConfigError(f"a snapshot is in memory, but {_LOAD_FIRST}. It stays in memory")
            self._restored, self._unloaded = self._restore(), True
        return start

    def around_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``step`` or ``train_batch``; take a snapshot if that ended an iteration."""
        self.begin()
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        steps = self._engine.global_steps
        if steps != before and self._manager is not None and self._state is not None:
            self._warn_of_objection()
            self._ended = steps
            if not self.client_ends:
                self.end_iteration()
        return result

    def end_iteration(self) -> None:
        """Take a snapshot of the iteration whose step was made, if that was not done before.

        A client with ``client_ends`` calls it when all its own state is of the same iteration.
        """
        ended, self._ended = self._ended, -1
        if ended >= 0 and self._manager is not None and self._state is not None:
            self._manager.save(ended, self._state)

    def refuse(self, reason: str) -> None:
        """Have no restart use the snapshots from now on, for a reason that its client knows."""
        self._client_state.refuse(reason)

    def _warn_of_objection(self) -> None:
        """Warn as training begins, and again when more is known of the script."""
        before, self._warned_of = self._warned_of, self._client_state.objection()
        if self._warned_of not in ("", before):
            self._print(f"warning: a restart of this job will use no snapshot: {self._warned_of}")

    def around_save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``save_checkpoint`` with the hang watch paused: no iteration ends meanwhile."""
        with nullcontext() if self._manager is None else self._manager.watch.pause():
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._client_state.given(given.get("client_state"))
            return self._checkpoints.save(original, *args, **kwargs)

    def around_destroy(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``destroy`` after the end of captures, which read the engine's tensors."""
        self.close()
        return original(*args, **kwargs)

    def plan_ended(self, finished: bool) -> None:
        """A library's loop has ended: at its planned end, or before."""
        if self._manager is not None:
            self._manager.say_end(finished)

    def close(self) -> None:
        """End captures and leave; a second call does nothing."""
        # Else the engine would live as long as the process.
        atexit.unregister(self.close)
        awaiting_batch.discard(self)
        self._reads.end()
        if self._manager is None and not self._decided:
            _release(self._engine)
        if self._optimizers is not None:
            self._optimizers.remove()
        manager, self._manager, self._state = self._manager, None, None
        if manager is not None:
            manager.close()

    def _decide(
        self,
        named: Callable[[int, dict[str, Any]], tuple[DiskStart, bool]],
        unloaded: str = "",
    ) -> StartDecision | None:
        """Decide, once, with all other ranks; None if no snapshot is offered.

        ``named`` gets the iteration and the objects of the offered snapshot; it gives what would
        be started from without it, and whether the script asks for that anew.  ``unloaded`` is
        the problem of a script that loads nothing.  ConfigError if training would begin at step 0
        because the script cannot use the snapshot: nobody shall lose it by a mistake.
        """
        self._decided = True
        self._reads.end()
        manager = self._made_manager()
        if self._early is not None:
            return StartDecision(self._early.from_memory, "")
        offered, objects = manager.offered_iteration, manager.offered_objects()
        disk, is_new = named(offered, objects)
        # Of a snapshot of another layout, the objects come with the state.
        objection = self._client_state.objection(objects or None) if offered >= 0 else ""
        problem = "; ".join(filter(None, [objection, unloaded]))
        # An adapter can resume from its own checkpoints; its first start reports that.
        insists = not (self._client_state.may_start_anew or self._client_state.client)
        view = RankView(offered, disk, supervisor_chose_disk(), is_new, problem, insists=insists)
        start = agree(view, manager)
        if start is not None and start.refused:
            raise ConfigError(
                f"a snapshot of step {offered} is in memory, and this start would begin at step 0: "
                f"{start.reason}. The snapshot stays in memory. {_ANEW}"
            )
        if start is not None:
            self._print(announcement(start, offered, disk))
        return start

    def _made_manager(self) -> SnapshotManager:
        if self._manager is None:
            early = self._early
            self._manager = self._make_manager() if early is None else early.manager
        return self._manager

    def _restore(self) -> str:
        """Restore from memory; what ``load_checkpoint`` returns for the path."""
        assert self._manager is not None
        started = time.perf_counter()
        iteration = self._manager.load(into=self._made_state())
        seconds = time.perf_counter() - started
        self._print(
            f"restored the in-memory snapshot of step {iteration} in {seconds:.2f} seconds; no "
            "checkpoint was read"
        )
        return f"in-memory snapshot of global_step{iteration}"

    def _made_state(self) -> EngineState:
        if self._state is None:
            parts: dict[str, Stateful] = {
                resumable_loader.NAME: self._data,
                client_state.NAME: self._client_state,
                WISH: self._checkpoints,
                "random": RandomStates(),
            }
            self._state = EngineState(self._engine, parts)
        return self._state

    def _print(self, message: str) -> None:
        if self._engine.global_rank == 0:
            print(f"[megatron-ft] {message}", flush=True)


_claims: list[tuple[weakref.ref[Any], str]] = []
"""The engine whose snapshots this process takes, and its model's class."""
on_teardown(_claims.clear)


def _claim(engine: Any) -> None:
    """Have the snapshots of this process be those of ``engine``; ConfigError if they are another's.

    The claim outlives an engine that has trained, until training is entered again: the shards of
    both would have one name, and the next incarnation would restore the one from the other's.
    """
    name = type(engine.module).__name__
    _claims[:] = _claims or [(weakref.ref(engine), name)]
    claimant, owner = _claims[0]
    if claimant() is not engine:
        raise ConfigError(
            f"the engine of {name} is the second one in this process with snapshots, after that of "
            f"{owner}, and a job can have those of one only: leave "
            '"inmem_snapshot" out of the config of every engine but one'
        )


def _release(engine: Any) -> None:
    """Give up the claim of an engine that has done nothing."""
    if _claims and _claims[0][0]() is engine:
        _claims.clear()
