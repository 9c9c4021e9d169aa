"""Tensors, and torch's own small values.  The one module of this package that imports torch."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_ft.core.objects.arrays import checked_shape
from megatron_ft.core.objects.format import Tag

PARAMETER = 1
REQUIRES_GRAD = 2


def torch_to_plain(value: Any) -> list[Any] | None:
    """A tensor, dtype, Size or device with its tag; None for anything else.

    ValueError for tensors that are more than a shape with bytes: sparse, quantized, meta.
    """
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return [Tag.TENSOR, *_tensor_to_plain(value)]
    if kind is torch.dtype:
        return [Tag.TORCH_DTYPE, _dtype_name(value)]
    if kind is torch.Size:
        return [Tag.TORCH_SIZE, list(value)]
    if kind is torch.device:
        return [Tag.TORCH_DEVICE, str(value)]
    return None


def _tensor_to_plain(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be stored")
    flags = PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0
    flags |= REQUIRES_GRAD if tensor.requires_grad else 0
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [_dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type, flags, data]


def tensor_from_plain(dtype: Any, shape: Any, device: Any, flags: Any, data: Any) -> torch.Tensor:
    """A tensor of its own memory, on the current device of that type, or on the CPU without one."""
    kind = dtype_of(dtype)
    if math.prod(checked_shape(shape)) * kind.itemsize != len(data) or not 0 <= flags <= 3:
        raise ValueError(f"{len(data)} bytes for a tensor of {shape} of {dtype}")
    made = torch.empty(shape, dtype=kind)
    if data:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made.view(-1).view(torch.uint8).copy_(raw)
    made = made if device == "cpu" else _moved(made, device)
    if flags & PARAMETER:
        return torch.nn.Parameter(made, requires_grad=bool(flags & REQUIRES_GRAD))
    return made.requires_grad_(bool(flags & REQUIRES_GRAD))


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    backend = getattr(torch, device, None)
    present = backend is not None and hasattr(backend, "is_available") and backend.is_available()
    return tensor.to(device) if present else tensor


def dtype_of(name: Any) -> torch.dtype:
    """torch's type of that name; ValueError if there is none."""
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of torch")
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
