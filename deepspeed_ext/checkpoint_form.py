"""The checkpoint form of a rank: what DeepSpeed itself would save, recorded once.

The trees that DeepSpeed hands to a checkpoint engine are taken from it, and each tensor in them is
replaced by the name of the captured tensor that it can be made from.  No file is written, no tensor
is copied, nothing is communicated.  Names and formats are DeepSpeed's own answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from deepspeed_ext.logical_map import MASTER, ParameterNames, places
from deepspeed_ext.optimizers.view import OptimizerView
from megatron_ft.checkpoint import export as form
from megatron_ft.checkpoint.export import TensorRecipe
from megatron_ft.checkpoint.framework_state import Description, described
from megatron_ft.core.errors import ExportError
from megatron_ft.core.shard import LogicalPlace
from megatron_ft.trainer.addresses import AddressBook, TensorWindow
from megatron_ft.trainer.plan import dtype_name

FRAMEWORK = "deepspeed"
EXTRA_STATE = "_extra_state"
"""Suffix of a module's name in a state dict, for state outside parameters and buffers."""


def describe(engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]) -> bytes:
    """Record what ``engine`` would save, with the names of ``captured`` tensors in it.

    Raises ExportError naming what DeepSpeed would save and no snapshot holds.
    """
    describer = _Describer(engine, view, captured)
    files = record(engine)
    for name, tree in files.items():
        # It changes in training, and exporter.py does not set it anew in such files.
        extra = [key for key in tree if str(key).endswith(EXTRA_STATE)]
        if extra and "global_steps" not in tree:
            raise ExportError(f"{extra[0]} in {name}: such extra state cannot be exported yet")
    return msgspec.msgpack.encode(
        {name: form.dump_form(tree, describer.inside(name)) for name, tree in files.items()}
    )


def files_of(state: bytes) -> dict[str, bytes]:
    return msgspec.msgpack.decode(state, type=dict[str, bytes]) if state else {}


class _Describer:
    """Finds out from what captured tensors a tensor of a checkpoint can be made."""

    def __init__(
        self, engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]
    ) -> None:
        self._captured = AddressBook({name: t.detach() for name, t in captured.items()})
        self._global_names = ParameterNames(engine)
        parameters = dict(engine.module.named_parameters())
        self._parameters = AddressBook(parameters)
        self._partitioned = {n for n, p in parameters.items() if hasattr(p, "ds_id")}
        owned = {id(parameter) for parameter in view.owned()}
        self._owned = {name for name, p in parameters.items() if id(p) in owned}

    def inside(self, file: str) -> Callable[[Any], TensorRecipe | None]:
        def describe(part: Any) -> TensorRecipe | None:
            return self._of(file, part) if isinstance(part, torch.Tensor) else None

        return describe

    def _of(self, file: str, tensor: torch.Tensor) -> TensorRecipe:
        if not tensor.numel():
            return _wanted("", tensor, None)
        window = self._captured.find(tensor.detach())
        if window is not None:
            return _wanted(window.name, tensor, window)
        window = self._parameters.find(tensor.detach())
        if window is None or window.name not in self._owned | self._partitioned:
            raise ExportError(
                f"no snapshot holds a tensor of {list(tensor.shape)}, {dtype_name(tensor.dtype)}, "
                f"which DeepSpeed saves in {file}"
            )
        if window.name in self._partitioned:
            # Gathered for now; DeepSpeed lets go of it before it saves.
            return TensorRecipe("", dtype_name(tensor.dtype), (0,), stride=(1,))
        return _wanted(MASTER, tensor, window, (self._global_names.of(window.name), ()))


def _wanted(
    name: str,
    tensor: torch.Tensor,
    window: TensorWindow | None,
    place: tuple[str, tuple[int, ...]] | None = None,
) -> TensorRecipe:
    return TensorRecipe(
        name,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        window.offset if window is not None else 0,
        tuple(tensor.stride()),
        place,
        tensor.requires_grad,
    )


def describe_rank(
    engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]
) -> Description:
    """Describe the rank; see ``described``.  ``captured`` are the tensors of a snapshot by name."""

    def describe_into(found: dict[str, LogicalPlace]) -> bytes:
        found.update(places(engine, view, captured))
        return describe(engine, view, captured)

    return described(FRAMEWORK, deepspeed_version(), describe_into)


def deepspeed_version() -> str:
    """The release of DeepSpeed, without the commit that a build from source appends."""
    import deepspeed

    return str(deepspeed.__version__).partition("+")[0]


ROOT, TAG = "root", "tag"


def record(engine: Any) -> dict[str, Any]:
    """The content of each file that this rank would save, by its name in the checkpoint.

    The trees hold live tensors and objects.  Whatever DeepSpeed raises comes through.
    """
    recorder = _Recorder(engine.checkpoint_engine)
    stand_ins = {
        "checkpoint_engine": recorder,
        "_copy_recovery_script": lambda _folder: None,
        "_get_param_fragment_func": _frozen_fragment,
    }
    with _replaced(engine, stand_ins), _NoCopies():
        save = engine._save_moe_checkpoint if engine.has_moe_layers else engine._save_checkpoint
        save(ROOT, TAG)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(ROOT, TAG)
    return recorder.files


def _frozen_fragment(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter that the optimizer does not own, where it is."""
    held = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
    return held.detach()  # type: ignore[no-any-return]


class _Recorder:
    """Stands in for DeepSpeed's CheckpointEngine and keeps what it is asked to save."""

    def __init__(self, real: Any) -> None:
        self.files: dict[str, Any] = {}
        self._real = real

    def save(self, state_dict: Any, path: str) -> None:
        self.files[os.path.relpath(path, os.path.join(ROOT, TAG))] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._real.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """As the engine that saves later: it decides what DeepSpeed copies, tuples included."""
        return bool(self._real.preserves_storage_sharing())


class _NoCopies(TorchFunctionMode):
    """Returns the tensor for a call that copies it: a copy is the same in a file."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        moved = func is torch.Tensor.to and len(args) == 2 and isinstance(args[1], torch.device)
        if moved or func in (torch.Tensor.clone, torch.clone, torch.Tensor.cpu):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced(holder: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    before = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    vars(holder).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(holder)[name]
        vars(holder).update(before)
