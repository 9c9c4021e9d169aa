"""The script's own state: what it gives as ``client_state``, and what it keeps elsewhere.

DeepSpeed keeps ``client_state`` only when ``save_checkpoint`` is called.  A snapshot is mostly of a
later step, and nobody knows what the script would have given then.  So a function of the script
makes it exact, or the JSON declares how entries follow from DeepSpeed's counters; failing both, a
snapshot with a stale one is not used.

An engine from memory stands at the snapshot's step, and counters, schedulers and data positions
outside the engine must come to the same step.  Only the script, or an adapter of it, can promise
that: ``objection`` says why a snapshot may not serve a script, as far as it shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from megatron_ft.config.json_section import CONSTANT, COUNTERS, FOLLOWS_ENGINE
from megatron_ft.trainer.manager import active_clients

logger = logging.getLogger(__name__)

NAME, OUTSIDE = "client_state", "outside"
"""Names of :class:`ClientState` and :class:`Outside` among the parts of a snapshot."""

DEEPSPEEDS_OWN = frozenset(
    (
        "buffer_names checkpoint_parallel_dimensions data_sampler dp_world_size ds_config "
        "ds_version frozen_param_fragments frozen_param_shapes global_samples global_steps "
        "lr_scheduler module moe_param_groups mp_world_size num_experts optimizer param_shapes "
        "random_ltd shared_params skipped_steps"
    ).split()
)
"""Keys of DeepSpeed among those that ``load_checkpoint`` returns (_common_checkpoint_state)."""

Provider = Callable[[], Mapping[str, Any]]


@dataclass
class _Record:
    entries: dict[str, Any] = field(default_factory=dict)
    given_at: int | None = None
    provider: Provider | None = None
    declared: Mapping[str, str] | None = None
    """None as long as no snapshots are taken of the engine."""

    warned: bool = False

    def unexplained(self) -> list[str]:
        """Entries that cannot be told for another step."""
        return sorted(set(self.entries) - set(self.declared or {})) if not self.provider else []


_records: WeakKeyDictionary[Any, _Record] = WeakKeyDictionary()
"""Records by engine, beside it, so that nothing of DeepSpeed's is changed."""


def _record(engine: Any) -> _Record:
    return _records.setdefault(engine, _Record())


def set_client_state(engine: Any, provider: Provider) -> None:
    """Have each snapshot hold what ``provider()`` returns at that step; small values that
    core.objects.encode takes.

    ``load_checkpoint`` hands it back after a restore from memory, as it does after one from disk.
    """
    _record(engine).provider = provider


def given(engine: Any, client_state: Mapping[str, Any] | None) -> None:
    """The script gave this to ``save_checkpoint`` at the engine's current step."""
    record = _record(engine)
    record.entries, record.given_at = dict(client_state or {}), engine.global_steps
    if record.declared is None or record.warned or engine.global_rank:
        return
    if names := record.unexplained():
        record.warned = True
        logger.warning(
            "snapshots after step %d will not be used for a restart, a checkpoint will, because %s",
            engine.global_steps,
            _remedy(names),
        )


def loaded(engine: Any, client_state: Mapping[str, Any] | None) -> None:
    """DeepSpeed's ``load_checkpoint`` returned this; its own keys are not the script's."""
    found = (client_state or {}).items()
    record = _record(engine)
    record.entries = {k: v for k, v in found if k not in DEEPSPEEDS_OWN}
    record.given_at = engine.global_steps


