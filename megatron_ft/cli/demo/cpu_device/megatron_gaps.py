"""What Megatron lacks when neither CUDA extensions nor a source checkout are there."""

from __future__ import annotations

import copy
import filecmp
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

_HELPER = "megatron.core.datasets.helpers_cpp"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def find_dataset_helper() -> None:
    """Use the built dataset helper of an installed megatron-core instead of running ``make``.

    The package holds no Makefile, and a checkout's may ask another Python for its headers.
    A checkout without a built helper borrows the package's if both have the same source;
    else Megatron builds it as ever.
    """
    utils = _module("megatron.core.datasets.utils")
    if importlib.util.find_spec(_HELPER) is not None or _borrow_dataset_helper():
        utils.compile_helpers = lambda: None


def _borrow_dataset_helper() -> bool:
    # A checkout and the package are parts of one namespace: the checkout comes first.
    folders = [Path(part) / "core" / "datasets" for part in _module("megatron").__path__]
    sources = [source for folder in folders if (source := folder / "helpers.cpp").is_file()]
    for source in sources:
        if filecmp.cmp(source, sources[0], shallow=False):
            for built in source.parent.glob("helpers_cpp*.so"):
                spec: Any = importlib.util.spec_from_file_location(_HELPER, built)
                sys.modules[_HELPER] = helper = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(helper)
                return True
    return False


def skip_jit_warmup() -> None:
    """Skip the warm-up, whose number of random draws depends on the parallel layout.

    With a real device it does not touch the generator that initialises weights.
    """
    _module("megatron.training.initialize")._warmup_jit_function = lambda *args, **kwargs: None


def allow_sequence_parallel_torch_norm() -> None:
    """Let torch's norm serve under ``--sequence-parallel``.

    Megatron refuses only because nothing marks the norm's weights, whose gradients must be
    summed over the tensor-parallel group; so mark them.
    """
    wrapped = _module("megatron.core.transformer.torch_norm").WrappedTorchNorm
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


def _fill(inner: Any) -> None:
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )


def fill_torch_adam_state() -> None:
    """Mend Megatron's own checkpoints for torch's AdamW under the distributed optimizer.

    Its state is empty until the first step and holds a ``step`` tensor.  Megatron asserts
    that state exists when it loads, gives every parameter the *same* step tensor (which
    AdamW then advances once for each), shards ``step`` as if it were a flat parameter, and
    copies into leaves that require gradients.  Snapshots do not use that path; only a
    comparison with Megatron's own checkpoints does.
    """
    distributed = _module("megatron.core.optimizer.distrib_optimizer")
    if distributed.HAVE_APEX_OR_TE:
        return
    cls = distributed.DistributedOptimizer
    init, load = cls.__init__, cls.load_state_dict
    get_state = cls._get_main_param_and_optimizer_states
    set_state = cls._set_main_param_and_optimizer_states

    @functools.wraps(init)
    def filled_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _fill(self.optimizer)

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
