"""The SMPs of a job, one on every node, and the trainers of its incarnation.

A trainer's environment is what torchrun would set; that of torchrun is for a command which starts
the ranks of a node itself.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.environment import INCARNATION, TREE
from megatron_ft.core.errors import ControlPlaneError, SchedulerAwayError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.process_tools import free_port, last_word, log_size
from megatron_ft.core.startup import before_script
from megatron_ft.launchers import container
from megatron_ft.launchers.launcher import (
    Launcher,
    NodeUnreachable,
    ProcessGoneError,
    ProcessHandle,
)
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.rpc import messages as m
from megatron_ft.smp.__main__ import Credentials, Ready
from megatron_ft.supervisor.ends import first_end
from megatron_ft.supervisor.job_state import STATUS, JobState, SmpPlace
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.trainer_hosts import TrainerHosts, why_cold

# The supervisor restarts all ranks itself, and torch must not look for an agent's store.
_FIXED = {
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "ROLE_NAME": "default",
}
_CHANGING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", INCARNATION)
"""Variables of a rank that differ from one incarnation to the next."""
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(frozen=True)
class TrainerPlace:
    """Place of one trainer, or of all trainers of a node, in an incarnation of the job.

    Active nodes and the ranks of a node are numbered from 0, ranks node by node.
    """

    node_index: int
    local_rank: int
    node_count: int
    ranks_per_node: int
    master_address: str
    master_port: int
    run_id: str
    restart_count: int

    def of_rank(self, base: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of this rank, from ``base``.

        Names and meanings are those of torchrun's documentation ("Environment Variables").
        OMP_NUM_THREADS becomes 1 where ``base`` does not set it.
        """
        numbers = {
            "RANK": self.node_index * self.ranks_per_node + self.local_rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.node_count * self.ranks_per_node,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "GROUP_RANK": self.node_index,
            "GROUP_WORLD_SIZE": self.node_count,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.restart_count,
        }
        words = {name: str(number) for name, number in numbers.items()}
        roles = {"ROLE_RANK": words["RANK"], "ROLE_WORLD_SIZE": words["WORLD_SIZE"]}
        names = {"MASTER_ADDR": self.master_address, "TORCHELASTIC_RUN_ID": self.run_id}
        return {**_DEFAULTS, **base, **_FIXED, **words, **roles, **names}

    def of_torchrun(self, base: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of a torchrun that starts all ranks of this node, from ``base``.

        torchrun takes the defaults of its flags from ``PET_<FLAG>``.  It numbers the ranks as
        ``of_rank`` does, and makes a session for each: TREE ends them with it.
        """
        flags = {
            "NNODES": self.node_count,
            "NODE_RANK": self.node_index,
            "NPROC_PER_NODE": self.ranks_per_node,
            "RDZV_BACKEND": "static",
            "RDZV_ID": f"{self.run_id}-{self.restart_count}",
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            "MAX_RESTARTS": 0,
        }
        words = {f"PET_{name}": str(value) for name, value in flags.items()}
        return {**_DEFAULTS, **base, TREE: uuid.uuid4().hex, **words}


SMP_START_SECONDS = 60.0

Result = TypeVar("Result")


class SmpFleet:
    """One SMP on every node of the job, spares included; they outlive the supervisor."""

    def __init__(self, launcher: Launcher, state: JobState, spec: JobSpec) -> None:
        self._launcher, self._state, self._spec = launcher, state, spec
        self._handles: dict[str, ProcessHandle] = {}

    def alive(self, node: str) -> bool:
        return node in self._handles and self._handles[node].alive()

    async def ensure(self, node: str) -> str:
        """Endpoint of the node's SMP, which is taken over or started as needed.

        Raises NodeUnreachable for a lost node, SchedulerAwayError if nothing can be started now,
        ControlPlaneError if the SMP does not come up.
        """
        place = self._state.record.smps.get(node)
        if not self.alive(node) and place is not None:
            try:
                self._handles[node] = self._launcher.attach(node, place.pid, place.start_time)
            except ProcessGoneError:
                place = None
        if place is not None and self.alive(node):
            return place.endpoint
        return await self._start_when_allowed(node)

    async def ended(self) -> list[str]:
        """Wait until an SMP ends; the nodes of all that have.  For ever where there is none."""
        if not self._handles:
            await asyncio.Future()
        waits = {asyncio.ensure_future(h.wait()): node for node, h in self._handles.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        first = {waits[wait] for wait in done}
        return [node for node in self._handles if node in first or not self.alive(node)]

    async def while_all_run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which asks SMPs; ControlPlaneError as soon as one has ended.

        Its answer would be awaited to the end of the timeout.
        """

        async def until_one_ends() -> NoReturn:
            nodes = await self.ended()
            raise ControlPlaneError(f"the SMP of {', '.join(nodes)} ended", nodes[0])

        return await first_end(work, until_one_ends())

    def forget(self, node: str) -> None:
        self._handles.pop(node, None)

    async def _start_when_allowed(self, node: str) -> str:
        """Start one.  SchedulerAwayError if the scheduler is at fault, and not this node."""
        try:
            return await self._start(node)
        except ControlPlaneError as error:
            if not self._launcher.is_away(str(error)):
                raise
            if await asyncio.to_thread(self._launcher.leaving) is None:
                raise SchedulerAwayError(str(error), node) from error
        # The scheduler answers: it has just come back, or it is the node that starts nothing.
        return await self._start(node)

    async def _start(self, node: str) -> str:
        record = self._state.record
        # Its own: an SMP that an earlier supervisor started may still say where it serves.
        ready = self._launcher.ready_file(node)
        ready = ready.with_name(f"{ready.stem}.{uuid.uuid4().hex[:12]}.json")
        status = self._state.folder.absolute() / STATUS
        credentials = Credentials(str(record.job), record.secret, str(status))
        log = self._spec.log_dir / f"smp-{node}.log"
        before = log_size(log)
        handle = self._launcher.start(
            node,
            smp_command(self._launcher.address(node), ready),
            base_environment(),
            log,
            stdin=msgspec.json.encode(credentials),
        )
        self._handles[node] = handle
        try:
            endpoint = await self._serving(node, handle, ready, log, before)
            place = SmpPlace(handle.pid, handle.start_time, endpoint)
            self._state.update(smps={**self._state.record.smps, node: place})
        except BaseException:
            # Alive, it would pass for the SMP before it, with that one's endpoint.
            handle.kill()
            self.forget(node)
            raise
        finally:
            ready.unlink(missing_ok=True)
        return endpoint

    async def _serving(
        self, node: str, handle: ProcessHandle, ready: Path, log: Path, before: int
    ) -> str:
        """Wait for the file that an SMP writes once it serves; its ``log`` begins at ``before``.

        No event of a file reaches other machines, so it is looked at.
        """
        for _ in range(int(SMP_START_SECONDS / 0.05)):
            if private_files.is_there(ready):
                return msgspec.json.decode(private_files.read_file(ready), type=Ready).endpoint
            if not handle.alive():
                if not self._launcher.reachable(node):
                    raise NodeUnreachable(f"node {node} was lost while its SMP started")
                said = f"{log} says: {last_word(log, before)}"
                raise ControlPlaneError(f"the SMP of node {node} ended at its start; {said}")
            await asyncio.sleep(0.05)
        raise ControlPlaneError(
            f"the SMP of node {node} did not serve within {SMP_START_SECONDS:.0f} s; see {log}"
        )


def smp_command(address: str, ready: Path) -> list[str]:
    """The command of an SMP that serves at ``address`` and then writes the file ``ready``."""
    command = [sys.executable, "-m", "megatron_ft.smp"]
    return [*command, "--address", address, "--ready", str(ready)]


@dataclass(frozen=True)
class TrainerExit:
    """The first trainer of an incarnation that ended: all with 0, or one with something else."""

    finished: bool
    rank: int = -1
    node: str = ""
    status: int = 0


class TrainerFleet:
    """All trainer ranks of one incarnation of the job.

    ``exits`` are the ranks that have ended by themselves, in the order in which that was seen,
    with exit status and monotonic time.  ``log_starts`` gives where this incarnation begins in
    the logs.
    """

    def __init__(self, launcher: Launcher, spec: JobSpec) -> None:
        self._launcher, self._spec = launcher, spec
        self._handles: list[ProcessHandle] = []
        self._restartable = set[int]()
        self.exits: dict[int, tuple[int, float]] = {}
        self.log_starts: dict[Path, int] = {}
        self.why_cold = "--warm-start is off"
        if spec.warm_start:
            self.why_cold = why_cold(spec.command, spec.trainer_per_node)
        self._hosts = TrainerHosts(launcher, spec.command, spec.log_dir)

    def on_event(self, event: m.NodeEvent) -> None:
        if isinstance(event.body, m.Restartable):
            self._restartable.add(event.body.rank)

    def survivors(self) -> dict[str, list[int]]:
        """Ranks that run and can restart in process, by node."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self._restartable):
            if self._handles[rank].alive():
                found.setdefault(self._handles[rank].node, []).append(rank)
        return found

    def start(
        self,
        active: Sequence[str],
        incarnation: int,
        extra: Mapping[str, str],
        kept: Collection[int] = (),
    ) -> dict[str, m.ReenterRanks]:
        """Start every rank but ``kept``, node by node.  NodeUnreachable if one is lost meanwhile.

        Returns the requests by which the kept ones train again, by node.
        """
        spec, port, more = self._spec, free_port(), self._spec.arguments_for(len(active))
        given = {**base_environment(), **spec.trainer_environment, **extra}
        base = before_script({**given, INCARNATION: str(incarnation)})
        master = self._launcher.address(active[0])
        before, self._handles, self.exits = self._handles, [], {}
        self._restartable &= set(kept)
        again: dict[str, dict[int, dict[str, str]]] = {}
        if not self.why_cold:
            there = [node for node in self._launcher.nodes() if self._launcher.reachable(node)]
            self._hosts.ensure(there, {**_DEFAULTS, **base})
        for index, node in enumerate(active):
            own = base | self._launcher.devices(index, spec.ranks_per_node, base)
            for local in range(0, spec.ranks_per_node, self._ranks_each):
                place = TrainerPlace(
                    node_index=index,
                    local_rank=local,
                    node_count=len(active),
                    ranks_per_node=spec.ranks_per_node,
                    master_address=master,
                    master_port=port,
                    run_id=spec.name,
                    restart_count=incarnation - 1,
                )
                environment = (
                    place.of_torchrun(own) if spec.trainer_per_node else place.of_rank(own)
                )
                rank = index * spec.ranks_per_node + local
                log = self.log_of(rank)
                self.log_starts[log] = log_size(log)
                if rank in kept:
                    changed = {name: environment[name] for name in (*_CHANGING, *extra)}
                    again.setdefault(node, {})[rank] = changed
                    self._handles.append(before[rank])
                    continue
                command, mark = container.pass_environment((*spec.command, *more), environment)
                if mark:
                    environment[TREE] = mark
                if not self.why_cold:
                    command = self._hosts.warm(node, more)
                handle = self._launcher.start(node, command, environment, log)
                self._handles.append(handle)
                if incarnation > 1:
                    reach("recovery.trainer_started")
        return {node: m.ReenterRanks(incarnation, ranks) for node, ranks in again.items()}

    @property
    def _ranks_each(self) -> int:
        return self._spec.ranks_per_node if self._spec.trainer_per_node else 1

    def name_of(self, rank: int) -> str:
        """The name of the process of a rank: its own, or that of all ranks of its node."""
        first = rank - rank % self._ranks_each
        last = first + self._ranks_each - 1
        return f"rank {first}" if first == last else f"ranks {first}-{last}"

    def log_of(self, rank: int) -> Path:
        return self._spec.log_dir / f"{self.name_of(rank).replace(' ', '')}.log"

    def pids(self) -> list[int]:
        """Process numbers by rank; by node where each starts its ranks itself."""
        return [handle.pid for handle in self._handles]

    async def ended(self) -> TrainerExit:
        """Wait until all ranks have ended well, or one has not."""
        waits = {asyncio.ensure_future(h.wait()): rank for rank, h in enumerate(self._handles)}
        pending = set(waits)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    index, status = waits[wait], wait.result()
                    self.exits[index * self._ranks_each] = status, time.monotonic()
                    if status:
                        node = self._handles[index].node
                        return TrainerExit(False, index * self._ranks_each, node, status)
        finally:
            for wait in pending:
                wait.cancel()
        return TrainerExit(finished=True)

    async def note_exits(self) -> None:
        """Complete ``exits``; called before ``kill_all``, which is not told apart."""
        for index, handle in enumerate(self._handles):
            rank = index * self._ranks_each
            if rank not in self.exits and not handle.alive():
                self.exits[rank] = await handle.wait(), time.monotonic()

    def nodes_by_rank(self) -> dict[int, str]:
        """The node of each rank that has a process of its own, or is the first of one."""
        return {i * self._ranks_each: handle.node for i, handle in enumerate(self._handles)}

    def end_hosts(self) -> None:
        self._hosts.end()

    def in_place(self, active: Sequence[str], kept: Collection[int]) -> set[int]:
        """Those of ``kept`` that stay where they are in a job of as many ranks on these nodes."""
        per_node = self._spec.ranks_per_node
        if len(active) * per_node != len(self._handles):
            return set()
        return {r for r in kept if self._handles[r].node == active[r // per_node]}

    async def kill_all(self, but: Collection[int] = ()) -> None:
        """SIGKILL every rank but these, and wait until they are dead."""
        victims = [handle for rank, handle in enumerate(self._handles) if rank not in but]
        for handle in victims:
            handle.kill()
        await asyncio.gather(*(handle.wait() for handle in victims))
