"""Runs the snapshots of one engine, from its set-up to its end."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from deepspeed_ext.client_state import ClientState
from deepspeed_ext.resumable_loader import DataPosition
from deepspeed_ext.saving import Checkpoints
from deepspeed_ext.start import EarlyStart, EngineSnapshots, EngineStart, Phase, ScriptState
from megatron_ft.config.json_section import Section
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.frameworks import Function
from megatron_ft.trainer.teardown import on_teardown

if TYPE_CHECKING:
    from megatron_ft.trainer.manager import SnapshotManager


class EngineRun:
    """One engine's snapshots.  Nothing collective happens before the first load or forward."""

    def __init__(
        self,
        engine: Any,
        section: Section,
        make_manager: Callable[[], SnapshotManager],
        early: EarlyStart | None = None,
    ) -> None:
        self._engine = engine
        self._script = ScriptState(
            Checkpoints(engine, None if early is None else early.checkpoints.asked),
            DataPosition(engine),
            ClientState(engine, section.client_state, section.follows_engine),
        )
        make = make_manager if early is None else lambda: early.manager
        self._snapshots = EngineSnapshots(engine, self._script, make)
        self._client_ends, self._ended, self._began = early is not None, -1, False
        _claim(engine)
        self._start = EngineStart(engine, self._script, self._snapshots, early)
        # Hooks to be removed: before training that of its begin, in it that of optimizers.
        self._hooks: list[Any] = []
        if not engine.pipeline_parallelism:
            self._hooks = [engine.register_forward_pre_hook(lambda *_: self.begin_training())]

    def leave_ends_to_client(self) -> None:
        """Have the client call ``end_iteration`` when all its own state is of that iteration."""
        self._client_ends = True

    def around_load(self, original: Function, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``load_checkpoint``: from memory if that is newer, else DeepSpeed's own.

        A load of weights alone does not resume training and goes to DeepSpeed; so does every load
        after training has begun.  Until then an incarnation that was restored from memory stays
        so: a script that loads twice has trained on what it loaded since.  One that was restored
        before any load stays so too.
        """
        given = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
        whole = given.get("load_optimizer_states", True) and not given.get("load_module_only")
        resumes = whole or self._start.phase is Phase.MEMORY_UNLOADED
        if resumes and not self._began:
            if restored := self._start.serves(load_dir, given.get("tag")):
                return restored, self._script.client.result()
        with self._snapshots.at_rest():
            result = original(load_dir, *args, **kwargs)
        if result[0] is not None:
            self._script.client.loaded(result[1])
        if self._snapshots.state is not None:
            self._snapshots.state.rescan()
        return result

    def serve(self, client: str, load_dir: str) -> dict[str, Any] | None:
        """The client_state for an adapter, if memory serves and is restored in the place of the
        newest checkpoint in a folder; None if that is to be loaded."""
        self._script.client.give_to(client)
        served = self._start.serves(load_dir, None)
        return self._script.client.result() if served else None

    def around_move(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``offload_states`` or ``reload_states``: states get other memory, and free theirs."""
        with self._snapshots.at_rest():
            return original(*args, **kwargs)

    def begin_training(self) -> None:
        """Training begins: get an arena, and have optimizers fenced.  Collective.

        Raises what EngineStart.begin_training can raise.
        """
        if self._began:
            return
        with self._start.lasting_failure():
            self._start.begin_training(client_ends=self._client_ends)
            state, manager = self._snapshots.made_state(), self._snapshots.manager
            assert manager is not None, "the run was closed"
            manager.prepare(state)
            state.before_training()
            manager.register_fence(state.inner_optimizer)
            watch = self._script.client.watch_optimizers(lambda: state.inner_optimizer)
            if not self._client_ends and (warning := self._script.data.warning()):
                self._start.say(f"warning: {warning}")
            self._warn_of_objection()
        self._began = True
        self._remove_hooks()
        self._hooks = [watch]

    def around_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``step`` or ``train_batch``; take a snapshot if that ended an iteration."""
        self.begin_training()
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        steps, snapshots = self._engine.global_steps, self._snapshots
        if steps != before and snapshots.manager is not None and snapshots.state is not None:
            self._warn_of_objection()
            self._ended = steps
            if not self._client_ends:
                self.end_iteration()
        return result

    def end_iteration(self) -> None:
        """Take a snapshot of the iteration whose step was made, if that was not done before."""
        ended, self._ended = self._ended, -1
        manager, state = self._snapshots.manager, self._snapshots.state
        if ended >= 0 and manager is not None and state is not None:
            manager.save(ended, state)

    def refuse(self, reason: str) -> None:
        self._script.client.refuse(reason)

    def _warn_of_objection(self) -> None:
        if objection := self._script.client.new_objection():
            self._start.say(f"warning: a restart of this job will use no snapshot: {objection}")

    def around_save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``save_checkpoint`` with the hang watch paused: no iteration ends meanwhile."""
        manager = self._snapshots.manager
        with nullcontext() if manager is None else manager.watch.pause():
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._script.client.given(given.get("client_state"))
            return self._script.checkpoints.save(original, *args, **kwargs)

    def around_destroy(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``destroy`` after the end of captures, which read the engine's tensors."""
        self.close()
        return original(*args, **kwargs)

    def plan_ended(self, finished: bool) -> None:
        """A library's loop has ended: at its planned end, or before."""
        if self._snapshots.manager is not None:
            self._snapshots.manager.say_end(finished)

    def close(self) -> None:
        """End captures and leave; a second call does nothing."""
        # Else the engine would live as long as the process.
        atexit.unregister(self.close)
        self._start.end()
        if self._snapshots.manager is None and self._start.phase is Phase.OPEN:
            _release(self._engine)
        if self._began:
            self._remove_hooks()
        self._snapshots.close()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


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
