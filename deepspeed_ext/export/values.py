"""Setting what changes in training into what was recorded of DeepSpeed's files at the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_ext import client_state
from deepspeed_ext.checkpoint_form import EXTRA_STATE
from deepspeed_ext.optimizers.groups import group_names
from deepspeed_ext.optimizers.scalars import set_fields
from megatron_ft.core.errors import ExportError

Tree = dict[str, Any]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_INNER = ("base_optimizer_state", "optimizer_state_dict")
"""Under which names a wrapper keeps the state dict of its inner optimizer."""


def fill(tree: Any, objects: Mapping[str, Any]) -> None:
    """Set one file's small values as of its snapshot, in place.

    ``objects`` is what EngineState.objects() gave.  A file of weights alone has none.
    ExportError if the file and the objects do not fit each other.
    """
    if "global_steps" in tree:
        _fill_model_file(tree, objects)
    if "optimizer_state_dict" in tree:
        _fill_optimizer(tree["optimizer_state_dict"], objects)
    elif tree.get("optimizer") is not None:
        _fill_optimizer(tree["optimizer"], objects)


def _fill_model_file(tree: Tree, objects: Mapping[str, Any]) -> None:
    training = objects["training"]
    for name in _COUNTERS:
        tree[name] = training["counters"][name]
    schedules = training["schedules"]
    for name, schedule in (
        ("lr_scheduler", "lr_scheduler"),
        ("random_ltd", "random_ltd_scheduler"),
    ):
        if tree[name] is not None:
            tree[name] = schedules[schedule]
    for name, state in objects["modules"].items():
        _fill_module(tree["module"], name, state)
    declared = tree["ds_config"].get("inmem_snapshot", {}).get("client_state", {})
    tree.update(client_entries(objects, declared))


def client_entries(objects: Mapping[str, Any], declared: Mapping[str, str]) -> Tree:
    """What the script would have given to ``save_checkpoint`` at the snapshot's step.

    ``declared`` says which entries follow which of DeepSpeed's counters.  ExportError if it
    was given at another step and holds an entry of which nothing says what it is now.
    """
    state = objects.get(client_state.NAME)
    if not state:
        return {}
    entries = dict(state["entries"])
    if state["given_at"] != state["step"]:
        unknown = sorted(entries.keys() - declared.keys())
        if unknown:
            raise ExportError(
                f"the script gave its client_state at step {state['given_at']}, the snapshot is "
                f"of step {state['step']}, and nothing says what {', '.join(map(repr, unknown))} "
                'is then: declare it under "client_state" in the inmem_snapshot section, or call '
                "deepspeed_ext.set_client_state"
            )
        counters = objects["training"]["counters"]
        followed = {n: c for n, c in declared.items() if n in entries and c in counters}
        entries.update({name: counters[counter] for name, counter in followed.items()})
    return entries


def _fill_module(module: Tree | None, name: str, state: Any) -> None:
    """Set what a module keeps outside parameters and buffers."""
    key = f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE
    if module is None or key not in module:
        raise ExportError(f"DeepSpeed saves no extra state of {name}, the snapshot holds one")
    module[key] = state


def _fill_optimizer(node: Tree, objects: Mapping[str, Any]) -> None:
    """``node`` is what an optimizer's state_dict() gave, a wrapper's or torch's own."""
    captured = objects["optimizer"]
    scaler, wrapper = captured.get("scaler", {}), captured.get("wrapper", {})
    if "loss_scaler" in node:
        set_fields(node["loss_scaler"], scaler)
    for values in (scaler, wrapper):
        node.update({name: values[name] for name in node.keys() & values.keys()})
    inner = next(_inner(node), None)
    if inner is None:
        raise ExportError("DeepSpeed's optimizer was saved in a way that is not known")
    _fill_inner(inner, objects)


def _inner(node: Tree) -> Iterator[Any]:
    """The state dict of torch's kind in what a wrapper gave, or that itself."""
    if node.keys() >= {"state", "param_groups"}:
        yield node
    for name in _INNER:
        if name in node:
            yield node[name]


def _fill_inner(inner: Any, objects: Mapping[str, Any]) -> None:
    numbers = list(objects["numbers"].values())
    if isinstance(inner, list):
        # elastic_checkpoint: states without groups.
        states = inner
    else:
        (captured,) = objects["groups"]
        groups = inner["param_groups"]
        for name, group in zip(group_names(groups), groups, strict=True):
            group.update(captured[name])
        states = [inner["state"][index] for index in sorted(inner["state"])]
    if not numbers:
        return  # it keeps none beside tensors
    if len(states) != len(numbers):
        raise ExportError(f"{len(states)} optimizer states were recorded, {len(numbers)} captured")
    for state, values in zip(states, numbers, strict=True):
        state.update(values)
