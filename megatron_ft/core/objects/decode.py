"""Bytes to values."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, TypeVar

import msgspec

from megatron_ft.core.errors import MegatronFTError, UndecodableError
from megatron_ft.core.objects.arrays import array_from_plain, scalar_from_plain
from megatron_ft.core.objects.format import MAGIC, MOST_BYTES, MOST_DEPTH, PLAIN, Tag
from megatron_ft.core.objects.registry import KnownClass, framework_name, known_name

Make = Callable[[Any], Any]

T = TypeVar("T")


def decode(data: bytes, make: Make | None = None) -> Any:
    """What ``encode`` was given; ``make(plain)`` in the place of each Part.

    Makes instances of registered classes only.  UndecodableError for anything that ``encode``
    does not write, whatever it is; what ``make`` raises of our own errors comes through.
    """
    if not data.startswith(MAGIC) or len(data) > MOST_BYTES:
        raise UndecodableError(
            f"the small objects ({len(data)} bytes, beginning with {data[: len(MAGIC)].hex()}) are "
            "not in this release's encoding; restore with the release that took the snapshot"
        )
    try:
        return _Decoder(make).value(msgspec.msgpack.decode(memoryview(data)[len(MAGIC) :]))
    except MegatronFTError:
        raise
    except Exception as error:
        # Readers of values raise whatever they meet; to the caller it is one thing.
        raise UndecodableError(f"the stored small objects cannot be read: {error!r}") from error


class _Decoder:
    """One pass over what MessagePack gave."""

    def __init__(self, make: Make | None) -> None:
        self._make = make
        self._numbered: list[Any] = []
        self._depth = 0

    def value(self, raw: Any) -> Any:
        kind = type(raw)
        if kind in PLAIN:
            return raw
        if kind is not list:
            raise ValueError(f"a {kind.__name__}, which is never written")
        self._depth += 1
        if self._depth > _MOST_NESTING:
            raise ValueError(f"more than {MOST_DEPTH} containers in each other")
        made = _READERS[_typed(raw[0], int)](self, *raw[1:])
        self._depth -= 1
        return made

    def _items(self, raw: Any) -> list[Any]:
        if type(raw) is not list:
            raise ValueError(f"a {type(raw).__name__} in the place of items")
        if PLAIN.issuperset(map(type, raw)):
            return raw
        return [self.value(item) for item in raw]

    def _number(self, made: Any) -> Any:
        self._numbered.append(made)
        return made

    def _list(self, items: Any) -> list[Any]:
        made: list[Any] = self._number([])
        made += self._items(items)
        return made

    def _tuple(self, items: Any) -> tuple[Any, ...]:
        return tuple(self._items(items))

    def _dict(self, keys: Any, values: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = self._number({})
        read = self._items(keys)
        made |= zip(read, self._items(values), strict=True)
        _check_count(made, read)
        return made

    def _set(self, items: Any) -> set[Any]:
        made: set[Any] = self._number(set())
        made |= set(read := self._items(items))
        _check_count(made, read)
        return made

    def _frozenset(self, items: Any) -> frozenset[Any]:
        made = frozenset(read := self._items(items))
        _check_count(made, read)
        return made

    def _bytearray(self, data: bytes) -> bytearray:
        made: bytearray = self._number(bytearray(_typed(data, bytes)))
        return made

    def _int(self, data: bytes) -> int:
        return int.from_bytes(_typed(data, bytes), "little", signed=True)

    def _complex(self, real: float, imag: float) -> complex:
        return complex(_typed(real, float), _typed(imag, float))

    def _text(self, data: bytes) -> str:
        return _typed(data, bytes).decode("utf-8", "surrogatepass")

    def _array(self, dtype: Any, shape: Any, data: bytes) -> Any:
        return self._number(array_from_plain(dtype, shape, _typed(data, bytes)))

    def _scalar(self, dtype: Any, data: bytes) -> Any:
        return scalar_from_plain(dtype, _typed(data, bytes))

    def _tensor(self, dtype: Any, shape: Any, device: str, flags: int, data: bytes) -> Any:
        from megatron_ft.core.objects.tensors import tensor_from_plain

        checked = (_typed(device, str), _typed(flags, int), _typed(data, bytes))
        return self._number(tensor_from_plain(dtype, shape, *checked))

    def _torch_dtype(self, name: str) -> Any:
        from megatron_ft.core.objects.tensors import dtype_of

        return dtype_of(name)

    def _torch_size(self, lengths: Any) -> Any:
        import torch

        return torch.Size(_typed(lengths, list))

    def _torch_device(self, name: str) -> Any:
        import torch

        return torch.device(_typed(name, str))

    def _object(self, name: str, plain: Any) -> Any:
        known = _known(_typed(name, str))
        number = len(self._numbered)
        self._number(_UNFINISHED)
        made = self._numbered[number] = known.from_plain(self.value(plain))
        return made

    def _reference(self, number: int) -> Any:
        found = self._numbered[_typed(number, int)] if number >= 0 else _UNFINISHED
        if found is _UNFINISHED:
            raise ValueError(f"a reference to {number}, which is not there yet")
        return found

    def _part(self, plain: Any) -> Any:
        if self._make is None:
            raise ValueError("a part that is stored elsewhere, where there is none")
        return self._make(self.value(plain))


def _known(name: str) -> KnownClass:
    known = known_name(name) or framework_name(name)
    if known is None:
        raise UndecodableError(
            f"the snapshot holds a {name}, which is not registered here: import the module that "
            "calls megatron_ft.register_class for it first (megatron-ft export --import MODULE)"
        )
    return known


def _check_count(made: Sized, read: list[Any]) -> None:
    if len(made) != len(read):
        raise ValueError("the same key twice")


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} in the place of {kind.__name__}")
    checked: T = value
    return checked


_UNFINISHED = object()

_MOST_NESTING = 2 * (MOST_DEPTH + 2)
"""A tag around a tag where an object is made from a container."""

_READERS: dict[int, Callable[..., Any]] = {
    Tag.LIST: _Decoder._list,
    Tag.TUPLE: _Decoder._tuple,
    Tag.DICT: _Decoder._dict,
    Tag.SET: _Decoder._set,
    Tag.FROZENSET: _Decoder._frozenset,
    Tag.BYTEARRAY: _Decoder._bytearray,
    Tag.INT: _Decoder._int,
    Tag.COMPLEX: _Decoder._complex,
    Tag.TEXT: _Decoder._text,
    Tag.ARRAY: _Decoder._array,
    Tag.SCALAR: _Decoder._scalar,
    Tag.TENSOR: _Decoder._tensor,
    Tag.TORCH_DTYPE: _Decoder._torch_dtype,
    Tag.TORCH_SIZE: _Decoder._torch_size,
    Tag.TORCH_DEVICE: _Decoder._torch_device,
    Tag.OBJECT: _Decoder._object,
    Tag.REFERENCE: _Decoder._reference,
    Tag.PART: _Decoder._part,
}
