"""Megatron on host memory for the tests: the demo's stand-in, and what more flags need of it."""

from __future__ import annotations

import copy
import filecmp
import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron_ft.cli.demo import cpu_device

_HELPER = "megatron.core.datasets.helpers_cpp"


def keep_data_loader_off_the_generator() -> None:
    """Keep the generator where it is when a data loader draws its base seed.

    With a real device that is not the generator of dropout, so it must not move here either.
    """
    loader: Any = DataLoader
    iterate, generator = loader.__iter__, torch.default_generator

    @functools.wraps(iterate)
    def iterate_quietly(self: Any) -> Any:
        state = generator.get_state()
        iterator = iterate(self)
        generator.set_state(state)
        return iterator

    loader.__iter__ = iterate_quietly


def find_dataset_helper() -> None:
    """As the demo does; a checkout without a built helper borrows that of the package.

    A checkout's Makefile may ask another Python for its headers.  It borrows if both have the
    same source, else Megatron builds the helper as ever.
    """
    # A checkout and the package are parts of one namespace: the checkout comes first.
    folders = [Path(part) / "core" / "datasets" for part in import_module("megatron").__path__]
    sources = [source for folder in folders if (source := folder / "helpers.cpp").is_file()]
    if importlib.util.find_spec(_HELPER) is None:
        for source in sources:
            if filecmp.cmp(source, sources[0], shallow=False):
                for built in source.parent.glob("helpers_cpp*.so"):
                    spec: Any = importlib.util.spec_from_file_location(_HELPER, built)
                    sys.modules[_HELPER] = helper = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(helper)
                    cpu_device_utils: Any = import_module("megatron.core.datasets.utils")
                    cpu_device_utils.compile_helpers = lambda: None
                    return
    cpu_device.find_dataset_helper()


def allow_sequence_parallel_torch_norm() -> None:
    """Let torch's norm serve under ``--sequence-parallel``.

    Megatron refuses only because nothing marks the norm's weights, whose gradients must be
    summed over the tensor-parallel group; so mark them.
    """
    wrapped = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    build = wrapped.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    wrapped.__new__ = new


def fill_torch_adam_state() -> None:
    """Mend Megatron's own checkpoints for torch's AdamW under the distributed optimizer.

    Its state is empty until the first step and holds a ``step`` tensor.  Megatron asserts
    that state exists when it loads, gives every parameter the *same* step tensor (which
    AdamW then advances once for each), shards ``step`` as if it were a flat parameter, and
    copies into leaves that require gradients.  Snapshots do not use that path; exports and
    comparisons with Megatron's own checkpoints do.
    """
    distributed = import_module("megatron.core.optimizer.distrib_optimizer")
    if distributed.HAVE_APEX_OR_TE:
        return
    cls = distributed.DistributedOptimizer
    init, load = cls.__init__, cls.load_state_dict
    get_state = cls._get_main_param_and_optimizer_states
    set_state = cls._set_main_param_and_optimizer_states

    @functools.wraps(init)
    def filled_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        inner = self.optimizer
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                if not inner.state[parameter]:
                    zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter))
                    names = ("step", "exp_avg", "exp_avg_sq")
                    inner.state[parameter] |= zip(names, (torch.tensor(0.0), *zeros), strict=True)

    @functools.wraps(load)
    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    @functools.wraps(get_state)
    def get_without_step(self: Any, model_param: Any) -> Any:
        return {k: v for k, v in get_state(self, model_param).items() if k != "step"}

    @functools.wraps(set_state)
    def set_without_step(self: Any, model_param: Any, tensors: Any) -> None:
        with torch.no_grad():
            set_state(self, model_param, {**tensors, "step": None})

    cls.__init__, cls.load_state_dict = filled_init, load_with_own_steps
    cls._get_main_param_and_optimizer_states = get_without_step
    cls._set_main_param_and_optimizer_states = set_without_step


def copy_before_training_continues() -> None:
    """Have the process that writes asynchronous checkpoints copy tensors when it is asked to.

    It copies those of a device while training waits.  Host memory it shares, and writes what
    training has made of it meanwhile.
    """
    writer = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writer = writer.FileSystemWriterAsync
    preload = writer.preload_tensors

    def copied(*args: Any, **kwargs: Any) -> Any:
        return [
            (file, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (objects, tensors) in preload(*args, **kwargs)
        ]

    writer.preload_tensors = staticmethod(copied)


def gather_unequal_tensors() -> None:
    """Gather tensors of different sizes over gloo too, as NCCL does."""
    from torch import distributed

    gather = distributed.all_gather

    @functools.wraps(gather)
    def gather_any(outputs: Any, own: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({output.numel() for output in outputs}) == 1:
            return gather(outputs, own, group=group, async_op=async_op)
        outputs[distributed.get_rank(group)].copy_(own)
        for rank, output in enumerate(outputs):
            if output.numel():
                distributed.broadcast(output, group=group, group_src=rank)
        return None

    distributed.all_gather = gather_any  # type: ignore[assignment]


MEGATRON_PARTS: dict[str, Callable[[], None]] = {
    **cpu_device.MEGATRON_PARTS,
    "megatron.core.datasets.utils": find_dataset_helper,
    "megatron.core.transformer.torch_norm": allow_sequence_parallel_torch_norm,
    "megatron.core.optimizer.layer_wise_optimizer": gather_unequal_tensors,
    "megatron.core.optimizer.distrib_optimizer": fill_torch_adam_state,
}
"""By the module behind whose import each goes."""


def install() -> None:
    """Put the stand-in in place in this process, once."""
    if not cpu_device.needed():
        return
    cpu_device.install(megatron=False)
    for part in MEGATRON_PARTS.values():
        part()
