"""The script's own state: what it gives as ``client_state``, and what it keeps elsewhere.

DeepSpeed keeps ``client_state`` only when ``save_checkpoint`` is called.  A snapshot is mostly of a
later step, and what the script would have given then is unknown.  So a function of the script
makes it exact, or the JSON declares how entries follow from DeepSpeed's counters; failing both, a
snapshot with a stale one is not used.

An engine from memory stands at the snapshot's step, and counters, schedulers and data positions
outside the engine must come to the same step.  Only the script can promise that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from megatron_ft.config.json_section import CONSTANT, COUNTERS, FOLLOWS_ENGINE
from megatron_ft.trainer.notices import active_clients

logger = logging.getLogger(__name__)

NAME = "client_state"
"""Name of :class:`ClientState` among the parts of a snapshot."""

CLIENT = "megatron_ft_client"
"""Entry that names the adapter of a library that gave the others; see deepspeed_ext.clients."""

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
_PROVIDER = "_inmem_client_state"
_SCHEDULER_MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""Marks of torch's schedulers at the ``step`` of their optimizer; the second up to torch 2.3."""


def set_client_state(engine: Any, provider: Provider) -> None:
    """Have each snapshot hold what ``provider()`` returns at that step; small values that
    core.objects.encode takes.

    ``load_checkpoint`` hands it back after a restore from memory, as it does after one from disk.
    """
    vars(engine)[_PROVIDER] = provider


def provider_of(engine: Any) -> Provider | None:
    found: Provider | None = vars(engine).get(_PROVIDER)
    return found


