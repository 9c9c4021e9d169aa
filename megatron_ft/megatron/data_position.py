"""Where an external data loader stands.

Megatron's own loaders need nothing here: their position is the number of samples used.
"""

from __future__ import annotations

from typing import Any

from megatron_ft.core.errors import ConfigError

RESERVED_BYTES = 1 << 20
"""Room that is planned for the state of an external loader, which exists only later."""

_METHODS = (("save_state", "restore_state"), ("state_dict", "load_state_dict"))
"""Pairs by which loaders give and take their state; the first that a loader has is used."""


def is_external(args: Any) -> bool:
    """True with ``--dataloader-type external``: the program brings its own loader."""
    return getattr(args, "dataloader_type", None) == "external"


def reservation() -> bytes:
    """Stands for the state while there is no loader, so that it will find room."""
    return bytes(RESERVED_BYTES)


def _loaders(data_iterator: Any) -> list[Any]:
    # One per chunk of a virtual pipeline; Megatron wraps each so that a step can run again.
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [getattr(iterator, "iterable", iterator) for iterator in iterators if iterator]


def _methods(loader: Any) -> tuple[Any, Any]:
    for save, load in _METHODS:
        if callable(getattr(loader, save, None)) and callable(getattr(loader, load, None)):
            return getattr(loader, save), getattr(loader, load)
    pairs = ", or ".join(f"{save}() and {load}(state)" for save, load in _METHODS)
    raise ConfigError(
        f"the external data loader {type(loader).__module__}.{type(loader).__qualname__} cannot "
        f"say where it stands, so a restored run would not read on where it was interrupted: "
        f"give it {pairs}, or train without --inmem-snapshot"
    )


def check(data_iterator: Any) -> None:
    """Raise ConfigError, naming the loader, if one cannot be captured and restored."""
    for loader in _loaders(data_iterator):
        _methods(loader)


def capture(data_iterator: Any) -> list[Any]:
    """The state of each loader on this rank; of values that core.objects.encode takes."""
    return [_methods(loader)[0]() for loader in _loaders(data_iterator)]


def restore(data_iterator: Any, states: list[Any]) -> None:
    """Give each loader what :func:`capture` got."""
    for loader, state in zip(_loaders(data_iterator), states, strict=True):
        _methods(loader)[1](state)
