"""What became of the processes of a job, and when: for faults that do not kill at once."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from tests.support.disk_jobs import of_kind, wait_for
from tests.support.jobs import Fault, Job
from tests.support.warm_host import is_client


class Deaths:
    """When processes die, on the monotonic clock that events carry too."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self._threads: list[threading.Thread] = []

    def watch(self, *pids: int) -> None:
        for pid in pids:
            thread = threading.Thread(target=self._await, args=(pid, os.pidfd_open(pid)))
            thread.start()
            self._threads.append(thread)

    def all(self) -> list[float]:
        """The times, once all have died."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a process that was watched has not died"
        return list(self.times.values())

    def _await(self, pid: int, pidfd: int) -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(120_000)
        self.times[pid] = time.monotonic()
        os.close(pidfd)


def of_node(job: Job, node: str, module: str) -> list[int]:
    """Processes of a node that run this module or script; not those that stand for them."""
    pids = job.cluster.processes_of(node)
    return [pid for pid in pids if module in _command(pid) and not is_client(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has ended since it was listed


def when(job: Job, kind: str, occurrence: int = 0) -> float:
    return [event.monotonic for event in job.events if event.kind == kind][occurrence]


def noticed(kind: str, fault: Fault) -> Fault:
    """Strikes, and waits until the job has emitted an event of this kind.

    The next fault may otherwise end the incarnation before anybody has noticed this one.
    """

    def strike(job: Job) -> None:
        count = len(of_kind(job, kind))
        fault(job)
        wait_for(job, kind, count + 1)

    return strike


def in_incarnation(number: int, fault: Fault) -> Fault:
    """The fault, once the trainers of this incarnation train: 1 is the job's first.

    Until somebody notices that an incarnation has ended, what it has reached is what the job has
    reached: a fault with a later iteration would strike the incarnation that another one has just
    ended.
    """

    def strike(job: Job) -> None:
        wait_for(job, "training", number)
        fault(job)

    return strike
