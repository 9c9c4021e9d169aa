"""The three kinds of processes that a supervisor keeps: SMPs, encoders, trainers.

The environment of one trainer rank, as torchrun would set it, and that of torchrun itself.

The cause of an encoder world's end, read from what its processes wrote last.
"""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.environment import INCARNATION, TREE
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.log_end import last_word, size, text_since
from megatron_ft.core.ports import free_port
from megatron_ft.erasure.worker import ENCODE_RATE
from megatron_ft.launchers.launcher import (
    Launcher,
    NodeUnreachable,
    Placement,
    ProcessGoneError,
    ProcessHandle,
)
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.startup import before_script
from megatron_ft.launchers.world import WorldProcess
from megatron_ft.smp.__main__ import Credentials, Ready
from megatron_ft.supervisor import container
from megatron_ft.supervisor.job_state import JobState, SmpPlace
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.tcp_world import WorldStarter

# The supervisor restarts all ranks itself, and torch must not look for an agent's store.
_FIXED = {
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "ROLE_NAME": "default",
}
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(frozen=True)
class TrainerPlace:
    """Where trainers of one incarnation of the job stand: rank ``local_rank`` of an active node,
    or all.

    Nodes and the ranks of a node are numbered from 0, ranks node by node.  ValueError for a
    node or a rank out of range.
    """

    node_index: int
    local_rank: int
    node_count: int
    ranks_per_node: int
    master_address: str
    master_port: int
    run_id: str
    restart_count: int

    def __post_init__(self) -> None:
        """Check."""
        nodes, ranks = range(self.node_count), range(self.ranks_per_node)
        if self.node_index not in nodes or self.local_rank not in ranks:
            raise ValueError(
                f"rank {self.local_rank} of node {self.node_index} is not within "
                f"{self.node_count} nodes of {self.ranks_per_node} ranks"
            )

    def of_rank(self, base: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of this rank, from ``base``.

        Names and meanings are those of torchrun's documentation ("Environment Variables").
        OMP_NUM_THREADS becomes 1 where ``base`` does not set it.
        """
        rank = str(self.node_index * self.ranks_per_node + self.local_rank)
        world_size = str(self.node_count * self.ranks_per_node)
        return {
            **_DEFAULTS,
            **base,
            **_FIXED,
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node_index),
            "GROUP_WORLD_SIZE": str(self.node_count),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
        }

    def of_torchrun(self, base: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of a torchrun that starts all ranks of this node, from ``base``.

        torchrun takes the defaults of its flags from ``PET_<FLAG>``.  It numbers the ranks as
        ``of_rank`` does, and makes a session for each: TREE ends them with it.
        """
        assert self.local_rank == 0, "one process stands for all ranks of a node"
        return {
            **_DEFAULTS,
            **base,
            TREE: uuid.uuid4().hex,
            "PET_NNODES": str(self.node_count),
            "PET_NODE_RANK": str(self.node_index),
            "PET_NPROC_PER_NODE": str(self.ranks_per_node),
            "PET_RDZV_BACKEND": "static",
            "PET_RDZV_ID": f"{self.run_id}-{self.restart_count}",
            "PET_MASTER_ADDR": self.master_address,
            "PET_MASTER_PORT": str(self.master_port),
            "PET_MAX_RESTARTS": "0",
        }


_NO_BACKING = re.compile(
    r"not enough space for (\S+)/[^/\s]+ \(the shared-memory backing file\)"
    r".*?Space Requested: (\d+) B"
)
_NO_SPACE = re.compile(r"^.*No space left on device.*$", re.MULTILINE)
_BUS_ERROR = re.compile(r"\bbus error\b", re.IGNORECASE)
_ERROR = re.compile(
    r"^(?:\[\S+\] )?(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception): .*)$", re.MULTILINE
)
_LEFT = re.compile(r"^(.*): this encoder leaves$", re.MULTILINE)
_SIGNAL = re.compile(r"exited on signal (\d+ \([\w ]+\))")


def why_ended(said: str, status: int, folder: str = "") -> str:
    """The cause in words; the same for worlds that ended alike.  Pure.

    ``said`` is what the world wrote to its log, ``status`` its exit status, ``folder`` where MPI
    keeps shared memory, empty if it keeps none.  MPI breaks its lines anywhere.
    """
    joined = " ".join(said.split())
    less = "free memory there, or start the job with --transport tcp"
    if found := _NO_BACKING.search(joined):
        needed = int(found[2]) / (1 << 20)
        where = folder or found[1]
        return f"less than {needed:.0f} MiB is free for MPI's shared memory in {where}: {less}"
    if found := _NO_SPACE.search(said):
        return f"an encoder had no room: {found[0].strip()[:300]}"
    if _BUS_ERROR.search(joined):
        where = f"the tmpfs of {folder}" if folder else "the tmpfs of the arenas"
        return f"an encoder died of a bus error, as where {where} is full: {less}"
    if found := _ERROR.search(said):
        return found[1][:300]
    if found := _LEFT.search(said):
        return found[1]
    if found := _SIGNAL.search(joined):
        return f"an encoder ended by signal {found[1]}"
    return f"ended by signal {-status}" if status < 0 else f"exit status {status}"


SMP_START_SECONDS = 60.0

Result = TypeVar("Result")


async def unless(
    work: Coroutine[Any, Any, Result], trouble: Coroutine[Any, Any, ControlPlaneError]
) -> Result:
    """The result of ``work``; as soon as ``trouble`` ends, its result is raised."""
    task, reason = asyncio.create_task(work), asyncio.create_task(trouble)
    try:
        await asyncio.wait({task, reason}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise reason.result()
        return task.result()
    finally:
        task.cancel()
        reason.cancel()


class SmpFleet:
    """One SMP on every node of the job, spares included; they outlive the supervisor."""

    def __init__(self, launcher: Launcher, state: JobState, spec: JobSpec) -> None:
        self._launcher, self._state, self._spec = launcher, state, spec
        self._handles: dict[str, ProcessHandle] = {}

    def alive(self, node: str) -> bool:
        """Whether the node's SMP is known to run."""
        return node in self._handles and self._handles[node].alive()

    async def ensure(self, node: str) -> str:
        """Endpoint of the node's SMP, which is taken over or started as needed.

        Raises NodeUnreachable for a lost node, ControlPlaneError if the SMP does not come up.
        """
        place = self._state.record.smps.get(node)
        if not self.alive(node) and place is not None:
            try:
                self._handles[node] = self._launcher.attach(node, place.pid, place.start_time)
            except ProcessGoneError:
                place = None
        if place is not None and self.alive(node):
            return place.endpoint
        return await self._start(node)

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
        return await unless(work, self._some_end())

    async def _some_end(self) -> ControlPlaneError:
        nodes = await self.ended()
        text = f"the SMP of {', '.join(nodes)} ended during the recovery"
        return ControlPlaneError(text, nodes[0])

    def forget(self, node: str) -> None:
        """The node is lost, and its SMP with it."""
        self._handles.pop(node, None)

    async def _start(self, node: str) -> str:
        record = self._state.record
        # Its own: an SMP that an earlier supervisor started may still say where it serves.
        ready = self._launcher.ready_file(node)
        ready = ready.with_name(f"{ready.stem}.{uuid.uuid4().hex[:12]}.json")
        credentials = Credentials(str(record.job), record.secret)
        handle = self._launcher.start(
            node,
            smp_command(self._launcher.address(node), ready),
            {**base_environment(), **self._spec.background_variables},
            self._spec.log_dir / f"smp-{node}.log",
            stdin=msgspec.json.encode(credentials),
        )
        self._handles[node] = handle
        try:
            endpoint = await self._serving(node, handle, ready)
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

    async def _serving(self, node: str, handle: ProcessHandle, ready: Path) -> str:
        """Wait for the file by which an SMP says that it serves.

        No event of a file reaches other machines, so it is looked at.
        """
        log = self._spec.log_dir / f"smp-{node}.log"
        for _ in range(int(SMP_START_SECONDS / 0.05)):
            if private_files.is_there(ready):
                return msgspec.json.decode(private_files.read_file(ready), type=Ready).endpoint
            if not handle.alive():
                if not self._launcher.reachable(node):
                    raise NodeUnreachable(f"node {node} was lost while its SMP started")
                raise ControlPlaneError(
                    f"the SMP of node {node} ended at its start; {log} says: {last_word(log)}"
                )
            await asyncio.sleep(0.05)
        raise ControlPlaneError(
            f"the SMP of node {node} did not serve within {SMP_START_SECONDS:.0f} s; see {log}"
        )


def smp_command(address: str, ready: Path) -> list[str]:
    """How an SMP is started that serves at ``address`` and says so in the file ``ready``."""
    command = [sys.executable, "-m", "megatron_ft.smp"]
    return [*command, "--address", address, "--ready", str(ready)]


class EncoderWorld:
    """The disposable world: started over the active nodes, again whenever it breaks."""

    def __init__(self, launcher: Launcher, spec: JobSpec) -> None:
        self._spec = spec
        self.starter = WorldStarter(launcher, spec.settings.transport)
        self._log, self._log_begin = spec.log_dir / "encoders.log", 0
        self._handle: ProcessHandle | None = None
        self.name = ""

    def start(self, nodes: Sequence[str], incarnation: int) -> str:
        """Start a world with these nodes as ranks 0, 1, ...; returns its name."""
        self.kill()
        self.name = f"w{incarnation}-{uuid.uuid4().hex[:6]}"
        argv = [sys.executable, "-m", "megatron_ft.erasure.worker", "--world", self.name]
        environment = {**base_environment(), INCARNATION: str(incarnation), "OMP_NUM_THREADS": "1"}
        environment |= self._spec.background_variables
        environment[ENCODE_RATE] = str(self._spec.settings.encode_bandwidth_mib * (1 << 20))
        placements = [Placement(node, argv, environment) for node in nodes]
        self._log_begin = size(self._log)
        self._handle = self.starter.start(placements, self._log)
        return self.name

    async def ended(self) -> int:
        """Wait until the world is gone; its exit status."""
        assert self._handle is not None
        return await self._handle.wait()

    def why_ended(self, status: int) -> str:
        """The cause of its end, as far as its log tells; ``status`` is what ``ended`` gave."""
        handle = self._handle
        folder = str(handle.scratch.parent) if isinstance(handle, WorldProcess) else ""
        return why_ended(text_since(self._log, self._log_begin), status, folder)

    def end(self) -> None:
        """End the world; ``ended`` returns once its processes are gone."""
        if self._handle is not None:
            self._handle.kill()

    def kill(self) -> None:
        """End the world, if there is one, and forget it."""
        self.end()
        self._handle = None


@dataclass(frozen=True)
class TrainerExit:
    """The first trainer of an incarnation that ended: all with 0, or one with something else."""

    finished: bool
    rank: int = -1
    node: str = ""
    status: int = 0


class TrainerFleet:
    """All trainer ranks of one incarnation of the job."""

    def __init__(self, launcher: Launcher, spec: JobSpec) -> None:
        self._launcher, self._spec = launcher, spec
        self._handles: list[ProcessHandle] = []

    def start(self, active: Sequence[str], incarnation: int, extra: Mapping[str, str]) -> None:
        """Start every rank, node by node.  NodeUnreachable if one is lost meanwhile."""
        spec = self._spec
        port = free_port()
        given = {
            **base_environment(),
            **spec.trainer_environment,
            **extra,
            INCARNATION: str(incarnation),
        }
        base, master = before_script(given), self._launcher.address(active[0])
        self._handles = []
        for index, node in enumerate(active):
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
                told = place.of_torchrun if spec.trainer_per_node else place.of_rank
                environment = told(base)
                if interface := self._launcher.interface(node):
                    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
                log = self.log_of(index * spec.ranks_per_node + local)
                command, mark = container.told(spec.command, environment)
                if mark:
                    environment[TREE] = mark
                handle = self._launcher.start(node, command, environment, log)
                self._handles.append(handle)
                if incarnation > 1:
                    reach("recovery.trainer_started")

    @property
    def _ranks_each(self) -> int:
        """How many ranks one process of ours stands for."""
        return self._spec.ranks_per_node if self._spec.trainer_per_node else 1

    def name_of(self, rank: int) -> str:
        """What stands for a rank among our processes: itself, or all ranks of its node."""
        first = rank - rank % self._ranks_each
        last = first + self._ranks_each - 1
        return f"rank {first}" if first == last else f"ranks {first}-{last}"

    def log_of(self, rank: int) -> Path:
        """Where a rank's output goes."""
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
                    if wait.result() != 0:
                        return self._exit(waits[wait], wait.result())
        finally:
            for wait in pending:
                wait.cancel()
        return TrainerExit(finished=True)

    def _exit(self, index: int, status: int) -> TrainerExit:
        handle = self._handles[index]
        return TrainerExit(False, index * self._ranks_each, handle.node, status)

    async def all_failed(self, seconds: float) -> bool:
        """Whether every rank ends by itself with an error within so many seconds."""
        waits = [asyncio.ensure_future(handle.wait()) for handle in self._handles]
        done, pending = await asyncio.wait(waits, timeout=seconds)
        for wait in pending:
            wait.cancel()
        return not pending and all(wait.result() > 0 for wait in done)

    async def kill_all(self) -> None:
        """SIGKILL every rank and wait until they are dead."""
        for handle in self._handles:
            handle.kill()
        await asyncio.gather(*(handle.wait() for handle in self._handles))