class ClientState:
    """The part of a snapshot that holds it, and that says whether a snapshot may serve the script.

    ``declared`` (JSON) says which entries follow which counter; ``follows``, that all else which
    the script keeps follows the engine's step (None: the user says nothing of it).
    """

    def __init__(
        self, engine: Any, declared: Mapping[str, str] | None = None, follows: bool | None = None
    ) -> None:
        self._engine, self._declared = engine, dict(declared or {})
        self._follows = bool(follows or declared)
        self.may_start_anew = follows is False
        self._entries: dict[str, Any] = {}
        self._given_at: int | None = None
        self._outside: set[str] = set()
        self.client, self._refused, self._objected = "", "", ""
        self._warned = False

    @property
    def needs_load(self) -> bool:
        """True if the script gets something back from ``load_checkpoint`` that it has to set."""
        return bool(self._declared or provider_of(self._engine))

    def give_to(self, client: str) -> None:
        """The adapter of ``client`` gives the entries, and gets those of a snapshot back."""
        self.client = client

    def refuse(self, reason: str) -> None:
        self._refused = reason

    def given(self, client_state: Mapping[str, Any] | None) -> None:
        """The script gave this to ``save_checkpoint`` at the engine's current step."""
        self._entries, self._given_at = dict(client_state or {}), self._engine.global_steps
        names = self._unexplained(self._entries)
        if not names or provider_of(self._engine) or self._warned or self._engine.global_rank:
            return
        self._warned = True
        logger.warning(
            "snapshots after step %d will not be used for a restart, a checkpoint will, because %s",
            self._given_at,
            _remedy(names),
        )

    def loaded(self, client_state: Mapping[str, Any] | None) -> None:
        """DeepSpeed's ``load_checkpoint`` returned this; its own keys are not the script's."""
        found = (client_state or {}).items()
        self._entries = {key: value for key, value in found if key not in DEEPSPEEDS_OWN}
        self._given_at = self._engine.global_steps

    def state_dict(self) -> dict[str, Any]:
        """The entries, the step at which they were given (None: never), and the current one."""
        provider, step = provider_of(self._engine), self._engine.global_steps
        if provider is not None:
            self._entries, self._given_at = dict(provider()), step
        return {
            "entries": self._entries,
            "given_at": self._given_at,
            "step": step,
            "provided": provider is not None,
            "outside": self._found_outside(),
            "refused": self._refused,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries, self._given_at = dict(state["entries"]), state["given_at"]

    def objection(self, objects: Mapping[str, Any] | None = None) -> str:
        """Reason why no snapshot may serve the script, and a remedy; '' if one may.

        ``objects`` are those of the snapshot that would be restored; without them it is
        the snapshots to come.
        """
        provided = provider_of(self._engine) is not None
        state: dict[str, Any] = {"given_at": None, "provided": provided, "refused": self._refused}
        if objects is not None:
            state = objects.get(NAME) or {"given_at": None}
        if state.get("refused"):
            return str(state["refused"])
        giver = state.get("entries", {}).get(CLIENT, "") if objects is not None else self.client
        if giver != self.client:
            return (
                f"the snapshot has its state from {giver or 'the script'}, and what asks for it is "
                f"{self.client or 'the script'}"
            )
        fresh = state["given_at"] in (None, state.get("step"))
        names = [] if fresh else self._unexplained(state["entries"])
        if names:
            return (
                f"the script gave its client_state at step {state['given_at']} and the snapshot "
                f"is of step {state['step']}: {_remedy(names)}"
            )
        if state.get("provided"):
            return ""
        # A scheduler may be made after the load, so it shows only in the snapshot.
        outside = sorted({*self._found_outside(), *state.get("outside", ())})
        if outside:
            return (
                f"no snapshot holds the state of {', '.join(outside)}. For restarts from "
                f"memory {_WITH_FUNCTION}"
            )
        if self._follows:
            return ""
        return (
            "it is unknown whether the script follows the engine's step. If its loop and its data "
            f'follow from engine.global_steps, add "{FOLLOWS_ENGINE}": true to the '
            f"inmem_snapshot section; else {_WITH_FUNCTION}"
        )

    def new_objection(self) -> str:
        """As ``objection``; '' if it is that of the last call."""
        before, self._objected = self._objected, self.objection()
        return "" if self._objected == before else self._objected

    def result(self) -> dict[str, Any]:
        """The client_state for ``load_checkpoint`` to return, once counters are restored."""
        entries = dict(self._entries)
        for name, counter in self._declared.items():
            if counter != CONSTANT:
                entries[name] = getattr(self._engine, counter)
        entries.setdefault("global_samples", self._engine.global_samples)
        return RestoredClientState(entries)

    def _unexplained(self, entries: Mapping[str, Any]) -> list[str]:
        return sorted(entries.keys() - self._declared.keys())

    def watch_optimizers(self, own: Callable[[], Any]) -> Any:
        """Note every other optimizer of torch that steps; returns a handle that ends it.

        ``own`` gives the engine's, which a load may replace.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        known = WeakSet([own()])

        def stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if optimizer not in known and optimizer is not own():
                self._outside.add(f"a second optimizer ({type(optimizer).__name__})")
            known.add(optimizer)

        return register_optimizer_step_pre_hook(stepping)

    def _found_outside(self) -> list[str]:
        """Names of the clients and schedulers around the engine, of all that were seen so far."""
        from torch.optim.lr_scheduler import LRScheduler

        self._outside |= active_clients()
        step = getattr(getattr(self._engine, "basic_optimizer", None), "step", None)
        marked = any(hasattr(step, mark) for mark in _SCHEDULER_MARKS)
        if marked and not isinstance(self._engine.lr_scheduler, LRScheduler):
            self._outside.add("a learning rate scheduler that deepspeed.initialize did not get")
        return sorted(self._outside)


_WITH_FUNCTION = (
    "give this state to deepspeed_ext.set_client_state(engine, function) before training, and set "
    "it from the client_state that engine.load_checkpoint returns at every start"
)


class RestoredClientState(dict[str, Any]):
    """A client_state from memory; the error of a missing entry says how to give it."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"client_state has no {key!r}: the job was restored from memory and {_remedy([key])}"
        )


def _remedy(names: list[str]) -> str:
    example = ", ".join(f'"{name}": "global_steps"' for name in names[:3])
    return (
        f"the value of {', '.join(map(repr, names))} in client_state at another step is unknown. "
        f'Add "client_state": {{{example}}} to the inmem_snapshot section, with the counter '
        f"that each follows ({', '.join(COUNTERS)}, or {CONSTANT}), or call "
        "deepspeed_ext.set_client_state(engine, function)"
    )
