"""Setting what changes in training into a checkpoint form that was recorded at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_ft.core.errors import ExportError

Tree = dict[str, Any]


def fill(tree: Tree, objects: Mapping[str, Any], step: torch.Tensor | None) -> None:
    """Set one rank's small values as of its snapshot, in place.

    ``objects`` is what MegatronState.objects() gave, ``step`` the optimizer's step where
    the parameters have one each (torch's Adam).  Random states: see ``fill_random_states``.
    ExportError if the form and the objects do not fit each other.
    """
    for name, value in objects["arguments"].items():
        setattr(tree["args"], name, value)
    tree["iteration"] = objects["iteration"]
    tree["num_floating_point_operations_so_far"] = objects["floating_point_operations"]
    if "opt_param_scheduler" in tree:
        tree["opt_param_scheduler"] = objects["schedule"]
    if "optimizer" in tree:
        _fill_optimizers(_optimizers(tree["optimizer"]), objects, step)
    _fill_rerun_machine(tree, objects["rerun_machine"])
    for name, state in objects["modules"].items():
        _fill_module(tree, name, state)


def _fill_module(tree: Tree, name: str, state: Any) -> None:
    """Set what a module keeps outside parameters and buffers; ``name`` begins with its chunk."""
    chunk, _, module = name.partition(".")
    number = chunk.removeprefix("chunk")
    model = tree[f"model{number}" if f"model{number}" in tree else "model"]
    key = f"{module}._extra_state"
    if key not in model:
        raise ExportError(f"Megatron saves no extra state of {name}, the snapshot holds one")
    model[key] = _with_value(model[key], state)


def _optimizers(node: Tree) -> list[Tree]:
    """The optimizers of a chain that own something, in order; one alone is not wrapped."""
    if node.keys() & {"param_state", "param_groups", "optimizer"}:
        return [node]
    return [node[index] for index in sorted(node) if node[index]]


def _fill_optimizers(
    nodes: Sequence[Tree], objects: Mapping[str, Any], step: torch.Tensor | None
) -> None:
    groups, scalers = objects["groups"], objects["scalers"]
    if len(nodes) != len(groups):
        raise ExportError(f"the form has {len(nodes)} optimizers, the snapshot {len(groups)}")
    for node, captured, scaler in zip(nodes, groups, scalers, strict=True):
        inner = _value(node["optimizer"]) if "optimizer" in node else node
        for group, values in zip(inner["param_groups"], captured, strict=True):
            _fill_group(group, values, step)
        # Megatron leaves a step of zero out, and the form was made before the first one.
        if "state" in inner and step is not None and step.item():
            inner["state"]["common_step"] = step
        if "grad_scaler" in node:
            node["grad_scaler"] = _with_value(node["grad_scaler"], scaler)


def _fill_group(group: Tree, values: Mapping[str, Any], step: torch.Tensor | None) -> None:
    for name in group.keys() & values.keys():
        group[name] = values[name]
    if "step" in group and "step" not in values:
        if step is None:
            raise ExportError("the optimizer's step is in no captured tensor")
        group["step"] = step.item()


def _fill_rerun_machine(tree: Tree, state: Mapping[str, Any] | None) -> None:
    if state is None:
        tree.pop("rerun_state_machine", None)
        return
    node = tree.setdefault("rerun_state_machine", {})
    for name, value in state.items():
        node[name] = _with_value(node.get(name), value)


def fill_random_states(tree: Tree, captured: Sequence[Mapping[str, Any]]) -> None:
    """Set the generators' states: of one rank, or of its data-parallel group in its order."""
    if "rng_state" in tree:
        states = [_megatron_names(random) for random in captured]
        tree["rng_state"] = _with_value(tree["rng_state"], states)


def random_state_count(tree: Tree) -> int:
    """How many ranks' random states this rank would save."""
    return len(_value(tree["rng_state"])) if "rng_state" in tree else 0


def _megatron_names(random: Mapping[str, Any]) -> Tree:
    """Captured states under the names of checkpointing.get_rng_state."""
    generators = random["generators"]
    return {
        "random_rng_state": generators["python"],
        "np_rng_state": generators["numpy"],
        "torch_rng_state": generators["torch"],
        "cuda_rng_state": generators["cuda"],
        "rng_tracker_states": random["tracker"],
    }


def _value(node: Any) -> Any:
    """What a ShardedObject holds; any other value as it is."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return node.data if isinstance(node, ShardedObject) else node


def _with_value(node: Any, value: Any) -> Any:
    """``value`` in the ShardedObject ``node``, or in its place if it is none."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    if not isinstance(node, ShardedObject):
        return value
    node.data = value
    return node
