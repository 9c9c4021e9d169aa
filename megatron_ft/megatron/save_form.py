"""Asks Megatron once for what it would save itself: its sharded state dict as a tree.

No file is written and no tensor is copied.  Everything about formats and names is
Megatron's own answer, so nothing of it is repeated here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_ft.megatron.optimizer import is_distributed, optimizer_parts

FORMAT = "torch_dist"


class SaveForm:
    """Megatron's state dict with its own ShardedTensors, factories applied.

    ``tree`` is what ``save_checkpoint`` would hand to ``dist_checkpointing.save``,
    ``content_metadata`` what it would say of it.  ``gathered`` maps a tensor that Megatron
    would have gathered over data-parallel ranks, by its :func:`meta_key`, to (gradient
    buffer, kind of state).
    """

    def __init__(self, tree: dict[str, Any], content_metadata: dict[str, Any]) -> None:
        self.tree = tree
        self.content_metadata = content_metadata
        self.gathered: dict[int, tuple[Any, str]] = {}


def build(model: Sequence[Any], optimizer: Any, scheduler: Any, args: Any) -> SaveForm:
    """Ask Megatron.  Collective if random states are gathered (--data-parallel-random-init).

    Whatever Megatron raises comes through: a model without sharded state dicts has none.
    """
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import checkpointing

    form = SaveForm({}, {})
    with ExitStack() as stack:
        stack.enter_context(_as_torch_dist(args))
        for part in optimizer_parts(optimizer):
            stack.enter_context(_without_gathering(part, form.gathered))
        metadata = checkpointing._build_sharded_state_dict_metadata(args)
        groups = {
            "tp_group": mpu.get_tensor_model_parallel_group(),
            "pp_group": mpu.get_pipeline_model_parallel_group(),
        }
        accepted = inspect.signature(checkpointing.get_rng_state).parameters
        known = {name: group for name, group in groups.items() if name in accepted}
        form.tree = checkpointing.generate_state_dict(
            args,
            checkpointing.unwrap_model(model),
            optimizer,
            scheduler,
            checkpointing.get_rng_state(ckpt_format=FORMAT, **known),
            iteration=0,
            optim_sd_kwargs={"metadata": metadata},
            model_sd_kwargs={"metadata": metadata},
            rerun_state=get_rerun_state_machine().state_dict(None, FORMAT),
        )
        apply_factories(form.tree)
        if "rng_state" in form.tree:
            # Only how many ranks' states there are: each snapshot has its own, and they are large.
            states = form.tree["rng_state"]
            states.data = [None] * len(states.data)
        form.content_metadata = _clean_metadata_for_serialization(metadata)
    return form


@contextmanager
def _as_torch_dist(args: Any) -> Iterator[None]:
    """Have Megatron describe its distributed format inside, whatever --ckpt-format says."""
    given = args.ckpt_format
    args.ckpt_format = FORMAT
    try:
        yield
    finally:
        args.ckpt_format = given


@contextmanager
def _without_gathering(part: Any, gathered: dict[int, tuple[Any, str]]) -> Iterator[None]:
    """Have a fully reshardable optimizer describe whole tensors without gathering them.

    It takes what ``get_parameter_state_dp_zero`` gives and cuts it up; tensors without
    memory (device "meta") serve for that as well.
    """
    if not is_distributed(part):
        yield
        return

    def describe(*_args: Any, **_kwargs: Any) -> dict[Any, Any]:
        kinds = ("param", *getattr(part, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(part.gbuf_ranges):
            buffer = part.buffers[index]
            full = {
                kind: torch.empty(buffer.numel_unpadded, dtype=torch.float32, device="meta")
                for kind in kinds
            }
            for kind, tensor in full.items():
                gathered[meta_key(tensor)] = (buffer, kind)
            state[index] = {dtype: dict(full) for dtype in ranges}
        return state

    part.get_parameter_state_dp_zero = describe
    try:
        yield
    finally:
        del part.get_parameter_state_dp_zero


def meta_key(tensor: torch.Tensor) -> int:
    """Identity of the storage that a meta tensor claims to be a view of."""
    return int(tensor.untyped_storage()._cdata)


def sharded(tree: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    if isinstance(tree, ShardedBase):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from sharded(value)


def sharded_tensors(tree: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return [leaf for leaf in sharded(tree) if isinstance(leaf, ShardedTensor)]
