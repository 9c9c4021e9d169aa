"""Small objects of a rank from those of ranks of another layout, by the rules of Megatron's loader.

Those are of ``load_checkpoint`` in megatron/training/checkpointing.py: counters, schedule and loss
scales are the same on all ranks; parameter groups are found by what tells them apart; random
states are kept while the numbers of tensor and pipeline ranks are; the rerun machine begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.identity import ShardPlace, place_of_shard
from megatron_ft.core.objects import encode

Objects = Mapping[str, Any]
Group = dict[str, Any]

SIZES = "sizes"
"""The name of :func:`parallel_sizes` among the small objects."""

_EXPERT, _STEP = "is_expert_parallel", "step"
_ADVICE = "start with the old flags and number of ranks, or continue from a checkpoint on disk"
_PIPELINE_FLAGS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def parallel_sizes(args: Any) -> dict[str, Any]:
    """Sizes of the parallel groups; ``dp`` counts context-parallel ranks, as shard ids do."""
    context = args.context_parallel_size
    tensor = args.tensor_model_parallel_size
    return {
        "tp": tensor,
        "pp": args.pipeline_model_parallel_size,
        "vpp": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        "stages": [str(getattr(args, name, None)) for name in _PIPELINE_FLAGS],
        "dp": args.data_parallel_size * context,
        "cp": context,
        "ep": getattr(args, "expert_model_parallel_size", None) or 1,
        "etp": getattr(args, "expert_tensor_parallel_size", None) or tensor,
        "random_per_rank": bool(getattr(args, "data_parallel_random_init", False)),
    }


class Origin(NamedTuple):
    """An old shard: its place in the old layout, and its small objects."""

    name: str
    place: ShardPlace
    objects: Objects


class TakenOver(NamedTuple):
    """Objects for ``MegatronState.load``, and sentences about what is exact and what is not."""

    objects: dict[str, Any]
    notes: list[str]


def reshaped(
    own: Objects,
    shard: str,
    origins: Sequence[tuple[str, dict[str, Any]]],
    identity: Sequence[str],
) -> TakenOver:
    """The objects of the rank ``shard``, which has ``own`` as built, from those of old shards.

    ``origins`` are shard ids with objects, the nearest first.  ``identity`` are the keys that tell
    parameter groups apart.  LayoutMismatchError says what cannot be taken over.
    """
    old = [Origin(name, _place(name), objects) for name, objects in origins]
    _require_usable(own, old)
    place, first, notes = _place(shard), old[0].objects, list[str]()
    made = {
        **first,
        SIZES: own[SIZES],
        "groups": _groups(own["groups"], old, identity),
        "numbers": own["numbers"],
        # In the order of modules, which are others in another stage.
        "flags": own.get("flags", b""),
        "scalers": _scalers(own["scalers"], old),
        "modules": _modules(own, place, old),
        "data_position": _data_position(own, place, old),
        "random": _random(own, place, old),
        "rerun_machine": None,
    }
    notes.append(
        "exact: weights, optimizer, iteration, samples, schedule, loss scales"
        + (", random states" if made["random"] is not None else "")
    )
    if made["random"] is None:
        notes.append("begin anew, as when Megatron loads a checkpoint: random states")
    if first["rerun_machine"] is not None:
        notes.append("begins anew: statistics of the rerun machine")
    return TakenOver(made, notes)


def _place(shard: str) -> ShardPlace:
    found = place_of_shard(shard)
    if found is None:
        raise LayoutMismatchError(f"shard {shard!r} has no place in Megatron's parallel groups")
    return found


def _require_usable(own: Objects, old: Sequence[Origin]) -> None:
    """LayoutMismatchError unless all of what old shards hold has a meaning in another layout."""
    if not old:
        raise LayoutMismatchError("no small objects of an old shard were found")
    for name, _, objects in old:
        if objects.get("version") != own["version"] or SIZES not in objects:
            raise LayoutMismatchError(
                f"the snapshot of {name} is of another release and does not say in which layout "
                f"it was taken: {_ADVICE}"
            )
        if objects["iteration"] != old[0].objects["iteration"]:
            raise LayoutMismatchError(f"{name} and {old[0].name} are of different iterations")
        if objects["copied_weights"]:
            raise LayoutMismatchError(
                f"{objects['copied_weights']} weights of {name} were not their masters rounded "
                f"and cannot be taken into another layout: {_ADVICE}"
            )
        if any(objects["numbers"]) or any(own["numbers"]):
            raise LayoutMismatchError(
                f"the optimizer keeps numbers for single parameters: {_ADVICE}"
            )


def _groups(
    own: Sequence[Sequence[Group]], old: Sequence[Origin], identity: Sequence[str]
) -> list[list[Group]]:
    """The scalars of old parameter groups in the order of ``own``.

    Without expert parallelism experts are in the groups of all other parameters, so a group that
    that has no counterpart is searched for without that key.  FusedAdam counts no steps in groups
    without parameters on its rank, so that all groups get the highest (as of Megatron's
    ``_synchronize_steps``, all that have parameters have the same).
    """
    every = [group for origin in old for part in origin.objects["groups"] for group in part]
    known = _by_key(every, identity)
    loosely = _by_key(every, [key for key in identity if key != _EXPERT])
    steps = [group[_STEP] for group in every if _STEP in group]
    step = {_STEP: max(steps, key=float)} if steps else {}
    made = []
    for part in own:
        found = [known(group) or loosely(group) for group in part]
        for group, values in zip(part, found, strict=True):
            if values is None:
                raise LayoutMismatchError(
                    f"no old shard has a parameter group with {_key(group, identity)}; the groups "
                    f"are told apart by {', '.join(identity)}: {_ADVICE}"
                )
        kept = []
        for group, values in zip(part, found, strict=True):
            expert = {_EXPERT: group[_EXPERT]} if _EXPERT in group else {}
            kept.append({**(values or {}), **expert, **step})
        made.append(kept)
    return made


def _by_key(groups: Sequence[Group], identity: Sequence[str]) -> Callable[[Group], Group | None]:
    """A function that finds the group with the key of another, or returns None.

    LayoutMismatchError if several differ in more than ``is_expert_parallel`` and the step.
    """
    found: dict[bytes, list[Group]] = {}
    for group in groups:
        found.setdefault(encode(_key(group, identity)), []).append(group)

    def find(wanted: Group) -> Group | None:
        same = found.get(encode(_key(wanted, identity)), [])
        if len({encode({**group, _EXPERT: None, _STEP: None}) for group in same}) > 1:
            raise LayoutMismatchError(
                f"several parameter groups with {_key(wanted, identity)} differ: {_ADVICE}"
            )
        return same[0] if same else None

    return find


def _key(group: Group, identity: Sequence[str]) -> list[Any]:
    """As Megatron's ``_filter_and_reorder_param_groups``; some releases put ``pre_`` before."""
    return [group.get(name, group.get(f"pre_{name}")) for name in identity]


