"""Checks that this release of Megatron works, and stands in for packages that it need not have.

Megatron imports some packages without a guard that a host-only installation lacks.  Training on a
device needs the real ones; a process that only reads or writes checkpoints, or trains on the
stand-in for a device, does not.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.core.frameworks import MEGATRON, Required, check_release

WRAPPED = (
    Required("megatron.training.arguments", "add_megatron_arguments", ("parser",)),
    Required("megatron.training.training", "setup_model_and_optimizer"),
    Required(
        "megatron.training.training",
        "train",
        (
            "model",
            "optimizer",
            "opt_param_scheduler",
            "train_data_iterator",
            "checkpointing_context",
        ),
    ),
    Required(
        "megatron.training.training",
        "checkpoint_and_decide_exit",
        ("iteration", "num_floating_point_operations_so_far", "train_data_iterator"),
    ),
)

CALLED = (
    Required(
        "megatron.core.distributed.DistributedDataParallel", "start_param_sync", ("force_sync",)
    ),
    Required(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "_copy_main_params_to_model_params",
    ),
    Required(
        "megatron.core.num_microbatches_calculator",
        "update_num_microbatches",
        ("consumed_samples", "verbose"),
    ),
    Required("megatron.core.parallel_state", "get_pipeline_model_parallel_rank"),
    Required("megatron.core.parallel_state", "get_tensor_model_parallel_rank"),
    Required("megatron.core.parallel_state", "get_expert_model_parallel_rank"),
    Required("megatron.core.parallel_state", "get_data_parallel_rank", ("with_context_parallel",)),
    Required("megatron.core.parallel_state", "get_data_parallel_group", ("with_context_parallel",)),
    Required("megatron.core.parallel_state", "get_expert_data_parallel_group"),
    Required("megatron.core.tensor_parallel.random", "get_cuda_rng_tracker"),
    Required("megatron.core.tensor_parallel.random", "convert_cuda_rng_state", ("to_graphable",)),
    Required("megatron.core.tensor_parallel.random", "is_graph_safe_cuda_rng_tracker"),
    Required("megatron.core.rerun_state_machine", "get_rerun_state_machine"),
    Required("megatron.core.rerun_state_machine.RerunStateMachine", "state_dict"),
    Required("megatron.core.rerun_state_machine.RerunStateMachine", "load_state_dict"),
    Required(
        "megatron.training.training",
        "save_checkpoint",
        ("checkpointing_context", "train_data_iterator", "preprocess_common_state_dict_fn"),
    ),
    Required("megatron.training.training", "preprocess_common_state_dict"),
    Required("megatron.training", "get_args"),
    Required("megatron.training.utils", "print_rank_0", ("message",)),
)


def check_megatron(required: Sequence[Required] = WRAPPED + CALLED) -> None:
    try:
        import megatron.core
        import megatron.training.training  # noqa: F401  # the loop must be importable
    except ModuleNotFoundError as error:
        raise UnsupportedVersionError(
            f"{error}: in-memory snapshots need {MEGATRON.working}, with megatron.training"
        ) from error
    check_release(MEGATRON, str(megatron.core.__version__), required, "--inmem-snapshot")


class _Anything:
    """Stands for any attribute of a stub package; as a decorator it returns the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StubModule(types.ModuleType):
    __version__ = "0.0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def supply_packages() -> None:
    """Put stand-ins in the place of what is missing, before Megatron is imported.

    torch's compiler is switched off: it believes in any module called triton.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    supply_typing_override()
    stub_triton()


def supply_typing_override() -> None:
    if not hasattr(typing, "override"):
        import typing_extensions

        module: Any = typing
        module.override = typing_extensions.override


def stub_triton() -> None:
    """Make ``import triton`` work where it is not installed, without torch believing in it."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    from torch.utils import _triton

    detection: Any = _triton
    detection.has_triton_package()  # cached: remember "no" before the stub is visible
    detection.has_triton()
    stubs = {name: _StubModule(name) for name in ("triton", "triton.language")}
    for name, module in stubs.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    stubs["triton"].__dict__["language"] = stubs["triton.language"]
