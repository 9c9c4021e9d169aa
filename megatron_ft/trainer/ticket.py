"""Tickets: save() returns one, a claim on one snapshot's steps of safety."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from threading import Lock

from megatron_ft.core.identity import SnapshotId


class Ticket:
    """Three futures of bool in the order of safety; each gives False when it will not happen.

    ``captured``: the tensors may change.  ``protected``: the bytes survive the loss of
    as many nodes as the scheme allows.  ``committed``: a restore would choose this
    snapshot.  Wait with ``ticket.committed.result(timeout=seconds)``, never without a
    timeout in a training loop.  ``snapshot`` is None when the call was skipped.
    """

    def __init__(self, iteration: int, snapshot: SnapshotId | None = None) -> None:
        """A ticket without a snapshot is skipped: its futures are False at once."""
        self.iteration = iteration
        self.snapshot = snapshot
        self.captured: Future[bool] = Future()
        self.protected: Future[bool] = Future()
        self.committed: Future[bool] = Future()
        self._lock = Lock()
        if snapshot is None:
            self.fail()

    @property
    def skipped(self) -> bool:
        return self.snapshot is None

    @property
    def spoiled(self) -> bool:
        """True once the snapshot cannot be committed with parity any more."""
        return any(f.done() and not f.result() for f in (self.captured, self.protected))

    def resolve(self, future: Future[bool], happened: bool) -> None:
        """Set a future unless it is set already: outcomes may overtake each other."""
        with self._lock:
            if not future.done():
                future.set_result(happened)

    def fail(self) -> None:
        for future in (self.captured, self.protected, self.committed):
            self.resolve(future, False)

    def outcome(self, outcome: str) -> bool:
        """Take "protected", "committed" or "aborted" from the SMP; True when it is the last.

        A commit that comes without protection is one at level "local".
        """
        if outcome == "protected":
            self.resolve(self.protected, True)
            return False
        if outcome == "committed":
            self.resolve(self.committed, True)
        self.fail()
        return True


class TicketBook:
    """Tickets that still wait for outcomes, newest ``limit`` of them."""

    def __init__(self, limit: int = 16) -> None:
        """Older tickets than the last ``limit`` are failed: their outcomes were lost."""
        self._limit = limit
        self._open: OrderedDict[SnapshotId, Ticket] = OrderedDict()
        self._lock = Lock()

    @property
    def any_open(self) -> bool:
        with self._lock:
            return bool(self._open)

    def add(self, ticket: Ticket) -> None:
        assert ticket.snapshot is not None
        with self._lock:
            self._open[ticket.snapshot] = ticket
            surplus = len(self._open) - self._limit
            old = [self._open.popitem(last=False)[1] for _ in range(surplus)]
        for forgotten in old:
            forgotten.fail()

    def outcome(self, snapshot: SnapshotId, outcome: str) -> Ticket | None:
        """Pass an outcome on to its ticket, which is returned.

        One for an unknown snapshot is of an earlier incarnation: ignored, None.
        """
        with self._lock:
            ticket = self._open.get(snapshot)
        if ticket is not None and ticket.outcome(outcome):
            self.discard(snapshot)
        return ticket

    def discard(self, snapshot: SnapshotId) -> None:
        with self._lock:
            self._open.pop(snapshot, None)
