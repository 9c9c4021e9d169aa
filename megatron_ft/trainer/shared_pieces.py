"""Pieces of one copy, for the copy thread and for a training thread that waits for it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Event, Lock, get_ident
from typing import Protocol

import torch

from megatron_ft.core.fault_points import reach

logger = logging.getLogger(__name__)

ShouldStop = Callable[[], bool]


class Piece(Protocol):
    """A part of a copy that can be made by itself."""

    def move(self) -> None:
        """Copy it in this thread."""


class SharedPieces:
    """What is left of a copy; whoever has time takes the next piece.

    A training thread that has come to its fence can do nothing but wait: with its help the copy
    ends sooner where one core does not copy as fast as memory allows, or is held up.
    """

    def __init__(self) -> None:
        """Nothing is offered yet."""
        self._offered = Event()
        self._left: deque[Piece] = deque()
        self._helping = Lock()
        self._helper = 0
        self._unfinished = False

    def copy(self, pieces: Iterable[Piece], should_stop: ShouldStop) -> bool:
        """Offer them, and copy what is left; True when all of them are copied.

        ``should_stop`` is asked before each piece; False is returned when it said so.  On every way
        out, exceptions included, nobody copies any more.  RuntimeError if help broke off.
        """
        self._left.extend(pieces)
        self._offered.set()
        try:
            complete = self._move(should_stop)
        finally:
            self._left.clear()
            with self._helping:
                # Who comes now finds nothing left.
                unfinished = self._unfinished
        if unfinished:
            raise RuntimeError("a piece was left unfinished by the training thread")
        return complete

    def help(self, until: float) -> None:
        """Copy pieces as long as there are any, at most until that monotonic time.

        Waits for them to be offered, or withdrawn.  What goes wrong is told to ``copy``: only an
        exception that a signal's handler has raised comes through.  In such a handler, run by a
        thread that is helping, it returns at once: the piece below is finished afterwards.
        """
        if self._helper == get_ident():
            return
        if not self._offered.wait(max(0.0, until - time.monotonic())):
            return
        try:
            with self._helping, torch.no_grad():
                # Until it is known that no piece was begun that has not ended.
                self._helper, self._unfinished = get_ident(), True
                self._move(lambda: time.monotonic() >= until)
                self._helper, self._unfinished = 0, False
        except Exception:
            logger.warning("a piece could not be copied in the training thread", exc_info=True)

    def withdraw(self) -> None:
        """Nothing is going to be offered: nobody needs to wait for it."""
        self._offered.set()

    def _move(self, should_stop: ShouldStop) -> bool:
        """Whether there is no piece left that nobody has taken."""
        while not should_stop():
            try:
                piece = self._left.popleft()
            except IndexError:
                return True
            piece.move()
            reach("capture.piece")
        return False
