"""Waits in Python, not in torch, for the rank that hosts the store in which ranks meet.

torch connects to the store in C++ until a timeout of minutes: no signal ends that wait, and its
pauses between attempts grow to many seconds.  Here a rank that comes first tries every few
milliseconds.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from megatron_ft.core.frameworks import Function, owner_at, wrap

LOOK_SECONDS = 0.01

FIRST_CONNECT_SECONDS, CONNECT_SECONDS = 0.2, 5.0
"""Longest wait in torch for a store that is there; each one is twice as long as the one before.

A store that goes away just then holds torch for up to a second more, in which it tries again.
"""


def install() -> None:
    """Have ``init_process_group`` wait here; a torch without the function waits by itself."""
    # torch.distributed has a function of the same name.
    module = owner_at("torch.distributed.rendezvous")
    if hasattr(module, "_create_c10d_store"):
        wrap(module, "_create_c10d_store", _patiently)


def _patiently(original: Function) -> Function:
    def create(
        host: str, port: int, rank: int, ranks: int, timeout: timedelta, *args: Any, **kwargs: Any
    ) -> Any:
        from torch.distributed.rendezvous import _torchelastic_use_agent_store

        if rank == 0 and not _torchelastic_use_agent_store():
            return original(host, port, rank, ranks, timeout, *args, **kwargs)
        deadline = time.monotonic() + timeout.total_seconds()
        patience = FIRST_CONNECT_SECONDS
        while True:
            _await_listener(host, port, deadline)
            least = min(timeout, timedelta(seconds=patience))
            try:
                store = original(host, port, rank, ranks, least, *args, **kwargs)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                patience = min(2 * patience, CONNECT_SECONDS)
            else:
                store.set_timeout(timeout)
                return store

    return create


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Return when somebody listens there, or at the deadline."""
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), CONNECT_SECONDS):
            return
        time.sleep(LOOK_SECONDS)
