"""Tensors that ask for a "cuda" device and get host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = (
    "tensor as_tensor empty zeros ones full rand randn randint randperm arange linspace eye "
    "empty_strided empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
).split()
_NEW_METHODS = "new_tensor new_empty new_zeros new_ones new_full new_empty_strided".split()
_TYPE_NAMES = "FloatTensor HalfTensor BFloat16Tensor DoubleTensor IntTensor LongTensor ByteTensor"


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, torch.device) and device.type == "cuda"


def _host_if_cuda(device: Any) -> Any:
    return torch.device("cpu") if _is_cuda(device) else device


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _host_if_cuda(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def replace_factories() -> None:
    """Map ``device=`` in the functions that make tensors."""
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))


def _to_host(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # An int is a device only in first place; later ones are non_blocking and copy.
        if args and _is_cuda(args[0]):
            args = (torch.device("cpu"), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _host_if_cuda(kwargs["device"])
        return move(self, *args, **kwargs)

    return call


def _stay(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def replace_moves() -> None:
    """Map the target of ``to``; ``cuda`` and ``pin_memory`` return the tensor itself."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.to, module.to = _to_host(tensor.to), _to_host(module.to)
    tensor.cuda = tensor.pin_memory = module.cuda = _stay


def replace_type_names() -> None:
    """Answer ``tensor.type()`` with the cuda name: Megatron's optimizers branch on that text."""
    tensor: Any = torch.Tensor
    tensor_type = tensor.type

    @functools.wraps(tensor_type)
    def type_(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, non_blocking, **kwargs)

    tensor.type = type_
    for name in _TYPE_NAMES.split():  # isinstance(t, torch.cuda.FloatTensor) and the like
        setattr(torch.cuda, name, getattr(torch, name))
