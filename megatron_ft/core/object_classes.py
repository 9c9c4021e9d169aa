"""Classes whose instances may be among the small objects: their names, and the way to plain values.

Reading makes instances of these classes and of no others, so bytes cannot choose what runs.
Scripts add their own with ``register_class``.  Those of torch and of the frameworks are known only
where the framework is installed; nothing here imports one before bytes or a value name it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import io
import math
import pathlib
import signal
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_ft.core.errors import ConfigError

ToPlain = Callable[[Any], Any]
FromPlain = Callable[[Any], Any]

T = TypeVar("T")


class KnownClass(NamedTuple):
    """One class: its name in encoded bytes, and the way there and back."""

    name: str
    to_plain: ToPlain
    from_plain: FromPlain


_by_class: dict[type, KnownClass] = {}
_by_name: dict[str, tuple[type, KnownClass]] = {}


def name_of(cls: type) -> str:
    """``module:class``: the name of a class that was registered under no other."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register_class(
    cls: type,
    *,
    name: str | None = None,
    to_plain: ToPlain | None = None,
    from_plain: FromPlain | None = None,
) -> None:
    """Let snapshots hold instances of exactly ``cls``.

    ``to_plain(instance)`` gives a value of plain types, arrays, tensors and registered classes,
    ``from_plain(value)`` an instance again.  Enumerations, dataclasses and named tuples need
    neither.  ``name`` (default ``module:class``) is stored, and must stay the same as long as
    snapshots are to be read.  Call it on import, so that every reader of a snapshot can do it too.

    ConfigError if the functions are missing, or the name is that of another class.
    """
    if to_plain is None or from_plain is None:
        usual = _usual_way(cls) if to_plain is from_plain else None
        if usual is None:
            raise ConfigError(
                f"{name_of(cls)} cannot be registered without to_plain and from_plain: it is not "
                "an enumeration, dataclass or named tuple"
            )
        to_plain, from_plain = usual
    known = KnownClass(name or name_of(cls), to_plain, from_plain)
    owner, _ = _by_name.get(known.name, (cls, known))
    if owner is not cls and name_of(owner) != name_of(cls):
        raise ConfigError(
            f"{known.name!r} is registered for {name_of(owner)}; give {name_of(cls)} another name"
        )
    _by_class[cls] = known
    _by_name[known.name] = (cls, known)


def known_class(cls: type) -> KnownClass | None:
    """The storage of instances of exactly this class; None if they cannot be stored."""
    if (found := _by_class.get(cls)) is not None:
        return found
    if issubclass(cls, np.generic):
        return _by_class[np.generic]
    if cls.__module__.partition(".")[0] == "torch":
        _register_torch()
        return _by_class.get(cls)
    if (found := _framework_class(cls)) is not None:
        _by_class[cls] = found
    return found


def known_name(name: str) -> KnownClass | None:
    """The same for a stored name; may import a framework, ImportError if that is not there."""
    if name.startswith("torch:"):
        _register_torch()
    if (found := _by_name.get(name)) is not None:
        return found[1]
    module, _, qualified = name.partition(":")
    if name not in _FRAMEWORK_CLASSES and module not in _FRAMEWORK_ENUMERATIONS:
        return None
    loaded = sys.modules.get(module) or importlib.import_module(module)
    cls = vars(loaded).get(qualified)
    # A name that the module has from elsewhere would be another class under this one's name.
    return _framework_class(cls) if isinstance(cls, type) and name_of(cls) == name else None


def _usual_way(cls: type) -> tuple[ToPlain, FromPlain] | None:
    """Conversions of an enumeration, named tuple or dataclass to plain and back, or None."""
    if issubclass(cls, Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, Enum):
        # Not cls.__getitem__: an enumeration of texts has that of texts.
        return (lambda member: member.name), (lambda name: cls[name])
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return tuple, cls._make
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return (
            lambda value: {name: getattr(value, name) for name in names},
            functools.partial(_with_attributes, cls, sorted(names)),
        )
    return None


