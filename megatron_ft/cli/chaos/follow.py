"""Following a job of ``megatron-ft run`` from outside: its event log, its notes, its process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.process_tools import last_lines
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.supervisor.event_log import EVENTS, LoggedEvent, event_of
from megatron_ft.supervisor.events import CommittedEvent, StoppedEvent
from megatron_ft.supervisor.job_state import STATUS, read_record
from megatron_ft.supervisor.supervisor import EXIT_CONTINUE

MOST_RESTARTS = 4


class Follower:
    """Reads a job's events, and runs its command: by ``start``, then whenever it was killed.

    ``code`` is the exit code of the last process that ended.
    """

    def __init__(self, job: RunCommand, most_restarts: int = MOST_RESTARTS) -> None:
        self.job, self._most_restarts = job, most_restarts
        self.cluster = job.cluster()
        self.events: list[LoggedEvent] = []
        self.code: int | None = None
        self._restarts = 0
        self._rest, self._at = b"", 0
        self.log = job.spec.log_dir / "supervisor.log"
        self.process: LocalProcess

    def start(self, job: RunCommand | None = None) -> None:
        """Run the command as a user does again, or another one for the same job."""
        self.job = job or self.job
        self.process = LocalProcess.spawn("", self.job.words, self.job.environment(), self.log)

    def leave(self, seconds: float = 60.0) -> None:
        """End the command by SIGTERM; the job's memory is kept.

        ControlPlaneError if it does not end in time.
        """
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(seconds)
        self.read()

    def read(self) -> list[LoggedEvent]:
        """The events that were recorded since the last call; all are in ``events``."""
        path = self.job.notes / EVENTS
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._at)
            more = file.read()
        self._at += len(more)
        *lines, self._rest = (self._rest + more).split(b"\n")
        new = [event_of(json.loads(line)) for line in lines if line]
        self.events += new
        return new

    def over(self) -> str:
        """ "finished" or "stopped" once the job is; a supervisor that merely died is replaced."""
        if self.process.alive():
            return ""
        self.code = self.process.join(0)
        self.read()
        if self.code in (0, EXIT_CONTINUE):
            return "finished"
        # 1 and signals: nothing that the command says of a job.
        if self.code > 1 or self._restarts == self._most_restarts:
            return "stopped"
        self._restarts += 1
        self.start()
        return ""

    def count(self, kind: str, since: float = 0.0) -> int:
        return sum(event.kind == kind and event.at > since for event in self.events)

    def protected_commits(self, since: float = 0.0) -> int:
        """Snapshots that survive a node loss, or that are as safe as they can be here."""
        level = "protected" if self.job.spec.scheme.parity_members else "local"
        newer = (event.facts for event in self.events if event.at > since)
        return sum(isinstance(one, CommittedEvent) and one.level == level for one in newer)

    def active(self) -> list[str]:
        """The nodes that train, by position, as the job has recorded."""
        record = read_record(self.job.notes, self.job.spec.name)
        active = [] if record is None else list(record.active)
        return active or self.job.node_names[: self.job.spec.nodes]

    def summary(self) -> dict[str, Any]:
        """The job's own summary, a second old; {} before the first one."""
        try:
            status = json.loads((self.job.notes / STATUS).read_bytes())
        except FileNotFoundError:
            return {}
        summary: dict[str, Any] = status["summary"]
        return summary

    def reason(self) -> str:
        told = [e.text for e in self.events if isinstance(e.facts, StoppedEvent)]
        last = f"its command ended with {self.code}; end of {self.log}:\n{last_lines(self.log)}"
        return str(told[-1] if told else last).removeprefix("megatron-ft: stopped: ")

    def end(self) -> None:
        """Kill the command and everything of the job; nothing stays in shared memory."""
        self.process.kill()
        self.process.join(10)
        self.cluster.destroy()

    def tail(self, count: int = 12) -> str:
        start = self.events[0].at if self.events else 0.0
        shown = [e for e in self.events if e.text and e.kind != CommittedEvent.kind][-count:]
        return "\n".join(f"{e.at - start:7.2f} s {e.kind}: {e.text}" for e in shown)


async def until(condition: Callable[[], bool], seconds: float, whom: Callable[[], str]) -> None:
    """Poll until a condition holds; TimeoutError says who was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {whom()}")
        await asyncio.sleep(0.02)
