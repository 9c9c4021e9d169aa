"""The script's ``client_state``, which DeepSpeed keeps only when ``save_checkpoint`` is called.

A snapshot is mostly of a later step than the last save, and what the script would have given
then nobody knows: an epoch number may have changed or not.  So it is made exact by a function of
the script, or by declaring in the JSON how entries follow from DeepSpeed's counters; failing
both, a snapshot with a stale one is not used.

Values that belong to an engine but live beside it, so that nothing of DeepSpeed's is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from megatron_ft.config.json_section import CONSTANT, COUNTERS

T = TypeVar("T")


class PerEngine(Generic[T]):
    """One value per engine, gone with the engine."""

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def get(self, engine: Any) -> T | None:
        """The value, None if there is none."""
        return self._values.get(engine)

    def set(self, engine: Any, value: T) -> None:
        """Replace the value."""
        self._values[engine] = value


logger = logging.getLogger(__name__)

NAME = "client_state"
"""Name of :class:`ClientState` among the parts of a snapshot."""

DEEPSPEEDS_OWN = frozenset(
    {
        "buffer_names",
        "checkpoint_parallel_dimensions",
        "data_sampler",
        "dp_world_size",
        "ds_config",
        "ds_version",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "global_samples",
        "global_steps",
        "lr_scheduler",
        "module",
        "moe_param_groups",
        "mp_world_size",
        "num_experts",
        "optimizer",
        "param_shapes",
        "random_ltd",
        "shared_params",
        "skipped_steps",
    }
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


_records: PerEngine[_Record] = PerEngine()


def _record(engine: Any) -> _Record:
    record = _records.get(engine)
    if record is None:
        record = _Record()
        _records.set(engine, record)
    return record


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
        """Go on with what a snapshot holds."""
        self._record.entries = dict(state["entries"])
        self._record.given_at = state["given_at"]

    def problem(self, objects: Mapping[str, Any]) -> str:
        """Why the snapshot with these objects cannot be used, '' if it can; what to do about it."""
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
        """What ``load_checkpoint`` returns after a restore from memory, counters already set."""
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
