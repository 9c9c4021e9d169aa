"""Restart in process: a trainer that survives a failure trains again without a new process.

``run_resilient`` calls the training function, and calls it again when the job restarts.  A thread
receives the request of the node's SMP.  The training function is interrupted, everything that it
has built is torn down, and the SMP proves that no arena is left here (smp/survivors.py).  Then
the supervisor sends what has changed in the environment.  A step that fails or takes too long ends
this process, and its rank starts in a new one.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import torch
import zmq

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.environment import START, ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError, NotUnderSupervisorError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Connection
from megatron_ft.trainer import rendezvous
from megatron_ft.trainer.interrupt import Interrupter, RestartRequested
from megatron_ft.trainer.teardown import ProcessState, tear_down

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 10.0
REENTER_SECONDS = 3600.0
"""Longest wait to train again: the job may rebuild for minutes, or wait for a host."""

BLAME_SECONDS = 30.0
"""Longest wait, after an error of a collective, for the restart that explains it.

The supervisor sees a dead process at once, and a node that is cut off after 1.5 leases.
"""

_COLLECTIVES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe")

Result = TypeVar("Result")


def run_resilient(train: Callable[[], Result]) -> Result:
    """Returns the result of ``train``, which is called again after a failure of another rank.

    ``train`` builds all that it needs: process groups, model, optimizer, data, SnapshotManager.
    It must not rely on anything that an earlier call has built.  Errors of ``train`` itself are
    raised.  ``train`` is called once outside of ``megatron-ft run``, in another thread
    than the main thread, inside another ``run_resilient``, or with the setting ``restart``
    "new-process"; "auto" means that where CUDA is available.
    """
    main = threading.current_thread() is threading.main_thread()
    client = _announce() if main and RestartClient.current is None else None
    if client is None:
        return train()
    rendezvous.install()
    with closing(client):
        while True:
            try:
                with client.interrupter:
                    return train()
            except RestartRequested:
                pass
            except Exception as error:
                if not client.explains(error):
                    raise
            client.restart()


def _announce() -> RestartClient | None:
    """A connection that the SMP has acknowledged; None where a new process takes over."""
    try:
        environment = ProcessEnvironment.from_env()
    except NotUnderSupervisorError:
        return None
    restart = SnapshotConfig.from_env().restart
    if restart == "new-process" or (restart == "auto" and torch.cuda.is_available()):
        return None
    try:
        state = ProcessState()
    except Exception as error:
        log.warning("training cannot restart in process, but in a new one: %s", error)
        return None
    client = RestartClient(environment, int(os.environ.get("RANK", 0)), state)
    if client.announce():
        return client
    client.close()
    return None


def comes_from_others(error: BaseException) -> bool:
    """True if an error, or one that led to it, is of a collective: another rank may have failed.

    Pure.  gloo's errors are RuntimeErrors that name their source file.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, torch.distributed.DistError | ConnectionError):
            return True
        if isinstance(cause, RuntimeError) and any(part in str(cause) for part in _COLLECTIVES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


class RestartClient:
    """Connection of a restartable trainer to its SMP, which asks it to let go and to train again.

    ``current`` is this process's, None while it has none.

    The thread owns the connection; the main thread only waits, and says when it has torn down.
    """

    current: RestartClient | None = None

    def __init__(self, environment: ProcessEnvironment, rank: int, state: ProcessState) -> None:
        RestartClient.current = self
        self.interrupter = Interrupter()
        self._environment, self._rank, self._state = environment, rank, state
        self._known, self._requested = threading.Event(), threading.Event()
        self._reenter: queue.SimpleQueue[m.Reenter] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._wanted, self._training, self._unfit = -1, True, ""
        self._thread = threading.Thread(target=self._serve, name="megatron-ft-restart", daemon=True)

    def announce(self) -> bool:
        """Register this process at the SMP; False if it does not acknowledge."""
        self._thread.start()
        known = self._known.wait(ANNOUNCE_SECONDS)
        if not known:
            log.warning("rank %d will not restart in process: its SMP is silent", self._rank)
        return known

    def explains(self, error: Exception) -> bool:
        """True if a restart is the cause of ``error``; waits where that may be so."""
        return self._requested.wait(BLAME_SECONDS if comes_from_others(error) else 0.0)

    def restart(self) -> None:
        """Tear down, be released, wait, and take the environment of the next incarnation.

        Raises what tear_down raises, which is reported to the job, and ControlPlaneError when no
        incarnation asks for this rank.
        """
        try:
            tear_down(self._state)
        except Exception as error:
            self._unfit = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._requested.clear()
            os.write(self._wake_write, b"down")
        try:
            again = self._reenter.get(timeout=REENTER_SECONDS)
        except queue.Empty:
            raise ControlPlaneError(
                f"rank {self._rank} was released for a restart that did not come in "
                f"{REENTER_SECONDS:.0f} s"
            ) from None
        log.info("rank %d restarts in process for incarnation %d", self._rank, again.incarnation)
        os.environ.update({**again.environment, START: "in process"})

    def close(self) -> None:
        """Leave the SMP; it kills this process at the next restart.  A second call does nothing."""
        if RestartClient.current is not self:
            return
        RestartClient.current = None
        os.write(self._wake_write, b"end")
        self._thread.join(ANNOUNCE_SECONDS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
        # Of an earlier client of this process the SMP may not know yet that it has left.
        identity = f"restart-{self._rank}-{os.getpid()}-{time.monotonic_ns()}".encode()
        with Connection(self._environment.socket, identity=identity, linger_ms=1000) as smp:
            smp.send(m.Restartable(os.getpid(), self._rank))
            poller = zmq.Poller()
            poller.register(smp.socket, zmq.POLLIN)
            poller.register(self._wake_read, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._wake_read in ready and not self._on_wake(os.read(self._wake_read, 8), smp):
                    return
                if smp.socket in ready:
                    self._obey(smp.receive(), smp)

    def _on_wake(self, message: bytes, smp: Connection) -> bool:
        if message.startswith(b"down"):  # "end" may have come behind it
            self._training = False
            self.interrupter.clear()
            smp.send(m.Released(self._rank, self._wanted, self._unfit))
        return message == b"down"

    def _obey(self, message: Any, smp: Connection) -> None:
        if isinstance(message, m.Ok):
            self._known.set()
        elif isinstance(message, m.LetGo):
            self._wanted = message.incarnation
            if self._training:
                self._requested.set()
                self.interrupter.interrupt()
            else:
                smp.send(m.Released(self._rank, self._wanted))
        elif isinstance(message, m.Reenter) and message.incarnation == self._wanted:
            self._training = True
            self._reenter.put(message)
        elif isinstance(message, m.Refused):
            log.warning("rank %d will not restart in process: %s", self._rank, message.reason)
