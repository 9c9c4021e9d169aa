"""Small objects as bytes: everything comes back bit by bit, and bad bytes give our error."""

from __future__ import annotations

import argparse
import collections
import enum
import os
import pathlib
import signal
import struct
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ft import register_class
from megatron_ft.core.errors import ConfigError, UndecodableError, UnencodableError
from megatron_ft.core.objects import MAGIC, MOST_DEPTH, Part, Tag, decode, encode
from megatron_ft.trainer.state import RngState

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "80"))
some = settings(max_examples=EXAMPLES, deadline=None)

floats = st.integers(0, (1 << 64) - 1).map(
    lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0]
)
texts = st.text(max_size=8)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    floats,
    texts,
    st.binary(max_size=8),
    st.complex_numbers(),
)
keys = st.recursive(
    atoms, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3))
)
values = st.recursive(
    st.one_of(atoms, st.binary(max_size=8).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3).map(collections.OrderedDict),
        st.sets(keys, max_size=3),
    ),
    max_leaves=20,
)


def fingerprint(value: Any) -> Any:
    """Equal for values of the same types and bits, however they compare."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, dict):
        return kind, [(fingerprint(k), fingerprint(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return kind, [fingerprint(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(fingerprint(item)) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1)
        data = raw.view(torch.uint8).tolist() if raw.numel() else []
        return kind, value.dtype, tuple(value.shape), value.requires_grad, data
    return kind, value


def comes_back(value: Any) -> Any:
    again = decode(encode(value))
    assert fingerprint(again) == fingerprint(value)
    return again


@some
@given(values)
@example({1 << 64: -(1 << 63), (1 << 64) - 1: -(1 << 63) - 1, "\u20ac": float("-inf"), -0.0: [()]})
def test_plain_values_come_back_with_their_types_and_bits(value: Any) -> None:
    comes_back(value)


@some
@given(
    st.binary(min_size=4, max_size=64),
    st.sampled_from("<f8 <f2 |b1 <c16 >i4 <U2 |S4 <M8[ns]".split()),
)
def test_arrays_of_numpy(data: bytes, dtype: str) -> None:
    kind = np.dtype(dtype)
    flat = np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], np.uint8)
    if dtype == "<U2":
        flat = flat * 0
    array = flat.view(kind).reshape(-1, 1)
    again = comes_back(array)
    assert again.flags.writeable
    if array.size:
        comes_back(array[0, 0])


def test_strange_arrays() -> None:
    comes_back([np.array(5), np.zeros((0, 3), "<f4"), np.asfortranarray(np.eye(3)), np.float32(2)])
    for bad in (np.array([object()]), np.zeros(2, [("a", "<i4"), ("b", "<f4")])):
        with pytest.raises(UnencodableError, match="cannot hold x/0 "):
            encode({"x": [bad]})


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]
    + [torch.complex64, torch.uint8],
)
def test_tensors(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    again = comes_back([tensor, tensor.T, tensor[0, 1], tensor[:0], dtype, tensor.shape])
    assert again[0].data_ptr() % dtype.itemsize == 0
    assert again[0].fill_(1) is again[0]


def test_parameters_devices_and_refused_tensors() -> None:
    again = comes_back([torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)])
    assert [value.requires_grad for value in again] == [True, True]
    assert decode(encode(torch.device("cuda", 3))) == torch.device("cuda", 3)
    for bad in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(UnencodableError, match="cannot hold the state "):
            encode(bad)


class Color(enum.Enum):
    RED = 1


class Mode(str, enum.Enum):
    FAST = "fast"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclass(frozen=True)
class Options:
    rate: float
    path: pathlib.Path


class Schedule:
    def __init__(self, step: int) -> None:
        self.step = step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and other.step == self.step


for known in (Color, Mode, Access, Point, Options):
    register_class(known)
register_class(Schedule, name="schedule", to_plain=lambda s: s.step, from_plain=Schedule)


def test_registered_and_standard_classes() -> None:
    registered = [Color.RED, Mode.FAST, Access.READ | Access.WRITE, Point(1, [2]), Schedule(7)]
    counted = collections.Counter(a=2)
    standard = [
        argparse.Namespace(lr=0.1, nested=types.SimpleNamespace(a=[1])),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], 5),
        counted,
        Options(0.5, pathlib.Path("/data")),
        pathlib.PurePosixPath("a/b"),
        [range(1, 9, 2), slice(1, None), signal.SIGTERM],
    ]
    again = decode(encode(registered + standard))
    assert again == registered + standard
    assert [type(value) for value in again] == [type(v) for v in registered + standard]
    assert again[7]["missing"] == [] and again[8].maxlen == 5


def test_random_states_come_back() -> None:
    comes_back(RngState().state_dict())
    comes_back(np.random.default_rng(3).bit_generator.state)


def test_what_is_there_twice_is_one_object_again() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    tensor, options = torch.ones(2), argparse.Namespace(a=1)
    again = decode(encode({"a": shared, "b": (shared, tensor, options), "c": [tensor, options]}))
    assert again["a"] is again["b"][0] is again["a"][1]
    assert again["b"][1] is again["c"][0] and again["b"][2] is again["c"][1]


def test_parts_are_put_back_where_they_were() -> None:
    tensor = torch.ones(2)
    data = encode(
        {"state": [tensor, tensor]},
        lambda part: Part(("name", 3)) if isinstance(part, torch.Tensor) else None,
    )
    assert decode(data, lambda plain: plain) == {"state": [("name", 3), ("name", 3)]}
    with pytest.raises(UndecodableError, match="a part that is stored elsewhere"):
        decode(data)


class Unknown(dict[str, Any]):
    pass


class Looped:
    pass


def test_what_cannot_be_stored_is_named_with_its_place_and_the_way_out() -> None:
    place = r"cannot hold schedule/groups/1/fn \(builtins:function\).*register_class"
    with pytest.raises(UnencodableError, match=place):
        encode({"schedule": {"groups": [1, {"fn": lambda: 0}]}})
    for bad in (Unknown(a=1), collections.defaultdict(lambda: 0), Color, threading_lock()):
        with pytest.raises(UnencodableError, match="cannot hold x "):
            encode({"x": bad})
    deep: list[Any] = []
    for _ in range(MOST_DEPTH + 1):
        deep = [deep]
    with pytest.raises(UnencodableError, match="containers deep"):
        encode(deep)
    register_class(Looped, to_plain=lambda value: [value], from_plain=lambda plain: plain[0])
    with pytest.raises(UnencodableError, match="refers to itself"):
        encode(Looped())
    with pytest.raises(UnencodableError, match="cannot hold x .*not Unicode text"):
        encode({"x": "\ud800"})


def threading_lock() -> Any:
    import threading

    return threading.Lock()


def test_registering_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="without to_plain and from_plain"):
        register_class(Unknown)
    with pytest.raises(ConfigError, match="is registered for .*Schedule"):
        register_class(Unknown, name="schedule", to_plain=dict, from_plain=Unknown)


def test_a_class_that_nobody_registered_is_not_looked_for() -> None:
    for name in ("os:system", "subprocess:Popen", "no:such", ""):
        data = MAGIC + msgspec.msgpack.encode([Tag.OBJECT, name, ["true"]])
        with pytest.raises(UndecodableError, match="not registered|cannot be read"):
            decode(data)


SAMPLE: dict[str, Any] = {
    "random": RngState().state_dict(),
    "args": argparse.Namespace(
        lr=0.1, size=torch.Size([2]), dtype=torch.bfloat16, path=pathlib.Path("/")
    ),
    "more": [1 << 70, {1, 2}, (3, frozenset({4})), np.float32(1), np.zeros(3, "<i2"), Color.RED],
    "tensor": torch.ones(2, 3),
    "same": collections.OrderedDict(a=[1.5, "\u20ac", bytearray(b"x"), 1j, torch.device("cpu")]),
}


@some
@given(st.data())
def test_damaged_bytes_give_our_error_or_a_value(data: st.DataObject) -> None:
    raw = bytearray(encode(SAMPLE))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 200) | st.integers(0, len(raw) - 1))
        raw[min(at, len(raw) - 1)] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    only_our_error(bytes(raw))


names = st.sampled_from(["<f4", "float32", "cpu", "schedule", "|V0", "|O"])
raw_atoms = st.none() | st.integers(-3, 20) | st.floats() | st.binary(max_size=9) | names
raw_values = st.recursive(
    raw_atoms | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=1),
    max_leaves=25,
)


@some
@given(st.sampled_from(list(Tag)), st.lists(raw_values, max_size=5))
def test_well_formed_nonsense_gives_our_error_or_a_value(tag: Tag, rest: list[Any]) -> None:
    only_our_error(MAGIC + msgspec.msgpack.encode([tag, *rest]))


@some
@given(st.binary(max_size=60))
def test_noise_gives_our_error(noise: bytes) -> None:
    only_our_error(MAGIC + noise)
    with pytest.raises(UndecodableError, match="not in this release's encoding"):
        decode(b"\x80\x05" + noise)


def only_our_error(data: bytes) -> None:
    try:
        decode(data, lambda plain: plain)
    except UndecodableError:
        pass


def as_object(name: str, *plain: Any) -> list[Any]:
    return [Tag.OBJECT, name, [Tag.TUPLE, list(plain)]]


def test_shapes_and_depths_that_would_need_more_than_the_bytes() -> None:
    array = as_object("numpy:ndarray", "<f8", [Tag.TUPLE, [1 << 40, 1 << 20]], b"12345678")
    tensor = as_object("torch:Tensor", "float32", [Tag.TUPLE, [1 << 60]], "cpu", False, b"")
    shape = [Tag.TUPLE, [0, 1 << 62, 1 << 62]]
    empty = as_object("torch:Tensor", "float32", shape, "cpu", False, b"")
    deep: list[Any] = [Tag.LIST, []]
    for _ in range(300):
        deep = [Tag.TUPLE, [deep]]
    doubled: list[Any] = [Tag.DICT, ["a", "a"], [1, 2]]
    ahead = [Tag.LIST, [[Tag.REFERENCE, 1]]]
    inside = [Tag.OBJECT, "schedule", [Tag.REFERENCE, 0]]
    for raw in (array, tensor, empty, deep, doubled, ahead, inside):
        with pytest.raises(UndecodableError, match="cannot be read"):
            decode(MAGIC + msgspec.msgpack.encode(raw))
