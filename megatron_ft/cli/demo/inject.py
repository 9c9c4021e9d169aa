"""Carries the planned faults out, in mid-iteration, on a job that runs.

Ctrl-C in asynchronous work: end it in order, then say that it was interrupted.

The uninterrupted run: the same ranks with the same command, and none of our processes.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

from megatron_ft.cli.chaos.inject import processes, send
from megatron_ft.cli.demo.settings import Fault, FaultKind, Record, Strike, now
from megatron_ft.cli.demo.trace import TraceLine, TraceTail
from megatron_ft.core.errors import ControlPlaneError, MegatronFTError
from megatron_ft.core.process_tools import last_lines
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.processes import TrainerFleet
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.supervisor import Supervisor


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; everything was ended and removed."""


async def interruptible(work: Callable[[], Awaitable[None]]) -> None:
    """Await ``work``; SIGINT and SIGTERM cancel it, and Interrupted is raised once it has ended."""
    task = asyncio.ensure_future(work())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


POLL_SECONDS = 0.02
STALL_SECONDS = 600.0


class Injector:
    """Follows rank 0's trace and strikes when a fault is due.

    ``on_line`` is called with each finished iteration, ``on_strike`` just after a fault.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        cluster: VirtualCluster,
        faults: Sequence[Fault],
        trace: Path,
        record: Record,
        on_line: Callable[[TraceLine], None],
        on_strike: Callable[[Strike], None],
    ) -> None:
        self._supervisor, self._cluster = supervisor, cluster
        self._waiting = list(faults)
        self._tail, self._record = TraceTail(trace), record
        self._on_line, self._on_strike = on_line, on_strike
        self._lines: list[TraceLine] = []
        self._protected_incarnation = 0
        self._alive = time.monotonic()
        supervisor.observers.add(self._note)

    async def run(self) -> None:
        """Until cancelled.  ControlPlaneError when the job shows no progress any more."""
        try:
            while True:
                self._read()
                if self._waiting and self._is_due(self._waiting[0]):
                    fault = self._waiting.pop(0)
                    await asyncio.sleep(self._seconds_until(fault))
                    self._strike(fault)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._read()
            self._tail.close()

    def _note(self, event: JobEvent) -> None:
        self._alive = time.monotonic()
        wanted = "protected" if self._supervisor.spec.scheme.parity_members else "local"
        if event.kind == "committed" and event.fields["level"] == wanted:
            self._protected_incarnation = self._supervisor.coordinator.incarnation

    def _read(self) -> None:
        for line in self._tail.read():
            self._alive = time.monotonic()
            self._lines.append(line)
            self._on_line(line)
        if time.monotonic() - self._alive > STALL_SECONDS:
            raise ControlPlaneError(
                f"job {self._supervisor.spec.name}: rank 0 finished no iteration for "
                f"{STALL_SECONDS:.0f} s; see its log in {self._supervisor.spec.log_dir}"
            )

    def _is_due(self, fault: Fault) -> bool:
        incarnation = self._supervisor.coordinator.incarnation
        last = self._record.strikes[-1].incarnation if self._record.strikes else 0
        if self._protected_incarnation != incarnation or incarnation <= last or not self._lines:
            return False
        newest = self._lines[-1]
        return newest.incarnation == incarnation and newest.iteration >= fault.iteration

    def _seconds_until(self, fault: Fault) -> float:
        """From now until ``fault.fraction`` of an iteration has passed since the last one's end."""
        usual = median(line.seconds for line in self._lines[-5:])
        return max(0.0, self._lines[-1].time + fault.fraction * usual - time.time())

    def _strike(self, fault: Fault) -> None:
        """Kill, without giving the event loop a turn: what falls together falls at once."""
        self._read()
        nodes = [self._supervisor.members.active[position] for position in fault.positions]
        incarnation = self._supervisor.coordinator.incarnation
        monotonic, wall = now()
        if fault.kind is FaultKind.NODE:
            for node in nodes:
                self._cluster.kill_node(node)
            victim = " and ".join(nodes)
            text = f"{victim} lost: every process killed, memory gone"
        else:
            victim, text = self._kill_processes(fault, nodes[0])
        during = self._lines[-1].iteration + 1
        strike = Strike(fault, victim, text, incarnation, during, monotonic, wall)
        self._record.strikes.append(strike)
        self._on_strike(strike)

    def _kill_processes(self, fault: Fault, node: str) -> tuple[str, str]:
        rank = fault.positions[0] * self._supervisor.spec.ranks_per_node + fault.local_rank
        pids = [self._supervisor.trainers.pids()[rank]]
        victim, text = f"trainer {rank}, {node}", f"trainer of rank {rank} on {node} killed"
        if fault.kind is FaultKind.TRAINER_AND_ENCODER:
            encoders = processes(self._cluster.job, "encoder", node)
            if encoders:  # a world that is being started may have none yet
                victim = f"trainer {rank} + encoder, {node}"
                text = f"trainer of rank {rank} and encoder of {node} killed at once"
            pids += encoders
        send(pids, signal.SIGKILL)
        return victim, text


class OracleError(MegatronFTError):
    """The uninterrupted run failed, so there is nothing to compare with."""


async def run_oracle(spec: JobSpec, trace: Path, on_line: Callable[[TraceLine], None]) -> None:
    """Run the command of ``spec`` on all ranks to its end; OracleError if a rank fails.

    No SMP and no encoder is started.  Whatever happens, no process is left.
    """
    cluster = VirtualCluster(spec.name, [f"node{number}" for number in range(spec.nodes)])
    fleet = TrainerFleet(cluster, spec)
    follower = asyncio.create_task(_follow(TraceTail(trace), on_line))
    try:
        fleet.start(cluster.nodes(), 1, {})
        first = await fleet.ended()
        if not first.finished:
            log = fleet.log_of(first.rank)
            raise OracleError(
                f"the uninterrupted run failed: rank {first.rank} ended with {first.status}; "
                f"end of {log}:\n{last_lines(log)}"
            )
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        cluster.destroy()


async def _follow(tail: TraceTail, on_line: Callable[[TraceLine], None]) -> None:
    def read() -> None:
        for line in tail.read():
            on_line(line)

    try:
        while True:
            read()
            await asyncio.sleep(POLL_SECONDS)
    finally:
        read()
        tail.close()
