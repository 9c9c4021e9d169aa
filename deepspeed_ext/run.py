"""Snapshots over the life of one engine: from its set-up to its end."""

from __future__ import annotations

import atexit
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from deepspeed_ext import client_state, data_position, saving
from deepspeed_ext.client_state import ClientState
from deepspeed_ext.data_position import DataPosition
from deepspeed_ext.disk import disk_of
from deepspeed_ext.losses import LossReport
from deepspeed_ext.manager import claim
from deepspeed_ext.random_states import RandomStates
from deepspeed_ext.snapshot_log import SnapshotLog
from deepspeed_ext.state import EngineState, Stateful
from megatron_ft.capture.manager_protocol import Manager
from megatron_ft.config import SnapshotConfig
from megatron_ft.errors import ConfigError
from megatron_ft.json_section import Section
from megatron_ft.recovery.start import WISH, Disk, Start, View, agree, supervisor_chose_disk
from megatron_ft.wrapping import Function

_LOAD_FIRST = (
    "the script trains without calling engine.load_checkpoint: call it at every start, before the "
    "first batch is read, with the folder of its checkpoints, even if that is empty"
)


class _Wish:
    """The checkpoint that the script named, kept in each snapshot, so that a change shows."""

    def __init__(self) -> None:
        self.tag: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"tag": self.tag}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What this life asks for counts, not what an earlier one did."""


class SnapshotRun:
    """One engine's snapshots.  Nothing collective happens before the first load or forward.

    The engine is complete only when its constructor has returned, and where it starts from is
    known only when the script loads a checkpoint: until then this waits.
    """

    def __init__(
        self,
        engine: Any,
        section: Section,
        config: SnapshotConfig,
        make_manager: Callable[[], Manager],
    ) -> None:
        self._engine = engine
        self._make_manager = make_manager
        self._manager: Manager | None = None
        self._state: EngineState | None = None
        self.losses = LossReport(config.loss_gate > 0)
        self._wish = _Wish()
        self._data = DataPosition(engine)
        self._client_state = ClientState(engine, section.client_state)
        self._decided = self._began = False
        self._restored = ""
        self._failure: Exception | None = None
        self._hook: Any = None
        self._log: SnapshotLog

    def begin_with(self, hook: Any) -> None:
        """``hook`` is the handle of what calls ``begin``; it is removed when that happened."""
        self._hook = hook

    def around_load(self, original: Function, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """``load_checkpoint``: from memory if that is newer, else DeepSpeed's own.

        A load of weights alone is no resumption and goes to DeepSpeed; so does every load
        after training has begun.  Until then a life that was restored from memory stays so: a
        script that loads twice has trained on what it loaded since.
        """
        given = _arguments(original, load_dir, args, kwargs)
        whole = given.get("load_optimizer_states", True) and not given.get("load_module_only")
        if whole and not self._began and self._serves(load_dir, given.get("tag")):
            return self._restored, self._client_state.result()
        with self._at_rest():
            result = original(load_dir, *args, **kwargs)
        if result[0] is not None:
            client_state.loaded(self._engine, result[1])
        if self._state is not None:
            self._state.rescan()
        return result

    def _serves(self, load_dir: str, tag: str | None) -> bool:
        """Whether memory serves in the place of this load; restores at the first that it does."""
        with self._lasting_failure():
            if not self._decided:
                self._wish.tag = None if tag is None else str(tag)
                find_disk = partial(disk_of, self._engine, load_dir, tag)
                if self._starts_from_memory(find_disk):
                    self._restored = self._restore()
            elif self._restored:
                self._print(f"not loading {load_dir}: the {self._restored} was restored")
        return bool(self._restored)

    def around_move(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """``offload_states`` or ``reload_states``: states get other memory, and free theirs."""
        with self._at_rest():
            return original(*args, **kwargs)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Around what replaces all tensors: no hang is seen, no capture reads or keeps them."""
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
        """What fails here fails at every later attempt, also in a script that goes on after it.

        It would train unprotected, or on a part of a snapshot.
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
        batch was read already, and would be another one than in the life that was lost.
        """
        if self._began:
            return
        with self._lasting_failure():
            self._begin()
        self._began = True
        if self._hook is not None:
            self._hook.remove()

    def _begin(self) -> None:
        if not self._decided:
            self._begin_unloaded()
        state = self._made_state()
        assert self._manager is not None
        self._manager.prepare(state)
        if self._engine.zero_optimization_stage() < 3:
            # With 3 ranks wait for each other all along, so none has a part of its own.
            self._manager.watch.follow(self._engine.module.parameters())
        self._log = SnapshotLog(self._engine, self._manager.stats)
        for optimizer in state.inner_optimizers():
            self._manager.register_fence(optimizer)
        if warning := self._data.warning():
            self._print(f"warning: {warning}")

    def _begin_unloaded(self) -> None:
        # Steps that were made before this engine was attached count as those of a checkpoint.
        disk = Disk(self._engine.global_steps or -1)
        if self._starts_from_memory(lambda _: disk):
            raise ConfigError(f"a snapshot is in memory, but {_LOAD_FIRST}. It stays in memory")
        self._print(f"warning: after a failure this job will not go on, because {_LOAD_FIRST}")

    def around_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """``step`` or ``train_batch``: a snapshot behind each one that ended an iteration."""
        self.begin()
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        steps = self._engine.global_steps
        if steps != before and self._manager is not None and self._state is not None:
            self.losses.end_step(self._manager, result)
            self._manager.save(steps, self._state)
            self._log.end_step()
        return result

    def around_save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """``save_checkpoint``: no iteration ends meanwhile, and no hang is seen in that."""
        with nullcontext() if self._manager is None else self._manager.watch.pause():
            return saving.save_checkpoint(self._engine, original, *args, **kwargs)

    def around_destroy(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """``destroy``: captures end before the engine's tensors do."""
        self.close()
        saving.close(self._engine)
        return original(*args, **kwargs)

    def close(self) -> None:
        """End captures and leave; a second call does nothing."""
        # Else the engine would live as long as the process.
        atexit.unregister(self.close)
        manager, self._manager, self._state = self._manager, None, None
        if manager is not None:
            manager.close()

    def _starts_from_memory(self, disk_of: Callable[[dict[str, Any]], Disk]) -> bool:
        """Decide, once, with all other ranks; ``disk_of`` gets the offered snapshot's objects."""
        self._decided = True
        claim(self._engine)
        self._manager = manager = self._make_manager()
        offered, objects = manager.offered_iteration, manager.offered_objects()
        changed = offered >= 0 and objects.get(WISH) != self._wish.state_dict()
        problem = self._client_state.problem(objects)
        view = View(offered, disk_of(objects), supervisor_chose_disk(), changed, problem)
        start = agree(view, manager)
        if start is not None:
            self._say(start)
        return start is not None and start.from_memory

    def _say(self, start: Start) -> None:
        source = "memory" if start.from_memory else "disk"
        self._print(f"starting from {source}: {start.reason}")

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
                data_position.NAME: self._data,
                client_state.NAME: self._client_state,
                saving.NAME: saving.LastSave(self._engine),
                WISH: self._wish,
                "random": RandomStates(),
            }
            self._state = EngineState(self._engine, parts)
        return self._state

    def _print(self, message: str) -> None:
        if self._engine.global_rank == 0:
            print(f"[megatron-ft] {message}", flush=True)


def _arguments(
    function: Function, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    return inspect.signature(function).bind(first, *args, **kwargs).arguments
