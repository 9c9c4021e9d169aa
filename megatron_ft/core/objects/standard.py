"""Classes of Python and numpy that states hold beside plain values."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import random
import signal
import types
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_ft.core.objects.registry import register_class

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)
} | {"": None, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
"""What a defaultdict may make: nothing that bytes could choose."""

_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}


def register_standard_classes() -> None:
    """Register them; a script may register its own way for one of them afterwards."""
    _containers()
    _paths_and_times()
    _generators()


def _containers() -> None:
    register_class(collections.OrderedDict, to_plain=_pairs, from_plain=collections.OrderedDict)
    register_class(collections.Counter, to_plain=dict, from_plain=collections.Counter)
    register_class(collections.defaultdict, to_plain=_defaults, from_plain=_defaultdict)
    register_class(
        collections.deque,
        to_plain=lambda d: (list(d), d.maxlen),
        from_plain=lambda plain: collections.deque(*plain),
    )
    for attributes in (Namespace, types.SimpleNamespace):
        register_class(attributes, to_plain=vars, from_plain=_attributes_of(attributes))
    register_class(range, to_plain=_ends, from_plain=lambda ends: range(*ends))
    register_class(slice, to_plain=_ends, from_plain=lambda ends: slice(*ends))
    register_class(io.BytesIO, to_plain=io.BytesIO.getvalue, from_plain=io.BytesIO)


def _paths_and_times() -> None:
    for path in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath):
        # Releases of Python disagree on the module.
        name = f"pathlib:{path.__name__}"
        register_class(path, name=name, to_plain=str, from_plain=path)
    for time in (datetime.datetime, datetime.date, datetime.time):
        register_class(time, to_plain=time.isoformat, from_plain=time.fromisoformat)
    register_class(
        datetime.timedelta,
        to_plain=lambda t: (t.days, t.seconds, t.microseconds),
        from_plain=lambda plain: datetime.timedelta(*plain),
    )
    register_class(decimal.Decimal, to_plain=str, from_plain=decimal.Decimal)
    register_class(
        fractions.Fraction,
        to_plain=fractions.Fraction.as_integer_ratio,
        from_plain=lambda ratio: fractions.Fraction(*ratio),
    )
    register_class(uuid.UUID, to_plain=str, from_plain=uuid.UUID)
    register_class(signal.Signals)


def _generators() -> None:
    register_class(random.Random, to_plain=random.Random.getstate, from_plain=_python_generator)
    register_class(
        np.random.Generator,
        name="numpy.random:Generator",
        to_plain=lambda generator: generator.bit_generator.state,
        from_plain=lambda state: np.random.Generator(_bit_generator(state)),
    )
    register_class(
        np.random.RandomState,
        name="numpy.random:RandomState",
        to_plain=lambda generator: generator.get_state(legacy=False),
        from_plain=_random_state,
    )


def _pairs(ordered: collections.OrderedDict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(ordered.items())


def _ends(span: range | slice) -> tuple[Any, Any, Any]:
    return span.start, span.stop, span.step


def _defaults(mapping: collections.defaultdict[Any, Any]) -> tuple[str, dict[Any, Any]]:
    for name, factory in _FACTORIES.items():
        if mapping.default_factory is factory:
            return name, dict(mapping)
    raise ValueError(f"its default_factory {mapping.default_factory!r} cannot be stored")


def _defaultdict(plain: tuple[str, dict[Any, Any]]) -> collections.defaultdict[Any, Any]:
    name, content = plain
    return collections.defaultdict(_FACTORIES[name], content)


def _attributes_of(cls: type) -> Callable[[dict[str, Any]], Any]:
    def make(attributes: dict[str, Any]) -> Any:
        made = cls()
        vars(made).update(attributes)
        return made

    return make


def _python_generator(state: Any) -> random.Random:
    generator = random.Random()
    generator.setstate(state)
    return generator


def _bit_generator(state: Any) -> Any:
    made = _GENERATORS[state["bit_generator"]]()
    # numpy does not look at it, and would read behind its table.
    position, end = _position(state)
    if not 0 <= position <= end:
        raise ValueError(f"position {position} of {state['bit_generator']}, which has {end} words")
    made.state = state
    return made


def _position(state: Any) -> tuple[int, int]:
    """Where a generator stands in its table of words, and how many there are; (0, 0) if none."""
    if state["bit_generator"] == "MT19937":
        return state["state"]["pos"], 624
    return state.get("buffer_pos", 0), 4


def _random_state(state: Any) -> np.random.RandomState:
    generator = np.random.RandomState(_bit_generator(state))
    generator.set_state(state)
    return generator
