"""Ctrl-C in asynchronous work: end it in order, then say that it was interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; everything was ended and removed."""


async def interruptible(work: Callable[[], Awaitable[None]]) -> None:
    """Await ``work``; SIGINT and SIGTERM cancel it, and Interrupted is raised once it has ended."""
    task = asyncio.ensure_future(work())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
