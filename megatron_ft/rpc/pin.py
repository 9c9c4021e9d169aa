"""Pinning a snapshot with the SMPs of this machine, for as long as it is read."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ft.core.environment import SOCKET_NAME
from megatron_ft.core.errors import ControlPlaneError, SnapshotUnavailableError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask


@contextmanager
def pinned(folders: Iterable[Path], snapshot: SnapshotId) -> Iterator[None]:
    """Hold ``snapshot`` on every node of ``folders`` whose SMP runs, until the context ends.

    If one SMP refuses, those asked before are told that nobody reads:
    SnapshotUnavailableError, or ControlPlaneError for one that does not answer.
    """
    reader = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    asked: list[Path] = []
    try:
        for folder in folders:
            if serves(folder / SOCKET_NAME):
                asked.append(folder)
                _pin(folder, m.Pin(reader, snapshot, os.getpid()))
        yield
    finally:
        for folder in asked:
            # An SMP that is gone by now has taken its pins with it.
            with suppress(ControlPlaneError):
                ask(folder / SOCKET_NAME, m.Unpin(reader))


def _pin(folder: Path, request: m.Pin) -> None:
    try:
        answer = ask(folder / SOCKET_NAME, request)
    except ControlPlaneError:
        if serves(folder / SOCKET_NAME):
            raise
        # It has died since it was looked for: its arenas are read like those of a stopped job.
        return
    if isinstance(answer, m.Refused):
        raise SnapshotUnavailableError(
            f"snapshot {request.snapshot} cannot be held in {folder}: {answer.reason}"
        )


def serves(path: Path) -> bool:
    """Whether somebody listens on a Unix socket; one that is merely stopped does, too."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