def _scalers(own: Sequence[Any], old: Sequence[Origin]) -> list[Any]:
    """The loss scale, which all optimizers of all ranks share, for each of ``own`` that scales."""
    every = [state for origin in old for state in origin.objects["scalers"] if state is not None]
    if len({encode(state) for state in every}) > 1:
        raise LayoutMismatchError(f"old shards have different loss scales: {_ADVICE}")
    if bool(every) != any(state is not None for state in own):
        raise LayoutMismatchError("the loss is scaled in only one of the snapshot and this run")
    return [None if state is None else every[0] for state in own]


def _modules(own: Objects, place: ShardPlace, old: Sequence[Origin]) -> dict[str, Any]:
    """Extra states of modules: those of the old shard with the same part of the model."""
    parts = ("tp", "pp", "vpp", "stages", "ep", "etp")
    if all(own[SIZES][name] == old[0].objects[SIZES][name] for name in parts):
        for origin in old:
            if origin.place._replace(dp=0) == place._replace(dp=0):
                states: dict[str, Any] = origin.objects["modules"]
                return states
    for objects in (own, *(origin.objects for origin in old)):
        kept = [name for name, state in objects["modules"].items() if not _is_nothing(state)]
        if kept:
            raise LayoutMismatchError(
                f"{kept[0]} keeps state outside of its parameters and buffers, and no old shard "
                f"with the same part of the model was found: {_ADVICE}"
            )
    return dict(own["modules"])


def _is_nothing(state: Any) -> bool:
    """True for what modules give that keep nothing now: empty bytes, tensors or containers."""
    if hasattr(state, "numel"):
        return not state.numel()
    return state is None or (hasattr(state, "__len__") and not len(state))


def _data_position(own: Objects, place: ShardPlace, old: Sequence[Origin]) -> Any:
    if own["data_position"] is None:
        return None
    same = ("dp", "cp", "vpp")
    if all(own[SIZES][name] == old[0].objects[SIZES][name] for name in same):
        positions = [o.objects["data_position"] for o in old if o.place.dp == place.dp]
        if positions:
            # Some tensor and pipeline ranks read nothing.
            return next(filter(None, positions), [])
    raise LayoutMismatchError(
        "each data-parallel rank has a position of its external data loader (--dataloader-type "
        "external), and there are other ranks now: keep the number of data-parallel ranks, or use "
        "a loader of Megatron's, whose position is the number of samples"
    )


def _random(own: Objects, place: ShardPlace, old: Sequence[Origin]) -> Any:
    """Random states of the same tensor and pipeline rank; None to leave those that ranks have.

    Megatron has those of data-parallel rank 0 loaded by all, unless each has its own.
    """
    sizes, before = own[SIZES], old[0].objects[SIZES]
    if any(sizes[name] != before[name] for name in ("tp", "pp", "random_per_rank")):
        return None
    return next((origin.objects["random"] for origin in _counterparts(sizes, place, old)), None)


def _counterparts(
    sizes: Mapping[str, Any], place: ShardPlace, old: Sequence[Origin]
) -> Iterator[Origin]:
    for origin in old:
        if origin.place[:2] == place[:2]:
            if not sizes["random_per_rank"] or origin.place.dp == place.dp:
                yield origin
