"""Work that may hang, beside the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], seconds: float) -> Result:
    """The result of ``work``, or asyncio.TimeoutError after ``seconds``; it is left to itself then.

    Not in the loop's executor: the program could not end before a disk that hangs.
    """
    done: futures.Future[Result] = futures.Future()

    def run() -> None:
        with suppress(futures.InvalidStateError):
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

    threading.Thread(target=run, name="in-thread", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(done), seconds)
