"""Arrays and scalars of numpy, whose bytes are all that they are."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

_PLAIN_DTYPE = re.compile(r"[<>|=](?:[biufcSUVMm])\d+(?:\[\d*\w+\])?")


def dtype_to_plain(dtype: np.dtype[Any]) -> Any:
    """A text, ``[base, shape]`` of a sub-array, or ``[names, formats, offsets, bytes]``.

    ValueError for types that hold Python objects, and for those without bytes.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [dtype_to_plain(base), list(shape)]
    if dtype.fields is not None:
        assert dtype.names is not None
        parts = [dtype.fields[name] for name in dtype.names]
        formats = [dtype_to_plain(part[0]) for part in parts]
        return [list(dtype.names), formats, [part[1] for part in parts], dtype.itemsize]
    if dtype.hasobject or not dtype.itemsize or not _PLAIN_DTYPE.fullmatch(dtype.str):
        raise ValueError(f"numpy's type {dtype} cannot be stored")
    return dtype.str


def dtype_from_plain(plain: Any) -> np.dtype[Any]:
    """The type again; ValueError or TypeError for anything that dtype_to_plain does not give."""
    made = _dtype(plain)
    if dtype_to_plain(made) != plain:
        raise ValueError(f"{plain!r} is no type of numpy")
    return made


def _dtype(plain: Any) -> np.dtype[Any]:
    if isinstance(plain, str):
        if not _PLAIN_DTYPE.fullmatch(plain):
            raise ValueError(f"{plain!r} is no type of numpy")
        return np.dtype(plain)
    if len(plain) == 2:
        return np.dtype((_dtype(plain[0]), tuple(plain[1])))
    names, formats, offsets, itemsize = plain
    return np.dtype(
        {
            "names": names,
            "formats": [_dtype(part) for part in formats],
            "offsets": offsets,
            "itemsize": itemsize,
        }
    )


def array_to_plain(array: np.ndarray[Any, Any]) -> list[Any]:
    """Data type, shape, bytes in C order."""
    return [dtype_to_plain(array.dtype), list(array.shape), array.tobytes()]


def array_from_plain(dtype: Any, shape: Any, data: Any) -> np.ndarray[Any, Any]:
    """An array of its own memory."""
    kind = dtype_from_plain(dtype)
    if math.prod(checked_shape(shape)) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {shape} of {kind}")
    array: np.ndarray[Any, Any] = np.frombuffer(bytearray(data), kind).reshape(shape)
    return array


def scalar_to_plain(scalar: np.generic) -> list[Any]:
    """Data type, bytes; an empty text becomes one of its padding."""
    array = np.array(scalar)
    return [dtype_to_plain(array.dtype), array.tobytes()]


def scalar_from_plain(dtype: Any, data: Any) -> Any:
    """A scalar of that type."""
    return array_from_plain(dtype, [], data)[()]


def checked_shape(shape: Any) -> list[int]:
    """The same list; ValueError unless it is one of lengths."""
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is no shape")
    return shape
