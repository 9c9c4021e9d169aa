"""Messages of every type with values of any size, for fuzzing whoever receives them.

They come from a seed: hypothesis, drawing every field by itself, is a hundred times slower.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import msgspec

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m

TYPES = m.MESSAGES
SHARDS = ("dp0", "dp1", "nobody")

_NUMBERS = (-(1 << 63), -1, 0, 1, 7, 1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_NAMED: dict[str, Sequence[Any]] = {
    "parity_root": [bytes(32)],
    "shard_id": SHARDS,
    "snapshot": ((1, 1), (1, 1), (1, 2)),
    "members": (SHARDS[:1], SHARDS[:2]),
    "keep": (SHARDS[:2],),
    "lost": ((), SHARDS[:1]),
    "shards": (SHARDS[:1],),
    "world": ("w1", "w2"),
    "role": ("trainer", "encoder", "?"),
    "level": ("local", "protected", "?"),
    "codec": ("none", "xor", "rs", "?"),
    "incarnation": (0, 1, 1, 1, 1, 1, 2),
    "seconds": (1e5,),
    "error": (("LayoutMismatchError", "unfit"), ("?", "")),
    "endpoint": ("tcp://127.0.0.1:9", "tcp://nowhere"),
}


_type_info = functools.cache(msgspec.inspect.type_info)


class Maker:
    """Makes messages and frames.  Processes are named from ``pids`` only: a receiver kills those
    whom it has registered.
    """

    def __init__(self, seed: int, pids: Sequence[int]) -> None:
        self.random, self._pids = Random(seed), pids
        self._valid = False

    def valid(self, types: Sequence[type[m.Message]] = TYPES) -> m.Message:
        """A message of one of these types that can be decoded, its values being anything."""
        self._valid = True
        message: m.Message = m.decode(msgspec.msgpack.encode(self._message(types)))
        return message

    def frame(self, types: Sequence[type[m.Message]] = TYPES) -> bytes:
        """A frame: a message with some wrong value, or cut, flipped, padded, or noise."""
        while True:
            self._valid = self.random.random() < 0.5
            frame = msgspec.msgpack.encode(self._message(types))
            if self.random.random() < 0.4:
                frame = self._damaged(frame)
            if self._may_be_sent(frame, types):
                return frame

    def _damaged(self, frame: bytes) -> bytes:
        at, noise = self.random.randrange(len(frame) + 1), self.random.randbytes(4)
        kinds = (
            frame[:at],
            frame + noise,
            frame[:at] + noise[:1] + frame[at + 1 :],
            frame[:at] + noise + frame[at:],
            frame[:at] + self.random.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + b"\xff" * 4,
            frame[:at] + b"\x91" * 10_000,
            noise * self.random.randrange(20),
        )
        return self.random.choice(kinds)

    def _may_be_sent(self, frame: bytes, types: Collection[type[m.Message]]) -> bool:
        """Damage must not make a frame that gets others killed, or that was not wanted."""
        try:
            message = m.decode(frame)
        except ControlPlaneError:
            return True
        return getattr(message, "pid", -1) in {*self._pids, -1} and type(message) in types

    def _message(self, types: Sequence[type[m.Message]]) -> Any:
        return self._value(_type_info(self.random.choice(types)))

    def _field(self, name: str, info: Any) -> Any:
        if name == "pid":
            return self.random.choice(self._pids)
        if not self._valid and self.random.random() < 0.05:
            return self._wild(2)
        known = _NAMED.get(name)
        return self._value(info) if known is None else self.random.choice(known)

    def _wild(self, depth: int) -> Any:
        values: tuple[Any, ...] = (None, True, "", "x" * 300, b"", b"12345678", 1.5, float("nan"))
        if depth and self.random.random() < 0.3:
            return [self._wild(depth - 1), {"a": self._wild(depth - 1)}]
        return self.random.choice((*values, *_NUMBERS))

    def _value(self, info: Any) -> Any:
        kinds = msgspec.inspect
        if isinstance(info, kinds.UnionType):
            return self._value(self.random.choice(info.types))
        if isinstance(info, kinds.StructType):
            return self._struct(info)
        if isinstance(info, kinds.DataclassType):
            return {f.encode_name: self._field(f.encode_name, f.type) for f in info.fields}
        if isinstance(info, kinds.EnumType):
            return self.random.choice([*info.cls]).value
        if isinstance(info, kinds.LiteralType):
            return self.random.choice(info.values)
        if isinstance(info, kinds.NamedTupleType):
            return [self._field(field.name, field.type) for field in info.fields]
        if isinstance(info, kinds.VarTupleType):
            return [self._value(info.item_type) for _ in range(self.random.randrange(3))]
        if isinstance(info, kinds.DictType):
            count = range(self.random.randrange(3))
            return {self._value(info.key_type): self._value(info.value_type) for _ in count}
        return self._plain(info)

    def _struct(self, info: Any) -> Any:
        fields = {f.encode_name: self._field(f.encode_name, f.type) for f in info.fields}
        if info.array_like:
            return list(fields.values())
        return fields if info.tag is None else {info.tag_field: info.tag, **fields}

    def _plain(self, info: Any) -> Any:
        kinds, choose = msgspec.inspect, self.random.choice
        if isinstance(info, kinds.IntType):
            return max(choose((0, 1, 1, 2, 3, 1000, 65536, 1 << 60)), info.ge or 0)
        if isinstance(info, kinds.BytesType):
            return self.random.randbytes(info.min_length or choose((0, 8)))
        if isinstance(info, kinds.StrType):
            return choose(("a", "b", "dp0"))
        if isinstance(info, kinds.FloatType):
            return min(choose((0.0, 1.0, 1e5)), 1e5 if info.le is None else info.le)
        return choose((True, False)) if isinstance(info, kinds.BoolType) else None


def absent_pid() -> int:
    """A number that no process has."""
    taken = set(os.listdir("/proc"))
    return next(n for n in range(1 << 22, 1 << 21, -1) if str(n) not in taken)