def _with_attributes(cls: type, names: list[str] | None, attributes: dict[str, Any]) -> Any:
    """Make an instance with exactly these attributes, without running its constructor."""
    if names is not None and sorted(attributes) != names:
        raise ValueError(f"fields {sorted(attributes)} instead of {names}")
    made: Any = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _as(kind: type[T], value: Any) -> T:
    """The same value; ValueError unless it is of exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} in the place of {kind.__name__}")
    checked: T = value
    return checked


# --- Megatron's and DeepSpeed's, as their own state dicts hold them -------------------------------

_FRAMEWORK_ENUMERATIONS = frozenset(
    {
        "deepspeed.runtime.config",
        "deepspeed.runtime.zero.config",
        "deepspeed.runtime.zero.offload_config",
        "megatron.core.enums",
        "megatron.core.rerun_state_machine",
        "megatron.core.transformer.enums",
        "megatron.training.checkpointing",
    }
)
"""Modules whose enumerations occur in arguments, configurations and the rerun machine."""

_FRAMEWORK_CLASSES = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler:LossScaler",
        "deepspeed.utils.tensor_fragment:fragment_address",
        "megatron.core.dist_checkpointing.mapping:LocalNonpersistentObject",
        "megatron.core.dist_checkpointing.mapping:ShardedObject",
        "megatron.core.dist_checkpointing.mapping:ShardedTensor",
        "megatron.core.rerun_state_machine:Call",
        "megatron.core.rerun_state_machine:Caller",
        "megatron.core.rerun_state_machine:QuickStats",
    }
)
"""Parts of checkpoint forms, loss scalers, and results that a rerun compares."""


def _framework_class(cls: type) -> KnownClass | None:
    name = name_of(cls)
    listed = cls.__module__ in _FRAMEWORK_ENUMERATIONS and issubclass(cls, Enum)
    if name not in _FRAMEWORK_CLASSES and not listed:
        return None
    if (usual := _usual_way(cls)) is not None:
        return KnownClass(name, *usual)
    restored = functools.partial(_with_attributes, cls, None)
    return KnownClass(name, lambda value: dict(vars(value)), restored)


# --- torch's --------------------------------------------------------------------------------------

_REQUIRES_GRAD, _PARAMETER = 1, 2


@functools.cache
def _register_torch() -> None:
    import torch

    for cls in (torch.Tensor, torch.nn.Parameter):
        register_class(
            cls,
            name=f"torch:{cls.__name__}",
            to_plain=_tensor_to_plain,
            from_plain=functools.partial(_tensor, cls is torch.nn.Parameter),
        )
    register_class(torch.dtype, to_plain=_torch_dtype_name, from_plain=_torch_dtype)
    register_class(
        torch.Size, to_plain=tuple, from_plain=lambda plain: torch.Size(_as(tuple, plain))
    )
    register_class(
        torch.device, to_plain=str, from_plain=lambda plain: torch.device(_as(str, plain))
    )


def _torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: Any) -> Any:
    import torch

    found = vars(torch).get(_as(str, name))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a type of torch")
    return found


def _tensor_to_plain(tensor: Any) -> tuple[str, tuple[int, ...], str, bool, bytes]:
    """Data type, shape, type of device, requires_grad, bytes in C order.

    ValueError for tensors that are more than a shape with bytes: sparse, quantized, meta.
    """
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be stored")
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    dtype, shape = _torch_dtype_name(tensor.dtype), tuple(tensor.shape)
    return dtype, shape, tensor.device.type, tensor.requires_grad, data


def _tensor(parameter: bool, plain: Any) -> Any:
    """A tensor of its own memory, on the current device of that type, or on the CPU without one."""
    import torch

    name, shape, device, requires_grad, data = plain
    dtype = _torch_dtype(name)
    _check_length(shape, dtype.itemsize, data)
    made = torch.empty(shape, dtype=dtype)
    if data:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made.view(-1).view(torch.uint8).copy_(raw)
    backend: Any = getattr(torch, _as(str, device), None)
    if hasattr(backend, "is_available") and backend.is_available():
        made = made.to(device)
    if parameter:
        return torch.nn.Parameter(made, requires_grad=_as(bool, requires_grad))
    return made.requires_grad_(_as(bool, requires_grad))


def _check_length(shape: Any, item_bytes: int, data: Any) -> None:
    """ValueError unless ``data`` are the bytes of an array of that shape."""
    if not all(type(length) is int and length >= 0 for length in _as(tuple, shape)):
        raise ValueError(f"{shape!r} is not a shape")
    if math.prod(shape) * item_bytes != len(_as(bytes, data)):
        raise ValueError(f"{len(data)} bytes for a shape of {shape}, {item_bytes} bytes each")


# --- numpy's --------------------------------------------------------------------------------------


def _array_to_plain(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Data type, shape, bytes in C order; ValueError for types that are more than a name."""
    name = array.dtype.str
    _numpy_dtype(name)
    if array.dtype != np.dtype(name):
        raise ValueError(f"numpy's type {array.dtype} cannot be stored")
    return name, array.shape, array.tobytes()


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    dtype = np.dtype(_as(str, name))
    if dtype.hasobject or not dtype.itemsize or dtype.str != name:
        raise ValueError(f"numpy's type {name!r} cannot be stored")
    return dtype


