"""A trainer's quiet windows: ``megatron_ft.quiet``, ``pause_traffic`` and ``resume_traffic``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import NotUnderSupervisorError
from megatron_ft.core.word import QuietWord, open_word
from megatron_ft.trainer.stats import Warner

FORGOTTEN = (
    "background traffic was to keep still for %.3f s, which is longer than quiet_seconds (%g s): "
    "it went on after those. Call resume_traffic() where a window ends, or mark shorter ones"
)


class QuietWindows:
    """The windows of one trainer; they may be nested, and the outermost one counts."""

    def __init__(
        self,
        word: QuietWord | None,
        slot: int,
        limit_seconds: float,
        warn: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a word, outside ``megatron-ft run``, windows have no effect."""
        self._word, self._slot, self._limit = word, slot, limit_seconds
        self._warn, self._clock = warn, clock
        self._depth, self._began = 0, 0.0

    def pause(self) -> None:
        """A window begins, unless one is open."""
        self._depth += 1
        if self._word is not None and self._depth == 1:
            self._began = self._clock()
            self._word.begin(self._slot, self._began + self._limit)

    def resume(self) -> None:
        """The innermost window ends; without one nothing happens."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._end()

    def check(self) -> None:
        """At the end of an iteration: a window that was forgotten is warned of and closed."""
        if self._began and self._clock() > self._began + self._limit:
            self._depth = 0
            self._end()

    def _end(self) -> None:
        if self._word is None or not self._began:
            return
        self._word.end(self._slot)
        lasted, self._began = self._clock() - self._began, 0.0
        if lasted > self._limit:
            self._warn("quiet", FORGOTTEN, lasted, self._limit)


@cache
def windows() -> QuietWindows:
    """Those of this process, as its environment says."""
    warn = Warner(logging.getLogger(__name__))
    slot, limit = int(os.environ.get("LOCAL_RANK", 0)), SnapshotConfig.from_env().quiet_seconds
    try:
        word = open_word(ProcessEnvironment.from_env().node_dir)
    except NotUnderSupervisorError:
        word = None
    return QuietWindows(word, slot, limit, warn)


def pause_traffic() -> None:
    """Encoders and drains of this node begin no further block until ``resume_traffic``.

    For moments in which training needs the network, the memory or the cores for itself.  What
    was begun is finished: a block of 1 MiB, or what the rate cap makes of it.  Traffic goes on
    by itself after ``quiet_seconds``, with a warning; so it does when this process dies.
    Takes microseconds; has no effect outside ``megatron-ft run``.
    """
    windows().pause()


def resume_traffic() -> None:
    """The window that ``pause_traffic`` began is over, for this trainer."""
    windows().resume()


@contextmanager
def quiet() -> Iterator[None]:
    """A window from ``pause_traffic`` to ``resume_traffic``."""
    windows().pause()
    try:
        yield
    finally:
        windows().resume()
