"""Trainers of a node that can restart in their process, and the proof that they write no more.

A new incarnation may be admitted only when no older writer can write (protocol rule 7).  Most
writers are killed for that.  A trainer that has announced itself as Restartable is asked to let go
of its arenas instead.  Its word is not enough: a thread of it may still copy.  So the SMP looks
at the mappings and the open files of the process; one that still has an arena is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.procfs import PROC, read_stat
from megatron_ft.rpc import messages as m
from megatron_ft.smp.event_sender import Send
from megatron_ft.smp.processes import SURVIVOR, WriterProcess, Writers
from megatron_ft.smp.store import SUFFIX

LET_GO_SECONDS = 2.0
"""Longest wait for a trainer to let go.  One that hangs is killed then and starts warm, which
takes about as long."""


def holds_arena(pid: int, folder: Path) -> bool:
    """True if a process maps an arena of this folder or has one open, and if nobody can tell.

    A file that was removed keeps its name there, with a mark (proc(5)).  A dead process shows no
    mappings, but it cannot be kept either.
    """
    place = f"{folder}{os.sep}"
    try:
        stat = read_stat(pid)
        if stat is None or stat.ended:
            return True
        held = (PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
        for descriptor in os.listdir(PROC / str(pid) / "fd"):
            with suppress(FileNotFoundError):
                held.append(os.readlink(PROC / str(pid) / "fd" / descriptor))
    except OSError:
        return True
    return any(place in line and SUFFIX in line for line in held)


class Survivors:
    """The restartable trainers among ``writers``; ``folder`` is where the node's arenas are."""

    def __init__(self, writers: Writers, folder: Path, send: Send) -> None:
        self._writers, self._folder, self._send = writers, folder, send
        self._released: dict[int, asyncio.Future[None]] = {}

    def enter(self, message: m.Restartable, identity: bytes) -> None:
        """Register a trainer under its rank; it is watched like a writer.

        ControlPlaneError if the process is dead, or not this user's.
        """
        older = self._find(message.rank)
        if older is not None:
            self._writers.release(older)
        self._writers.add(SURVIVOR, str(message.rank), message.pid, identity)

    def released(self, message: m.Released) -> None:
        """A trainer has answered LetGo; an answer to an older one is ignored."""
        waiting = self._released.get(message.rank)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def let_go(self, incarnation: int, ranks: Collection[int]) -> dict[int, int]:
        """Have trainers of these ranks let go; rank to pid of those that provably have.

        They are no writers any more.  All others still have to be killed.
        """
        asked = {rank: found for rank in ranks if (found := self._find(rank)) is not None}
        loop = asyncio.get_running_loop()
        self._released = {rank: loop.create_future() for rank in asked}
        for survivor in asked.values():
            await self._send((survivor.identity,), m.LetGo(incarnation))
        await asyncio.gather(*(self._answered(*pair) for pair in asked.items()))
        kept = {
            rank: survivor.pid
            for rank, survivor in asked.items()
            if self._released[rank].done() and not holds_arena(survivor.pid, self._folder)
        }
        for writer in self._writers.all():
            if writer.role == "trainer" and writer.pid in kept.values():
                self._writers.release(writer)
        return kept

    async def reenter(self, request: m.ReenterRanks) -> None:
        """Let released trainers train again; ControlPlaneError names one that is gone."""
        for rank, environment in request.environments.items():
            survivor = self._find(rank)
            if survivor is None:
                raise ControlPlaneError(f"the trainer of rank {rank} ended while it waited")
            await self._send((survivor.identity,), m.Reenter(request.incarnation, environment))

    def _find(self, rank: int) -> WriterProcess | None:
        return self._writers.find(SURVIVOR, str(rank))

    async def _answered(self, rank: int, survivor: WriterProcess) -> None:
        """Return when the trainer has answered, is dead, or has had its time."""
        gone = asyncio.ensure_future(self._writers.gone(survivor).wait())
        waits: set[asyncio.Future[Any]] = {self._released[rank], gone}
        await asyncio.wait(waits, timeout=LET_GO_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
