"""Classes whose instances may be among the small objects: named, and made from plain values.

Reading makes instances of these classes and of no others, so bytes cannot choose what runs.

Classes of Megatron and DeepSpeed that their own state dicts hold.

Named here so that reading imports these and nothing else: of modules in ENUMERATIONS only
enumerations, of CLASSES only what is listed.

Classes of Python and numpy that states hold beside plain values.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import fractions
import importlib
import io
import pathlib
import random
import signal
import sys
import types
import uuid
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any

import numpy as np

from megatron_ft.core.errors import ConfigError

ToPlain = Callable[[Any], Any]
FromPlain = Callable[[Any], Any]


@dataclass(frozen=True)
class KnownClass:
    """One class: its name in encoded bytes, and the way there and back."""

    name: str
    to_plain: ToPlain
    from_plain: FromPlain


_by_class: dict[type, KnownClass] = {}
_by_name: dict[str, tuple[type, KnownClass]] = {}


def name_of(cls: type) -> str:
    """``module:class``, by which a class is known if it was given no other name."""
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
    snapshots are to be read.  Call it on import, so that whoever reads a snapshot can do it too.

    ConfigError if the functions are missing, or the name is that of another class.
    """
    given = _given(cls, to_plain, from_plain)
    known = KnownClass(name or name_of(cls), *given)
    owner, _ = _by_name.get(known.name, (cls, known))
    if owner is not cls and name_of(owner) != name_of(cls):
        raise ConfigError(
            f"{known.name!r} is registered for {name_of(owner)}; give {name_of(cls)} another name"
        )
    _by_class[cls] = known
    _by_name[known.name] = (cls, known)


def known_class(cls: type) -> KnownClass | None:
    """What is registered for exactly this class."""
    return _by_class.get(cls)


def known_name(name: str) -> KnownClass | None:
    """What is registered under a name."""
    found = _by_name.get(name)
    return None if found is None else found[1]


def _given(
    cls: type, to_plain: ToPlain | None, from_plain: FromPlain | None
) -> tuple[ToPlain, FromPlain]:
    if to_plain is not None and from_plain is not None:
        return to_plain, from_plain
    if to_plain is None and from_plain is None and (usual := usual_way(cls)) is not None:
        return usual
    raise ConfigError(
        f"{name_of(cls)} cannot be registered without to_plain and from_plain: it is no "
        "enumeration, dataclass or named tuple"
    )


def usual_way(cls: type) -> tuple[ToPlain, FromPlain] | None:
    """How enumerations, named tuples and dataclasses become plain values and back; else None."""
    if issubclass(cls, Flag):
        return (lambda member: member.value), cls
    if issubclass(cls, Enum):
        # Not cls.__getitem__: an enumeration of texts has that of texts.
        return (lambda member: member.name), (lambda name: cls[name])
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return tuple, cls._make
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return (lambda value: {name: getattr(value, name) for name in names}), _Filler(cls, names)
    return None


class _Filler:
    """Makes an instance from its fields, as they are: nothing is computed anew."""

    def __init__(self, cls: type, names: list[str]) -> None:
        self._cls, self._names = cls, names

    def __call__(self, fields: dict[str, Any]) -> Any:
        if sorted(fields) != sorted(self._names):
            raise ValueError(f"fields {sorted(fields)} instead of {sorted(self._names)}")
        made: Any = object.__new__(self._cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made


ENUMERATIONS = frozenset(
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

CLASSES = frozenset(
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
"""What forms of checkpoints are made of, loss scalers, and results that a rerun compares."""


def framework_class(cls: type) -> KnownClass | None:
    """How instances of a class of the tables are stored; None for any other."""
    name = name_of(cls)
    if name in CLASSES or (cls.__module__ in ENUMERATIONS and issubclass(cls, Enum)):
        return KnownClass(name, *(usual_way(cls) or (_attributes, _Maker(cls))))
    return None


def framework_name(name: str) -> KnownClass | None:
    """The same by name; imports the framework's module, ImportError if it is not there."""
    module, _, qualified = name.partition(":")
    if name not in CLASSES and module not in ENUMERATIONS:
        return None
    loaded = sys.modules.get(module) or importlib.import_module(module)
    cls = vars(loaded).get(qualified)
    # A name that the module has from elsewhere would be another class under this one's name.
    return framework_class(cls) if isinstance(cls, type) and name_of(cls) == name else None


def _attributes(value: Any) -> dict[str, Any]:
    return dict(vars(value))


class _Maker:
    """An instance with the attributes that another had."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __call__(self, attributes: dict[str, Any]) -> Any:
        made: Any = object.__new__(self._cls)
        vars(made).update(attributes)
        return made


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
