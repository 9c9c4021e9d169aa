"""Trainers of a node that can restart in their process, and the proof that they write no more.

A new incarnation may be admitted only when no older writer can write (protocol rule 7).  Most
writers are killed for that.  A trainer that has announced itself as Restartable is asked to let go
of its arenas instead.  Its answer is not enough: a thread of it may still copy.  So the SMP looks
at the mappings and the open files of the process; one that still has an arena is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.procfs import PROC, read_stat
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import Send
from megatron_ft.smp.processes import SURVIVOR, WriterProcess, Writers
from megatron_ft.smp.store import SOURCE_SUFFIX, SUFFIX

log = logging.getLogger(__name__)

LET_GO_SECONDS = 2.0
"""Longest wait for a trainer to let go.  One that hangs is killed then and starts warm, which
takes about as long."""


def holds_arena(pid: int, folder: Path) -> bool:
    """True if a process maps an arena of this folder or has one open, and if that is unknown.

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
    return any(place in line and (SUFFIX in line or SOURCE_SUFFIX in line) for line in held)


class Survivors:
    """The restartable trainers among ``writers``; ``folder`` is where the node's arenas are.

    ``renewed`` has the ranks that the last ``let_go`` could not keep, with the reason.
    """

    def __init__(self, writers: Writers, folder: Path, send: Send) -> None:
        self._writers, self._folder, self._send = writers, folder, send
        self._released: dict[int, asyncio.Future[str]] = {}
        self.renewed: dict[int, str] = {}

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
            waiting.set_result(message.unfit)

    async def let_go(self, incarnation: int, ranks: Collection[int]) -> dict[int, int]:
        """Have trainers of these ranks let go; rank to pid of those that provably have.

        They are not writers any more.  All others still have to be killed.
        """
        asked = {rank: found for rank in ranks if (found := self._find(rank)) is not None}
        loop = asyncio.get_running_loop()
        self._released = {rank: loop.create_future() for rank in asked}
        # Before the first wait, after which a trainer that has died is not known here any more.
        gone = {rank: self._writers.gone(survivor) for rank, survivor in asked.items()}
        for survivor in asked.values():
            await self._send((survivor.identity,), m.LetGo(incarnation))
        await asyncio.gather(*(self._answered(*pair) for pair in gone.items()))
        kept, self.renewed = dict[int, int](), {}
        for rank, survivor in asked.items():
            if why := self._why_not(rank, survivor):
                log.info("rank %d will start in a new process: it %s", rank, why)
                self.renewed[rank] = why
            else:
                kept[rank] = survivor.pid
        for writer in self._writers.all():
            if writer.role == "trainer" and writer.pid in kept.values():
                self._writers.release(writer)
        return kept

    def _why_not(self, rank: int, survivor: WriterProcess) -> str:
        """Reason why a trainer cannot be kept, or ""."""
        answer = self._released[rank]
        if answer.done() and (unfit := answer.result()):
            return f"cannot train again in its own ({unfit})"
        if self._find(rank) != survivor:
            return "has ended"
        if not answer.done():
            return f"has not let go within {LET_GO_SECONDS:g} s"
        if holds_arena(survivor.pid, self._folder):
            return "has let go, and still has an arena"
        return ""

    async def reenter(self, request: m.ReenterRanks) -> None:
        """Let released trainers train again; ControlPlaneError names one that is gone."""
        for rank, environment in request.environments.items():
            survivor = self._find(rank)
            if survivor is None:
                raise ControlPlaneError(f"the trainer of rank {rank} ended while it waited")
            await self._send((survivor.identity,), m.Reenter(request.incarnation, environment))

    def _find(self, rank: int) -> WriterProcess | None:
        return self._writers.find(SURVIVOR, str(rank))

    async def _answered(self, rank: int, gone: asyncio.Event) -> None:
        """Return when the trainer has answered, is dead, or has had its time."""
        death = asyncio.ensure_future(gone.wait())
        waits: set[asyncio.Future[Any]] = {self._released[rank], death}
        await asyncio.wait(waits, timeout=LET_GO_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
