"""The state of a form: DeepSpeed's files with names in the place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from deepspeed_ext import recording
from deepspeed_ext.fragments import MASTER
from deepspeed_ext.optimizers.view import OptimizerView
from deepspeed_ext.parameter_names import ParameterNames
from megatron_ft.checkpoint import form
from megatron_ft.checkpoint.form import Wanted
from megatron_ft.core.errors import ExportError
from megatron_ft.trainer.addresses import AddressBook, Window
from megatron_ft.trainer.plan import dtype_name

EXTRA_STATE = "_extra_state"
"""What torch adds to a module's name for what it keeps outside parameters and buffers."""


def describe(engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]) -> bytes:
    """Record what ``engine`` would save, with the names of ``captured`` tensors in it.

    Raises ExportError naming what DeepSpeed would save and no snapshot holds.
    """
    describer = _Describer(engine, view, captured)
    files = recording.record(engine)
    for name, tree in files.items():
        _check(name, tree)
    return msgspec.msgpack.encode(
        {name: form.dump(tree, describer.inside(name)) for name, tree in files.items()}
    )


def _check(name: str, tree: Any) -> None:
    """ExportError for what changes in training and is not set anew by export/values.py."""
    if tree.get("data_sampler") is not None:
        raise ExportError("the state of a curriculum's data sampler cannot be exported yet")
    whole = "global_steps" in tree
    extra = [key for key in tree if str(key).endswith(EXTRA_STATE) and not whole]
    if extra:
        raise ExportError(f"{extra[0]} in {name}: extra state in such files cannot be exported yet")


def files_of(state: bytes) -> dict[str, bytes]:
    """What ``form.dump`` gave of each file, by its name, from a form's state."""
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

    def inside(self, file: str) -> Callable[[Any], Wanted | None]:
        """A function for ``form.dump`` of this file."""

        def describe(part: Any) -> Wanted | None:
            return self._of(file, part) if isinstance(part, torch.Tensor) else None

        return describe

    def _of(self, file: str, tensor: torch.Tensor) -> Wanted:
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
            return Wanted("", dtype_name(tensor.dtype), (0,), stride=(1,))
        return _wanted(MASTER, tensor, window, (self._global_names.of(window.name), ()))


def _wanted(
    name: str,
    tensor: torch.Tensor,
    window: Window | None,
    place: tuple[str, tuple[int, ...]] | None = None,
) -> Wanted:
    return Wanted(
        name,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        window.offset if window is not None else 0,
        tuple(tensor.stride()),
        place,
        tensor.requires_grad,
    )