class ClientState:
    """The part of a snapshot that holds it; ``declared`` (JSON) says what entries follow."""

    def __init__(self, engine: Any, declared: Mapping[str, str] | None = None) -> None:
        self._engine = engine
        self._record = _record(engine)
        self._record.declared = dict(declared or {})

    @property
    def provided(self) -> bool:
        """True if a function of the script gives it to each snapshot."""
        return self._record.provider is not None

    def state_dict(self) -> dict[str, Any]:
        """The entries, the step at which they were given (None: never), and the current one."""
        record, step = self._record, self._engine.global_steps
        if record.provider is not None:
            record.entries, record.given_at = dict(record.provider()), step
        told = {"entries": record.entries, "given_at": record.given_at, "step": step}
        return {**told, "provided": self.provided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what a snapshot holds."""
        self._record.entries = dict(state["entries"])
        self._record.given_at = state["given_at"]

    def problem(self, objects: Mapping[str, Any]) -> str:
        """Reason why the snapshot with these objects cannot be used, and a remedy; '' if it can."""
        state = objects.get(NAME)
        if not state or state["given_at"] in (None, state["step"]):
            return ""
        names = sorted(set(state["entries"]) - set(self._record.declared or {}))
        if not names:
            return ""
        return (
            f"the script gave its client_state at step {state['given_at']} and the snapshot is "
            f"of step {state['step']}: {_remedy(names)}"
        )

    def result(self) -> dict[str, Any]:
        """The client_state for ``load_checkpoint`` to return, once counters are restored."""
        entries = dict(self._record.entries)
        for name, counter in (self._record.declared or {}).items():
            if counter != CONSTANT:
                entries[name] = getattr(self._engine, counter)
        entries.setdefault("global_samples", self._engine.global_samples)
        return RestoredClientState(entries)


class RestoredClientState(dict[str, Any]):
    """A client_state from memory; asking for an entry that nobody gave says how to give it."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"client_state has no {key!r}: the job was restored from memory and {_remedy([key])}"
        )


def _remedy(names: list[str]) -> str:
    example = ", ".join(f'"{name}": "global_steps"' for name in names[:3])
    return (
        f"nothing says what {', '.join(map(repr, names))} of client_state would be at another "
        f'step. Add "client_state": {{{example}}} to the inmem_snapshot section, with the counter '
        f"that each follows ({', '.join(COUNTERS)}, or {CONSTANT}), or call "
        "deepspeed_ext.set_client_state(engine, function)"
    )


_SCHEDULER_MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""Marks of torch's schedulers at the ``step`` of their optimizer; the second up to torch 2.3."""


class Outside:
    """Names the clients, schedulers and optimizers around one engine; goes into each snapshot.

    Some of it shows only in training: a scheduler may be made after the load, a second
    optimizer is known when it steps.  So a later incarnation reads of it in the snapshot.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._found: set[str] = set()
        self._hook: Any = None
        self.found()

    def found(self) -> list[str]:
        """Names of all that was found so far, now included."""
        self._found |= active_clients()
        if self._has_foreign_scheduler():
            self._found.add("a learning rate scheduler that deepspeed.initialize did not get")
        return sorted(self._found)

    def watch_optimizers(self, own: Callable[[], Any]) -> None:
        """See every optimizer of torch that steps from now on; ``own`` gives the engine's."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        known = WeakSet([own()])

        def stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if optimizer not in known and optimizer is not own():
                self._found.add(f"a second optimizer ({type(optimizer).__name__})")
            known.add(optimizer)

        self._hook = register_optimizer_step_pre_hook(stepping)

    def close(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state_dict(self) -> dict[str, Any]:
        """The names."""
        return {"found": self.found()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Each incarnation looks for itself."""

    def _has_foreign_scheduler(self) -> bool:
        from torch.optim.lr_scheduler import LRScheduler

        step = getattr(getattr(self._engine, "basic_optimizer", None), "step", None)
        marked = any(hasattr(step, mark) for mark in _SCHEDULER_MARKS)
        return marked and not isinstance(self._engine.lr_scheduler, LRScheduler)


_WITH_FUNCTION = (
    "give this state to deepspeed_ext.set_client_state(engine, function) before training, and set "
    "it from the client_state that engine.load_checkpoint returns at every start"
)


def objection(follows: bool, provided: bool, outside: Sequence[str]) -> str:
    """Reason why no snapshot may serve a script, and what to do about it; '' if one may.

    ``follows``: its configuration says that it follows the engine's counters; ``provided``: a
    function of it gives its state to each snapshot; ``outside``: what keeps state that no snapshot
    holds.
    """
    if provided:
        return ""
    if outside:
        return (
            f"no snapshot holds the state of {', '.join(outside)}. For restarts from "
            f"memory {_WITH_FUNCTION}"
        )
    if follows:
        return ""
    return (
        "nothing says that the script follows the engine's step. If its loop and its data follow "
        f'from engine.global_steps, add "{FOLLOWS_ENGINE}": true to the inmem_snapshot section; '
        f"else {_WITH_FUNCTION}"
    )
