"""Values to bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_ft.core.errors import UnencodableError
from megatron_ft.core.objects.arrays import array_to_plain, scalar_to_plain
from megatron_ft.core.objects.format import MAGIC, MOST_BYTES, MOST_DEPTH, PLAIN, Tag
from megatron_ft.core.objects.registry import KnownClass, framework_class, known_class, name_of


class Part(NamedTuple):
    """What is written in the place of a part that is stored elsewhere: any encodable value."""

    plain: Any


class Lasting:
    """Says of an object that all in it is as it was, and so what was written is written again.

    Whoever keeps it makes a new one as soon as anything in the object, or what stands in for its
    parts, may be another.  Where it lies and what was written before may change: that is seen.
    """

    def __init__(self) -> None:
        """Nothing was written yet."""
        self.written = msgspec.Raw()
        self.place: tuple[int, int] | None = None
        self.numbers: dict[int, tuple[int, Any]] = {}


StandIn = Callable[[Any], Part | Lasting | None]


def encode(value: Any, stand_in: StandIn | None = None) -> bytes:
    """The bytes of ``value``: containers, numbers, arrays, tensors, registered classes.

    Dicts keep their order, and what is in it twice stays one object.  ``stand_in`` is asked for
    every object that is no plain number or text: a Part is written instead of it, and ``decode``
    is told what to put there; for a Lasting the bytes are the same as for None, and cost nothing
    the second time.  What ``stand_in`` raises comes through.

    UnencodableError names the place of what cannot be written, its type, and what to do.
    """
    try:
        data = _encoded(value, stand_in, careful=False)
    except (OverflowError, UnicodeEncodeError):
        # Integers beyond 64 bits, surrogates: rare enough to look at each value only then.
        data = _encoded(value, stand_in, careful=True)
    if len(data) > MOST_BYTES:
        raise UnencodableError(
            f"the small objects of the state take {len(data)} bytes, more than {MOST_BYTES}: keep "
            "large arrays as tensors of the state"
        )
    return data


def _encoded(value: Any, stand_in: StandIn | None, careful: bool) -> bytes:
    encoder = _Encoder(stand_in, careful)
    return MAGIC + msgspec.msgpack.encode(encoder.value(value))


class _Encoder:
    """One pass over a value.

    ``careful`` writes integers and texts so that MessagePack can hold all of them.
    """

    def __init__(self, stand_in: StandIn | None, careful: bool) -> None:
        self._stand_in, self._careful = stand_in, careful
        self._path: list[object] = []
        self._open: set[int] = set()
        # Number and the object itself: while it is alive no other one has its id.
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._referred: list[int] = []

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return _careful(value) if self._careful else value
        known = None if self._stand_in is None else self._stand_in(value)
        if isinstance(known, Part):
            return [Tag.PART, self.value(known.plain)]
        if (seen := self._numbers.get(id(value))) is not None:
            return self._reference(value, seen[0])
        if len(self._path) > MOST_DEPTH:
            raise self._error(value, f"lies more than {MOST_DEPTH} containers deep")
        if known is not None and not self._careful:
            return self._lasting(value, kind, known)
        return self._tagged(value, kind)

    def _lasting(self, value: Any, kind: type, known: Lasting) -> Any:
        """What was written, if all its numbers are the same again and nothing in it is a reference
        to what came before."""
        first = len(self._numbers)
        place = first, len(self._path)
        if known.place == place and known.numbers.keys().isdisjoint(self._numbers):
            self._numbers.update(known.numbers)
            return known.written
        already = len(self._referred)
        encoded = self._tagged(value, kind)
        if min(self._referred[already:], default=first) < first:
            return encoded
        known.written = msgspec.Raw(msgspec.msgpack.encode(encoded))
        known.numbers = dict(islice(self._numbers.items(), first, None))
        known.place = place
        return known.written

    def _tagged(self, value: Any, kind: type) -> list[Any]:
        if kind is dict:
            self._number(value)
            keys = self._items(value, ("a key" for _ in value))
            return [Tag.DICT, keys, self._items(value.values(), value)]
        if kind in _SEQUENCES:
            tag = _SEQUENCES[kind]
            if tag not in (Tag.TUPLE, Tag.FROZENSET):
                self._number(value)
            return [tag, self._items(value, range(len(value)))]
        if kind is bytearray:
            self._number(value)
            return [Tag.BYTEARRAY, bytes(value)]
        if kind is complex:
            return [Tag.COMPLEX, value.real, value.imag]
        return self._array(value, kind) or self._object(value, kind)

    def _items(self, items: Iterable[Any], names: Iterable[object]) -> Sequence[Any]:
        items = list(items)
        if not self._careful and PLAIN.issuperset(map(type, items)):
            return items
        return [self._inner(item, name) for item, name in zip(items, names, strict=True)]

    def _inner(self, item: Any, name: object) -> Any:
        self._path.append(name)
        encoded = self.value(item)
        self._path.pop()
        return encoded

    def _array(self, value: Any, kind: type) -> list[Any] | None:
        plain: list[Any] | None = None
        try:
            if kind is np.ndarray:
                plain = [Tag.ARRAY, *array_to_plain(value)]
            elif isinstance(value, np.generic):
                return [Tag.SCALAR, *scalar_to_plain(value)]
            elif "torch" in sys.modules:
                from megatron_ft.core.objects.tensors import torch_to_plain

                plain = torch_to_plain(value)
        except ValueError as error:
            raise self._error(value, f"cannot be stored: {error}") from error
        if plain is not None and plain[0] in (Tag.ARRAY, Tag.TENSOR):
            self._number(value)
        return plain

    def _object(self, value: Any, kind: type) -> list[Any]:
        known = known_class(kind) or framework_class(kind)
        if known is None:
            raise self._error(
                value,
                "is of a class that snapshots do not know: register it with "
                "megatron_ft.register_class, or keep plain values instead",
            )
        self._number(value)
        self._open.add(id(value))
        encoded = self._inner(self._plain_of(value, known), _NAMELESS)
        self._open.discard(id(value))
        return [Tag.OBJECT, known.name, encoded]

    def _plain_of(self, value: Any, known: KnownClass) -> Any:
        try:
            return known.to_plain(value)
        except Exception as error:
            # A user's function: whatever it raises, the snapshot lacks this value.
            raise self._error(value, f"could not be made plain: {error!r}") from error

    def _number(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._numbers), value

    def _reference(self, value: Any, number: int) -> list[Any]:
        if id(value) in self._open:
            raise self._error(value, "refers to itself")
        self._referred.append(number)
        return [Tag.REFERENCE, number]

    def _error(self, value: Any, problem: str) -> UnencodableError:
        path = "/".join(str(name) for name in self._path if name is not _NAMELESS)
        return UnencodableError(
            f"snapshots cannot hold {path or 'the state'} ({name_of(type(value))}): it {problem}"
        )


def _careful(value: Any) -> Any:
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        size = value.bit_length() // 8 + 1
        return [Tag.INT, value.to_bytes(size, "little", signed=True)]
    if type(value) is str and not _is_utf8(value):
        return [Tag.TEXT, value.encode("utf-8", "surrogatepass")]
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_NAMELESS = object()
"""On the path where something is inside an object under no name."""

_SEQUENCES: dict[type, Tag] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
}
