"""Small objects of a training state as bytes, and back, without running anything they name.

``encode`` writes plain values, containers and instances of known classes (object_classes.py);
``decode`` gives them back, or an error.  The bytes are a magic number and one MessagePack value.
``None``, bools, ints of 64 bits, floats, texts and bytes are those of MessagePack; everything else
is an array that begins with a Tag.  Maps and extension types do not occur: msgspec's own way with
containers would lose which kind they are, and what in a state is one object twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from megatron_ft.core.errors import MegatronFTError, UndecodableError, UnencodableError
from megatron_ft.core.object_classes import known_class, known_name, name_of

MAGIC = b"MFTO\x04"
"""Four letters and the version of this layout."""

MOST_DEPTH = 64
"""Containers in containers, at most; deeper would come near the interpreter's own stack."""

MOST_BYTES = 1 << 30
"""Most bytes of one encoded value."""

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values are written as they are."""


class Tag(IntEnum):
    """First element of an array, and what follows it.

    After DICT come the keys and the values, after the other containers the items, after INT
    bytes in two's complement, little-endian (for what 64 bits do not hold).  After OBJECT come
    the name of a known class and the plain value that an instance is made from, after PART a value
    that stands for what is stored elsewhere.

    Lists, dicts, sets and objects are numbered from 0 in the order in which they begin; after
    REFERENCE comes such a number: the same object again.
    """

    LIST = 0
    TUPLE = 1
    DICT = 2
    SET = 3
    FROZENSET = 4
    INT = 5
    OBJECT = 6
    REFERENCE = 7
    PART = 8


class Part(NamedTuple):
    """Placeholder for a part that is stored elsewhere: any encodable value."""

    plain: Any


SizedT = TypeVar("SizedT", bound=Sized)
StandIn = Callable[[Any], Part | None]


def encode(value: Any, stand_in: StandIn | None = None) -> bytes:
    """The bytes of ``value``: containers, numbers, arrays, tensors, registered classes.

    Dicts keep their order, and what is in it twice stays one object.  ``stand_in`` is asked for
    every object that is not a plain number or text: a Part is written instead of it, and the caller
    of ``decode`` says what replaces it.  What ``stand_in`` raises comes through.

    UnencodableError names the place of what cannot be written, its type, and what to do.
    """
    data = _data_of(value, stand_in)
    if len(data) > MOST_BYTES:
        raise UnencodableError(
            f"the small objects of the state take {len(data)} bytes, more than {MOST_BYTES}: keep "
            "large arrays as tensors of the state"
        )
    return MAGIC + data


def written_once(plain: tuple[Any, ...]) -> Part:
    """A Part whose bytes are made now, for values that many calls of ``encode`` write.

    ``plain`` holds numbers, texts and tuples of these alone: lists, dicts and sets are numbered.
    """
    return Part(msgspec.Raw(_data_of(plain, None)))


def _data_of(value: Any, stand_in: StandIn | None) -> bytes:
    try:
        return _packed(_Encoder(stand_in, careful=False).value(value))
    except (OverflowError, UnicodeEncodeError):
        # Integers beyond 64 bits: rare enough to look at each value only then.
        return _packed(_Encoder(stand_in, careful=True).value(value))


_packed = msgspec.msgpack.Encoder().encode


class _Encoder:
    """One pass over a value; a ``careful`` one looks at each integer and text."""

    def __init__(self, stand_in: StandIn | None, careful: bool) -> None:
        self._stand_in, self._careful = stand_in, careful
        self._path: list[object] = []
        self._open: set[int] = set()
        # Number and the object itself: while it is alive no other one has its id.
        self._numbers: dict[int, tuple[int, Any]] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return self._checked(value) if self._careful else value
        known = None if self._stand_in is None else self._stand_in(value)
        if known is not None:
            plain = known.plain
            return [Tag.PART, plain if type(plain) is msgspec.Raw else self.value(plain)]
        if id(value) in self._open:
            raise self._error(value, "refers to itself")
        if (seen := self._numbers.get(id(value))) is not None:
            return [Tag.REFERENCE, seen[0]]
        if len(self._path) > MOST_DEPTH:
            raise self._error(value, f"lies more than {MOST_DEPTH} containers deep")
        return self._tagged(value, kind)

    def _checked(self, value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            size = value.bit_length() // 8 + 1
            return [Tag.INT, value.to_bytes(size, "little", signed=True)]
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise self._error(value, "is not Unicode text: keep it as bytes") from error
        return value

    def _tagged(self, value: Any, kind: type) -> list[Any]:
        tag = _CONTAINERS.get(kind, Tag.OBJECT)
        if tag not in (Tag.TUPLE, Tag.FROZENSET):
            self._numbers[id(value)] = len(self._numbers), value
        if tag is Tag.OBJECT:
            return self._object(value, kind)
        if tag is Tag.DICT:
            keys = self._items(value, ("a key" for _ in value))
            return [tag, keys, self._items(value.values(), value)]
        return [tag, self._items(value, range(len(value)))]

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

    def _object(self, value: Any, kind: type) -> list[Any]:
        known = known_class(kind)
        if known is None:
            raise self._error(
                value,
                "is of a class that snapshots do not know: register it with "
                "megatron_ft.register_class, or keep plain values instead",
            )
        try:
            plain = known.to_plain(value)
        except Exception as error:
            # A user's function: whatever it raises, the snapshot lacks this value.
            raise self._error(value, f"could not be made plain: {error!r}") from error
        self._open.add(id(value))
        encoded = self._inner(plain, _NAMELESS)
        self._open.discard(id(value))
        return [Tag.OBJECT, known.name, encoded]

    def _error(self, value: Any, problem: str) -> UnencodableError:
        path = "/".join(str(name) for name in self._path if name is not _NAMELESS)
        return UnencodableError(
            f"snapshots cannot hold {path or 'the state'} ({name_of(type(value))}): it {problem}"
        )


_NAMELESS = object()
"""On the path where something is inside an object under no name."""

_CONTAINERS: dict[type, Tag] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    dict: Tag.DICT,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
}


def decode(data: bytes, make: Callable[[Any], Any] | None = None) -> Any:
    """The value that ``encode`` was given; ``make(plain)`` in the place of each Part.

    Makes instances of known classes only.  UndecodableError for anything that ``encode``
    does not write; errors of this package that ``make`` raises come through.
    """
    if not data.startswith(MAGIC) or len(data) > MOST_BYTES + len(MAGIC):
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
    """One pass over the arrays that MessagePack gave."""

    def __init__(self, make: Callable[[Any], Any] | None) -> None:
        self._make = make
        self._numbered: list[Any] = []
        self._depth = 0

    def value(self, raw: Any) -> Any:
        kind = type(raw)
        if kind in PLAIN:
            return raw
        if kind is not list or type(raw[0]) is not int:
            raise ValueError(f"a {kind.__name__} without a tag, which is never written")
        self._depth += 1
        if self._depth > _MOST_NESTING:
            raise ValueError(f"more than {MOST_DEPTH} containers in each other")
        made = _READERS[raw[0]](self, *raw[1:])
        self._depth -= 1
        return made

    def _items(self, raw: Any) -> list[Any]:
        if type(raw) is not list:
            raise ValueError(f"a {type(raw).__name__} in the place of items")
        if PLAIN.issuperset(map(type, raw)):
            return raw
        return [self.value(item) for item in raw]

    # Numbered before their items are read, as these may refer to them.

    def _list(self, items: Any) -> list[Any]:
        made: list[Any] = []
        self._numbered.append(made)
        made += self._items(items)
        return made

    def _dict(self, keys: Any, values: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._numbered.append(made)
        read = self._items(keys)
        made |= zip(read, self._items(values), strict=True)
        return _all_of(made, read)

    def _set(self, items: Any) -> set[Any]:
        made: set[Any] = set()
        self._numbered.append(made)
        made |= set(read := self._items(items))
        return _all_of(made, read)

    def _frozenset(self, items: Any) -> frozenset[Any]:
        return _all_of(frozenset(read := self._items(items)), read)

    def _object(self, name: str, plain: Any) -> Any:
        known = known_name(name)
        if known is None:
            raise UndecodableError(
                f"the snapshot holds a {name}, which is not registered here: import the module "
                "that calls megatron_ft.register_class for it first (megatron-ft export --import "
                "MODULE)"
            )
        # Nothing inside of it can refer to it.
        number = len(self._numbered)
        self._numbered.append(_UNFINISHED)
        self._numbered[number] = made = known.from_plain(self.value(plain))
        return made

    def _reference(self, number: int) -> Any:
        found = self._numbered[number] if number >= 0 else _UNFINISHED
        if found is _UNFINISHED:
            raise ValueError(f"a reference to {number}, which is not there yet")
        return found

    def _part(self, plain: Any) -> Any:
        if self._make is None:
            raise ValueError("a part that is stored elsewhere, where there is none")
        return self._make(self.value(plain))


def _all_of(made: SizedT, read: list[Any]) -> SizedT:
    if len(made) != len(read):
        raise ValueError("the same key twice")
    return made


_UNFINISHED = object()

_MOST_NESTING = 2 * (MOST_DEPTH + 2)
"""A tag around a tag where an object is made from a container."""

_READERS: dict[int, Callable[..., Any]] = {
    Tag.LIST: _Decoder._list,
    Tag.TUPLE: lambda decoder, items: tuple(decoder._items(items)),
    Tag.DICT: _Decoder._dict,
    Tag.SET: _Decoder._set,
    Tag.FROZENSET: _Decoder._frozenset,
    Tag.INT: lambda _, data: int.from_bytes(memoryview(data), "little", signed=True),
    Tag.OBJECT: _Decoder._object,
    Tag.REFERENCE: _Decoder._reference,
    Tag.PART: _Decoder._part,
}
