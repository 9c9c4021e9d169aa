"""Wrong calls of a SnapshotManager, found before anything is stored for them."""

from __future__ import annotations

import operator
import threading
from typing import Any

from megatron_ft.core.errors import UsageError

MOST = 2**63 - 1
"""The highest number of an iteration: arenas and heartbeats store 64 bits with a sign."""


def iteration_number(given: Any) -> int:
    """``given`` as the number of an iteration; UsageError for a value that is not one.

    Integers of numpy and of torch are numbers; a truth value or a fraction is a mistake.
    """
    if type(given) is not int:
        if isinstance(given, bool) or str(getattr(given, "dtype", "")) == "torch.bool":
            raise _not_a_number(given)
        try:
            given = operator.index(given)
        except TypeError:
            raise _not_a_number(given) from None
    if not 0 <= given <= MOST:
        raise _not_a_number(given)
    return int(given)


def _not_a_number(given: Any) -> UsageError:
    return UsageError(
        f"save() got {given!r} ({type(given).__name__}) as the iteration that has ended: give a "
        "whole number from 0 to 2**63 - 1, the same on all ranks, that rises from call to call"
    )


class ManagersOfProcess:
    """Finds a second SnapshotManager of one start: the job serves one for each rank."""

    def __init__(self) -> None:
        self._closed = ""

    def require_first(self, others: list[str]) -> None:
        """UsageError if managers are open, ``others`` by their shards, or one was closed."""
        if others:
            raise UsageError(
                f"this process has a SnapshotManager already, of shard {others[0]}: a rank has "
                "one, with all of its state in one mapping. Use that one here as well. "
                "Accelerate's and DeepSpeed's integrations make their own"
            )
        if self._closed:
            raise UsageError(
                f"the SnapshotManager of shard {self._closed} has captured in this process and was "
                "closed: a start of the job has one for each rank. Keep it open until training "
                "ends, or give the second training a job of its own"
            )

    def closed(self, shard_id: str) -> None:
        self._closed = shard_id

    def restarted(self) -> None:
        self._closed = ""


class StepThread:
    """The thread in which the optimizer steps, and ``save`` has to be called.

    A copy of another thread would read what an optimizer is changing.
    """

    def __init__(self) -> None:
        self._stepped = 0

    def steps(self) -> None:
        self._stepped = threading.get_ident()

    def require(self) -> None:
        """UsageError if another thread of the program steps the optimizer.

        Autograd steps optimizers in threads of its own, behind which the program waits.
        """
        if self._stepped in (0, threading.get_ident()):
            return
        for thread in threading.enumerate():
            if thread.ident == self._stepped and not isinstance(thread, threading._DummyThread):
                raise UsageError(
                    f"save() was called in thread {threading.current_thread().name!r} and the "
                    f"optimizer steps in {thread.name!r}: it would change what save() copies. "
                    "Call save() in the thread that steps"
                )
