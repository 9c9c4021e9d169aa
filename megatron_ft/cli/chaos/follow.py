"""Following a job from outside: its events as they are recorded, and its supervisor's process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from megatron_ft.cli.chaos.job import MODULE, JobFile, environment
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.supervisor.event_log import EVENTS, RecordedEvent
from megatron_ft.supervisor.job_state import read_record

MOST_RESTARTS = 4


class Follower:
    """Reads a job's events, and starts its supervisor: by ``start``, then whenever it dies."""

    def __init__(self, job: JobFile, most_restarts: int = MOST_RESTARTS) -> None:
        self.job, self._most_restarts = job, most_restarts
        self.cluster = job.cluster()
        self.events: list[RecordedEvent] = []
        self.restarts = 0
        self._file = job.place / "job.json"
        self._rest, self._at = b"", 0
        self.process: LocalProcess

    def start(self) -> None:
        """Start a supervisor, as a user runs the same command again."""
        self._file.write_bytes(msgspec.json.encode(self.job))
        argv = [sys.executable, "-m", MODULE, str(self._file)]
        log = self.job.place / "supervisor.log"
        self.process = self.cluster.start_supervisor(argv, environment(self.job), log)

    def leave(self, seconds: float = 60.0) -> None:
        """Have the supervisor end as on a user's SIGTERM; the job's memory is kept.

        ControlPlaneError if it does not end in time.
        """
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(seconds)
        self.read()

    def read(self) -> list[RecordedEvent]:
        """The events that were recorded since the last call; all are in ``events``."""
        path = self.job.place / EVENTS
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._at)
            more = file.read()
        self._at += len(more)
        *lines, self._rest = (self._rest + more).split(b"\n")
        new = [json.loads(line) for line in lines if line]
        self.events += new
        return new

    def over(self) -> str:
        """ "finished" or "stopped" once the job is; a supervisor that merely died is replaced."""
        if self.process.alive():
            return ""
        self.process.join(0)
        self.read()
        last = self.events[-1]["kind"] if self.events else ""
        if last == "ended":
            return "finished"
        if last == "stopped" or self.restarts == self._most_restarts:
            return "stopped"
        self.restarts += 1
        self.start()
        return ""

    def count(self, kind: str, since: float = 0.0) -> int:
        """Events of a kind after a moment."""
        return sum(event["kind"] == kind and event["at"] > since for event in self.events)

    def protected_commits(self, since: float = 0.0) -> int:
        """Snapshots that survive a node loss, or that are as safe as they can be here."""
        level = "protected" if self.job.parity else "local"
        commits = (event for event in self.events if event["kind"] == "committed")
        return sum(event["at"] > since and event["level"] == level for event in commits)

    def active(self) -> list[str]:
        """The nodes that train, by position, as the job has recorded."""
        record = read_record(self.job.state_dir, self.job.name)
        active = [] if record is None else list(record.active)
        return active or self.job.node_names[: self.job.nodes]

    def last_error(self) -> tuple[str, str]:
        """Name and text of the error that stopped the job."""
        ends = [e for e in self.events if e["kind"] in ("stopped", "crashed")]
        return (ends[-1]["error"], ends[-1]["text"]) if ends else ("", "it recorded nothing")

    def end(self) -> None:
        """Kill the supervisor and everything of the job; nothing stays in shared memory."""
        self.process.kill()
        self.process.join(10)
        self.cluster.destroy()

    def tail(self, count: int = 12) -> str:
        """The last events, for a report."""
        start = self.events[0]["at"] if self.events else 0.0
        shown = [e for e in self.events if e["text"] and e["kind"] != "committed"][-count:]
        return "\n".join(f"{e['at'] - start:7.2f} s {e['kind']}: {e['text']}" for e in shown)


async def until(condition: Callable[[], bool], seconds: float, whom: Callable[[], str]) -> None:
    """Poll until a condition holds; TimeoutError says who was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {whom()}")
        await asyncio.sleep(0.02)
