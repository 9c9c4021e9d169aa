"""Evidence of failures on disk: ``autopsies/NNN/`` in a job's state folder, the newest 20.

Each folder has ``evidence.json`` (Kept), ``rank<r>.log``, the end of a rank's log in that
incarnation, and ``stacks/`` of a hang.  It is complete before a trainer starts again; what cannot
be kept is a warning, and delays nobody for longer than KEEP_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.errors import UNREADABLE, ConfigError
from megatron_ft.core.process_tools import in_thread, log_size, tail
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.heartbeat_page import TrainerPhase
from megatron_ft.supervisor.autopsy import (
    Autopsy,
    Evidence,
    RankEvidence,
    is_settled,
    judge,
    read_log,
)
from megatron_ft.supervisor.ends import End, Failure, Hung
from megatron_ft.supervisor.events import AutopsyEvent

if TYPE_CHECKING:
    # The command that reads evidence starts faster without.
    from megatron_ft.supervisor.events import JobEvent
    from megatron_ft.supervisor.job_context import JobContext

log = logging.getLogger(__name__)

FOLDER, EVIDENCE = "autopsies", "evidence.json"
MOST_FOLDERS = 20
MOST_LOGS = 40
"""Ranks whose logs and stacks are kept; those that ended first, then those behind."""

SETTLE_SECONDS = 1.0
"""Longest wait for the end of the rank whose connections others have lost."""
_POLL_SECONDS = 0.05
ANSWER_SECONDS = 0.3
"""Longest wait for a last heartbeat: a node that is lost sends none."""
KEEP_SECONDS = 2.0
_MOST_EVENTS = 60


class Kept(msgspec.Struct, frozen=True):
    """Content of ``evidence.json``."""

    verdict: Autopsy
    evidence: Evidence


class _Seen(NamedTuple):
    """Observations from before the supervisor ended the trainers."""

    exits: Mapping[int, tuple[int, float]]
    gone: Sequence[str]
    silent: Mapping[str, float]


class EvidenceKeeper:
    """Keeps the evidence of one job's failures in its state folder, and judges each."""

    def __init__(self, job: JobContext) -> None:
        self._folder, self._job = job.state.folder / FOLDER, str(job.state.record.job)
        self._launcher, self._fleet, self._trainers = job.launcher, job.fleet, job.trainers
        self._events: deque[JobEvent] = deque(maxlen=_MOST_EVENTS)
        self._seen: _Seen | None = None
        self._hang: Hung | None = None
        self._started = False
        self._versions: dict[str, str] = {}
        job.observers.subscribe(self._note)
        job.fleet.listen(self._note_versions)

    def _note(self, event: JobEvent) -> None:
        self._events.append(event)
        if event.kind == "trainers_started":
            self._started = True

    def _note_versions(self, event: m.NodeEvent) -> None:
        """Trainers say what they have imported: this process may find other releases."""
        if isinstance(event.body, m.Hello) and event.body.versions:
            self._versions = event.body.versions

    async def observe(self, end: End) -> None:
        """Record which ranks have ended by themselves, before the supervisor ends the others."""
        started, self._started = self._started, False
        if not started or not isinstance(end, Failure):
            return
        self._hang = end if isinstance(end, Hung) else None
        try:
            self._seen = await self._observe()
        except Exception as error:
            log.warning("no autopsy of this failure: %r", error)

    async def _observe(self) -> _Seen:
        trainers, fleet = self._trainers, self._fleet
        nodes, now = set(trainers.nodes_by_rank().values()), time.monotonic()
        since = {n: now - link.last_heard for n, link in fleet.links.items() if n in nodes}
        gone = [node for node in sorted(nodes) if not self._launcher.reachable(node)]
        deadline = now + SETTLE_SECONDS
        while not gone and self._hang is None and time.monotonic() < deadline:
            await trainers.note_exits()
            if not trainers.exits or await in_thread(self._settled, KEEP_SECONDS):
                break
            await asyncio.sleep(_POLL_SECONDS)
            gone = [node for node in sorted(nodes) if not self._launcher.reachable(node)]
        await trainers.note_exits()
        lease = 0.8 * fleet.timing.lease
        silent = {node: seconds for node, seconds in since.items() if seconds >= lease}
        try:
            last = fleet.refresh(but=[*gone, *silent])
            await asyncio.wait_for(last, ANSWER_SECONDS)
        except asyncio.TimeoutError:
            log.info("not all nodes sent a last heartbeat in %.1f s", ANSWER_SECONDS)
        return _Seen(dict(trainers.exits), gone, silent)

    def _settled(self) -> bool:
        ranks = self._ranks(dict(self._trainers.exits))
        return is_settled([one for one in ranks if one.place >= 0])

    def _ranks(self, exits: Mapping[int, tuple[int, float]]) -> list[RankEvidence]:
        """The evidence of each rank, with logs of those that are named first."""
        heard = {one.report.rank: one for one in self._fleet.heartbeats.all()}
        nodes = self._trainers.nodes_by_rank()
        hung = () if self._hang is None else self._hang.ranks
        for rank, one in heard.items():
            nodes.setdefault(rank, one.node)
        first = min((at for _, at in exits.values()), default=0.0)
        places, found = list(exits), []
        for rank, node in nodes.items():
            fields: dict[str, object] = {}
            if rank in exits:
                status, at = exits[rank]
                fields |= {"place": places.index(rank), "status": status, "after": at - first}
            if rank in exits or rank in hung:
                fields["log"] = read_log("\n".join(self._log(rank)))
            if rank in heard:
                report = heard[rank].report
                phase = TrainerPhase(report.phase).name.lower()
                fields |= {"iteration": report.iteration, "marks": report.marks, "phase": phase}
                fields |= {"idle": report.idle, "state": report.state}
                fields |= {"oom_kills": report.oom_kills, "calls": report.calls}
            found.append(RankEvidence(rank=rank, node=node, **fields))  # type: ignore[arg-type]
        # The order of importance: ends, in their order, then ranks behind.
        return sorted(found, key=lambda r: (r.place < 0, r.place, r.marks, r.rank))

    def _log(self, rank: int) -> list[str]:
        """The last lines of a rank's log in this incarnation; none if it cannot be read."""
        path = self._trainers.log_of(rank)
        try:
            return tail(path, self._trainers.log_starts.get(path, 0))
        except OSError:
            return []

    async def keep(self, failure: Failure) -> Failure:
        """Judge a failure, keep its evidence, and emit both; the failure, at the node named."""
        seen, self._seen = self._seen, None
        if seen is None:
            return failure
        try:
            work = partial(self._keep, failure, seen)
            verdict, folder = await in_thread(work, KEEP_SECONDS)
        except Exception as error:
            # A full disk, or one that hangs: the job continues without.
            log.warning("no autopsy of %s: %r", failure.text, error)
            return failure
        event = AutopsyEvent(
            rank=verdict.rank,
            node=verdict.node,
            verdict=verdict.kind,
            how=verdict.how,
            folder=str(folder),
        )
        text = f"stopped first ({verdict.kind}): {verdict.sentence}"
        self._fleet.observers.emit(event, text)
        # The first rank whose end was seen may have died of another one.
        moved = verdict.rank >= 0 and bool(failure.node and verdict.node)
        return replace(failure, node=verdict.node) if moved else failure

    def _keep(self, failure: Failure, seen: _Seen) -> tuple[Autopsy, Path]:
        hang, ranks, now = self._hang, self._ranks(seen.exits), time.monotonic()
        evidence = Evidence(
            job=self._job,
            incarnation=self._fleet.incarnation,
            time=time.time(),
            failure=failure.text,
            cause=failure.cause,
            node=failure.node,
            ranks=tuple(ranks),
            gone=tuple(seen.gone),
            losses_known=self._launcher.knows_losses,
            silent=dict(seen.silent),
            hung=() if hang is None else hang.ranks,
            hang="" if hang is None else hang.report,
            how="" if hang is None else hang.how,
            versions={**_versions(), **self._versions},
            events=tuple(f"{e.monotonic - now:.2f} s {e.kind}: {e.text}" for e in self._events),
        )
        kept = Kept(judge(evidence), evidence)
        stacks = None if hang is None else hang.folder
        return kept.verdict, self._write(kept, stacks)

    def _write(self, kept: Kept, stacks: Path | None) -> Path:
        """Make the folder of one failure, whole at once; the oldest make room."""
        numbers = numbers_in(self._folder)
        final = self._folder / f"{numbers[-1] + 1 if numbers else 1:03d}"
        folder = final.with_name(f".{final.name}.tmp")
        shutil.rmtree(folder, ignore_errors=True)
        private_files.make_folder(folder)
        chosen = [one.rank for one in kept.evidence.ranks][:MOST_LOGS]
        for rank in chosen:
            text = "\n".join(self._log(rank))
            private_files.replace_file(folder / f"rank{rank}.log", text.encode())
        if stacks is not None:
            private_files.make_folder(folder / "stacks")
            for path in (stacks / f"rank{rank}.txt" for rank in chosen):
                if log_size(path):
                    private_files.replace_file(folder / "stacks" / path.name, path.read_bytes())
        content = msgspec.json.format(msgspec.json.encode(kept))
        private_files.replace_file(folder / EVIDENCE, content)
        folder.rename(final)
        for number in numbers[: max(0, len(numbers) - MOST_FOLDERS + 1)]:
            shutil.rmtree(self._folder / f"{number:03d}", ignore_errors=True)
        return final


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "linux": platform.release()}
    with suppress(metadata.PackageNotFoundError):
        found["megatron-ft"] = metadata.version("megatron-ft")
    return found


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the failures that are kept there, the oldest first."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name) for name in names if name.isdecimal())


def read_kept(folder: Path) -> Kept:
    """The evidence in one folder; ConfigError if it cannot be read."""
    path = folder / EVIDENCE
    try:
        return msgspec.json.decode(private_files.read_file(path), type=Kept)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} holds no evidence that this release can read: {error}") from None