def _array(plain: Any) -> Any:
    """An array of its own memory."""
    name, shape, data = plain
    dtype = _numpy_dtype(name)
    _check_length(shape, dtype.itemsize, data)
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _scalar(plain: Any) -> Any:
    array = _array(plain)
    if array.shape != ():
        raise ValueError(f"a scalar of shape {array.shape}")
    return array[()]


# --- Python's -------------------------------------------------------------------------------------

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)
} | {"": None, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
"""Factories of a defaultdict: nothing that bytes could choose."""


def _defaultdict_to_plain(mapping: Any) -> tuple[str, dict[Any, Any]]:
    for name, factory in _FACTORIES.items():
        if mapping.default_factory is factory:
            return name, dict(mapping)
    raise ValueError(f"its default_factory {mapping.default_factory!r} cannot be stored")


def _with_vars(cls: Callable[[], Any], attributes: Any) -> Any:
    made = cls()
    vars(made).update(attributes)
    return made


def _ends(span: Any) -> tuple[Any, Any, Any]:
    return span.start, span.stop, span.step


_STANDARD: dict[type, tuple[ToPlain, FromPlain]] = {
    bytearray: (bytes, lambda plain: bytearray(_as(bytes, plain))),
    complex: (lambda c: (c.real, c.imag), lambda plain: complex(*plain)),
    range: (_ends, lambda plain: range(*plain)),
    slice: (_ends, lambda plain: slice(*plain)),
    io.BytesIO: (io.BytesIO.getvalue, io.BytesIO),
    collections.Counter: (dict, collections.Counter),
    collections.OrderedDict: (lambda d: list(d.items()), collections.OrderedDict),
    collections.defaultdict: (
        _defaultdict_to_plain,
        lambda plain: collections.defaultdict(_FACTORIES[plain[0]], plain[1]),
    ),
    collections.deque: (lambda d: (list(d), d.maxlen), lambda plain: collections.deque(*plain)),
    Namespace: (vars, functools.partial(_with_vars, Namespace)),
    types.SimpleNamespace: (vars, functools.partial(_with_vars, types.SimpleNamespace)),
    np.ndarray: (_array_to_plain, _array),
    np.generic: (lambda scalar: _array_to_plain(np.array(scalar)), _scalar),
}
for _cls, (_to_plain, _from_plain) in _STANDARD.items():
    register_class(_cls, to_plain=_to_plain, from_plain=_from_plain)
for _path in (pathlib.PurePosixPath, pathlib.PosixPath):
    # Releases of Python disagree on the module.
    register_class(_path, name=f"pathlib:{_path.__name__}", to_plain=str, from_plain=_path)
register_class(signal.Signals)
