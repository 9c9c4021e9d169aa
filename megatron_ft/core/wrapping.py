"""Replacing a function of a framework by a wrapper of it, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]

_MARK = "_megatron_ft_wrapper"


def wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Put ``make(original)`` in the place of a function of a module or class.

    A function that was wrapped here before stays as it is, so a second call changes nothing.
    """
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)
