"""The trainer's connection to the SMP of its node.

One thread owns the socket.  The training thread waits for answers only at start-up; on the hot
path it only hands messages over.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from megatron_ft.core.environment import WHY_COLD, ProcessEnvironment, start_kind
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.frameworks import imported_versions
from megatron_ft.core.identity import RankRule, SealedRecord, SnapshotId
from megatron_ft.core.procfs import pid_namespace
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Connection

log = logging.getLogger(__name__)

HELLO_TIMEOUT_SECONDS = 60.0
NOTED_TIMEOUT_SECONDS = 10.0
"""Longest wait of a loaded rank for its SMP's confirmation; then it trains all the same."""

OutcomeCallback = Callable[[SnapshotId, str], None]
ArenaCallback = Callable[[Path], None]


@dataclass(frozen=True)
class RestoreOffer:
    """A snapshot of this shard that the job has agreed to load, and where it lies.

    ``source`` is "memory" for the node's own, "parity" for a rebuilt one.
    """

    arena_path: Path
    slot: int
    record: SealedRecord
    source: str

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that is offered."""
        return self.record.snapshot

    @property
    def iteration(self) -> int:
        """Its iteration."""
        return self.record.iteration


@dataclass(frozen=True)
class ReshapeOffer:
    """A snapshot of another layout that the job has agreed to load.

    A shard is made of it in this rank's arena when all ranks have given their layouts.
    """

    snapshot: SnapshotId
    iteration: int


class TrainerClient:
    """Connection of one trainer rank to its SMP.

    Call ``hello`` once, ``prepare`` once the layout is known, then ``send`` Sealed, Missed or
    Abandoned at each capture's end.  ``on_outcome`` is called from the client's thread with
    "protected", "committed" or "aborted", ``on_arena`` when the job has made another arena.
    """

    def __init__(self, environment: ProcessEnvironment, rank: int, local_rank: int = 0) -> None:
        self._environment = environment
        self._rank, self._local_rank = rank, local_rank
        self.shard_id = ""
        self.on_outcome: OutcomeCallback | None = None
        self.on_arena: ArenaCallback | None = None
        self._answers: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
        self._noted = threading.Event()
        self._closed = False
        self._outbox: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        # A name of its own for each restart: the SMP may not have seen the last connection end.
        identity = f"trainer-{rank}-{os.getpid()}-{environment.incarnation}".encode()
        self._smp = Connection(environment.socket, identity=identity, linger_ms=2000)
        self._thread = threading.Thread(target=self._run, name="megatron-ft-client", daemon=True)
        self._thread.start()

    def hello(
        self, shard_id: str, coordinates: tuple[int, ...]
    ) -> RestoreOffer | ReshapeOffer | None:
        """Register this process as the writer of ``shard_id``; the snapshot to load, if any."""
        self.shard_id = shard_id
        message = m.Hello(
            pid=os.getpid(),
            rank=self._rank,
            local_index=self._local_rank,
            shard_id=shard_id,
            coordinates=coordinates,
            incarnation=self._environment.incarnation,
            pid_namespace=pid_namespace(),
            start=start_kind(),
            versions=imported_versions(),
            why_cold=os.environ.get(WHY_COLD, ""),
        )
        welcome = self._ask(message, m.Welcome, HELLO_TIMEOUT_SECONDS)
        assert isinstance(welcome, m.Welcome)
        if welcome.reshaped is not None:
            return ReshapeOffer(welcome.reshaped, welcome.iteration)
        if welcome.restore is None or welcome.arena is None:
            return None
        return RestoreOffer(Path(welcome.arena), welcome.slot, welcome.restore, welcome.source)

    def prepare(
        self,
        required_bytes: int,
        interval: int,
        timeout: float = 600.0,
        rank_rule: RankRule | None = None,
    ) -> m.Prepared:
        """Ask for an arena of ``required_bytes`` data bytes and wait until it is there.

        All ranks must ask before any is answered, because stripes are padded to their
        longest member.  Raises the error for which the job refused, ControlPlaneError
        after ``timeout`` seconds.
        """
        request = m.Prepare(self.shard_id, required_bytes, interval, rank_rule)
        answer = self._ask(request, m.Prepared, timeout)
        assert isinstance(answer, m.Prepared)
        return answer

    def node_folder(self) -> Path:
        """The node's private folder, where its arenas are."""
        return self._environment.node_dir

    def restored(self, snapshot: SnapshotId) -> None:
        """Report that the shard was loaded and verified; returns once the SMP confirms it.

        A rank may fail, or be killed, within moments of its first iteration.  A message still
        under way would be lost with it, and the failure not held against the snapshot.
        """
        self._confirmed(m.Restored(self.shard_id, snapshot), "was restored; training continues")

    def ending(self, iteration: int, finished: bool) -> None:
        """Report that this rank ends, and whether its plan is done; the SMP confirms it."""
        done = "has finished" if finished else "stops before its planned end"
        self._confirmed(m.Ending(self.shard_id, iteration, finished), done)

    def _confirmed(self, message: m.Message, text: str) -> None:
        """Send, and wait until the SMP confirms it: the process may end right after this."""
        self._noted.clear()
        self.send(message)
        if not self._noted.wait(NOTED_TIMEOUT_SECONDS):
            log.warning(
                "the SMP of node %s has not confirmed in %.0f s that %s %s",
                self._environment.node,
                NOTED_TIMEOUT_SECONDS,
                self.shard_id,
                text,
            )

    def close(self) -> None:
        """Flush what is queued and end the thread; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._outbox.put(None)
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _ask(self, request: m.Message, wanted: type[m.Message], timeout: float) -> m.Message:
        self.send(request)
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise ControlPlaneError(
                f"rank {self._rank} ({self.shard_id}) got no answer to {type(request).__name__} "
                f"from the SMP of node {self._environment.node} at {self._environment.socket} in "
                f"{timeout:.0f} s: other ranks may be late (`megatron-ft status` names them)"
            ) from None
        if isinstance(answer, m.Refused):
            raise answer.error
        if not isinstance(answer, wanted):
            raise ControlPlaneError(f"the SMP answered {type(answer).__name__} to {request!r}")
        return answer

    def send(self, message: m.Message) -> None:
        """Hand a message over, from any thread; it waits for no answer.

        After ``close`` it is dropped.
        """
        if not self._closed:
            self._outbox.put(message)
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._smp.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        with self._smp:
            while True:
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    while not self._outbox.empty():
                        message = self._outbox.get()
                        if message is None:
                            return
                        self._smp.send(message)
                if self._smp.socket in ready:
                    self._on_message(self._smp.receive())

    def _on_message(self, message: m.Message) -> None:
        if isinstance(message, m.Noted):
            self._noted.set()
            return
        if isinstance(message, m.Renewed):
            if self.on_arena is not None:
                self.on_arena(Path(message.arena))
            return
        if not isinstance(message, m.SnapshotOutcome):
            self._answers.put(message)
            return
        if self.on_outcome is None:
            return
        try:
            self.on_outcome(message.snapshot, message.state)
        except Exception:
            log.exception("outcome %s of snapshot %s", message.state, message.snapshot)
