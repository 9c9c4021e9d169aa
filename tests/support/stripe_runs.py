"""Runs all members of a stripe in threads and raises the first error of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.erasure_samples import (
    ThreadTransport,
    ThreadWorld,
    WorldBroken,
)


def run(size: int, work: Callable[[int, ThreadTransport], Any]) -> list[Any]:
    return ThreadWorld(size).run(work)


def succeed(size: int, work: Callable[[int, ThreadTransport], Any]) -> list[Any]:
    results = run(size, work)
    for error in own_errors(results):
        raise error
    return results


def own_errors(results: list[Any]) -> list[BaseException]:
    """What members raised that were not just let down by others."""
    assert not any(r is None for r in results)
    errors = [r for r in results if isinstance(r, BaseException)]
    return [e for e in errors if not isinstance(e, WorldBroken)]
