"""A process that acts for the supervisor on a node tells the SMP there, which ends it in time."""

from __future__ import annotations

import os

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import (
    ControlPlaneError,
    NotUnderSupervisorError,
    StaleIncarnationError,
)
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.rpc.pin import serves


def begin_errand(what: str) -> None:
    """From here on this process is ended with the lease of the life that has started it.

    It may write to a disk that other nodes share, where the next life writes too.
    StaleIncarnationError when that life is over.  Without an SMP, or a supervisor, there is
    nobody to ask and none whose lease could end.
    """
    try:
        environment = ProcessEnvironment.from_env()
    except NotUnderSupervisorError:
        return
    if not serves(environment.socket):
        return
    errand = m.Errand(f"{what}-{os.getpid()}", os.getpid(), environment.incarnation)
    answer = ask(environment.socket, errand, 30.0)
    if isinstance(answer, m.Refused):
        kind = StaleIncarnationError if "Stale" in answer.error else ControlPlaneError
        raise kind(f"{what} on node {environment.node} must not begin: {answer.reason}")
