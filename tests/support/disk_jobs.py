"""Waits for a job's events, and signals for its processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.supervisor.events import JobEvent
from tests.support.jobs import WAIT_SECONDS, Job

SHARDS = ["pp0-tp0-dp0-ep0", "pp0-tp0-dp1-ep0"]


def of_kind(job: Job, kind: str) -> list[JobEvent]:
    return [event for event in job.events if event.kind == kind]


def wait_until(job: Job, condition: Callable[[], bool], what: str = "") -> None:
    """Called from a fault's thread, while the job continues."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        ended = time.monotonic() > deadline or "finished" in job.kinds()
        assert not ended, f"waited in vain {what}:\n{job.story()}"
        time.sleep(0.01)


def wait_for(job: Job, kind: str, count: int = 1) -> None:
    """Until the job has told so many events of this kind."""
    wait_until(job, lambda: len(of_kind(job, kind)) >= count, f"for {count} events {kind!r}")


def signal_trainers(job: Job, number: int) -> None:
    for pid in job.trainers():
        os.kill(pid, number)


def pause(job: Job, paused: bool) -> None:
    """Stop snapshots, and wait for the one under way: what is committed stays where it is."""
    for node in job.cluster.nodes():
        ask(job.cluster.node_dir(node) / "smp.sock", m.Pause(paused))
    pump = job.supervisor.pump
    cycle = pump.cycle
    if paused:

        def idle() -> bool:
            return pump.paused and cycle is not None and cycle.phase.value == "idle"

        wait_until(job, idle, "for snapshots to stop")


def wait_until_none_is_due(job: Job, interval: int) -> None:
    """Waits for further drains: on a busy machine several may be due when one ends."""

    def newest(kind: str) -> int:
        return int(of_kind(job, kind)[-1].fields["iteration"])

    wait_until(job, lambda: newest("committed") < newest("drained") + interval, "for due drains")


def stop_until_drained(job: Job, count: int) -> None:
    """Trainers do not get further while the disk is busy: what follows depends on no speed."""
    signal_trainers(job, signal.SIGSTOP)
    wait_for(job, "drained", count)
