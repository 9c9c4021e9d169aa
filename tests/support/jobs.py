"""Whole jobs of the examples on a virtual cluster, with faults on the way."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_ft.config import SETTINGS, SnapshotConfig
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.identity import CHEAPEST
from megatron_ft.core.process_tools import free_port
from megatron_ft.launchers import trainer_host, warm_client
from megatron_ft.launchers.launcher import Placement, ReturningHosts
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.world import WorldProcess
from megatron_ft.supervisor.budget import RestartBudget
from megatron_ft.supervisor.event_log import EVENTS, EventLog
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.orders import Timing
from megatron_ft.supervisor.outcome import Outcome
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.supervisor import Stop, Supervisor
from tests.programs import placed_trainer, warm_trainer
from tests.programs.faulty_example import GATE
from tests.support.networked_cluster import NetworkedCluster
from tests.support.node_network import HOST, NodeNetwork
from tests.support.warm_host import WarmHost, is_client, python_words, warm

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plain_pytorch.py"
FSDP2_EXAMPLE = ROOT / "examples" / "fsdp2.py"
DEEPSPEED_EXAMPLE = ROOT / "examples" / "deepspeed_gpt.py"
TORCHRUN = "torch.distributed.run"
FAULTY = ROOT / "tests" / "programs" / "faulty_example.py"
"""The example with the faults that its environment asks for."""
OURS = ("megatron_ft.smp", "megatron_ft.erasure.", "megatron_ft.checkpoint.")
"""Modules of the processes that a job has beside its trainers."""
IDLE = ("sleep", "infinity")
"""The host of a node that forks its trainers from the tests' own."""
WAIT_SECONDS = 200.0

Fault = Callable[["Job"], None]
Result = tuple[dict[int, str], str]


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


class WarmCluster(NetworkedCluster):
    """A virtual cluster whose processes are forked from the trainer host of the tests, if any.

    Trainers begin once the file ``gate`` exists.  With ``own_hosts`` all is as for a user.
    """

    warm: ClassVar[WarmHost | None] = None

    def __init__(
        self,
        job: str,
        nodes: Sequence[str],
        root: Path | None = None,
        network: NodeNetwork | None = None,
        place: str = HOST,
        *,
        gate: Path,
        own_hosts: bool = False,
    ) -> None:
        super().__init__(job, nodes, root)
        self.use_network(network, place)
        self.gate, self._own_hosts = gate, own_hosts or self.warm is None

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        """Start a process as ever; a trainer, or one of ours, is forked from the tests' host."""
        if not self._own_hosts:
            if list(argv[:3]) == [sys.executable, "-m", TORCHRUN]:
                argv = self._forked(node, argv[1:])
            elif warm_client.__file__ in argv:
                argv = self._forked(node, argv[argv.index(sys.executable, 1) + 1 :])
            elif trainer_host.__file__ in argv:
                argv = IDLE
            else:
                argv = self._ours(argv)
        return super().start(node, argv, env, log_path, stdin)

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        """Start a world as ever; its encoders are forked."""
        if not self._own_hosts:
            placements = [p._replace(argv=self._ours(p.argv)) for p in placements]
        return super().start_world(placements, log_path)

    def _ours(self, argv: Sequence[str]) -> Sequence[str]:
        """The command of one of our own processes forked; one of a network of its own starts."""
        words = python_words(argv)
        if self.network is not None or words[:1] != ["-m"] or not words[1].startswith(OURS):
            return argv
        assert self.warm is not None
        return [*argv[: argv.index(sys.executable)], *warm(self.warm.path, words)]

    @classmethod
    def stub(cls, *script: str) -> tuple[str, ...]:
        """A training command for ``--trainer-per-node``: its trainers are forked from the host."""
        assert cls.warm is not None
        return (sys.executable, warm_trainer.__file__, cls.warm.path, *script)

    def _forked(self, node: str, argv: Sequence[str]) -> list[str]:
        assert self.warm is not None
        network = "" if self.network is None else self.network.namespace_path(node)
        return warm(self.warm.path, [placed_trainer.__file__, network, str(self.gate), *argv])


class Job:
    """One job in ``folder``; ``run`` may be called again, as a user would.

    ``given`` are attributes of this class; all else, kept in ``more``, are settings of
    SnapshotConfig and fields of JobSpec.
    """

    iterations = 40
    width = 64
    iteration_seconds = 0.05
    script: Path = EXAMPLE
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})
    timing = Timing(lease=3.0, node_timeout=8.0)
    own_hosts = False
    """Whether each node has a trainer host of its own, as in a user's job."""
    hold_seconds = 60.0
    """Longest wait for lost nodes to come back, where the job chooses to wait."""
    root: Path | None = None
    name = ""
    networked = False
    """Whether every node has a network of its own, to be cut."""
    place = HOST
    """Where the supervisor is in it."""

    supervisor: Supervisor
    stop: Stop
    end: Outcome

    def __init__(self, folder: Path, nodes: int, spares: int = 0, **given: Any) -> None:
        self.folder, self.nodes, self.spares = folder, nodes, spares
        self.at_event: dict[str, Fault] = given.pop("at_event", {})
        """Faults that strike at the first event of a kind, before anything follows from it."""
        for name in [name for name in given if hasattr(Job, name)]:
            setattr(self, name, given.pop(name))
        self.more: dict[str, Any] = {"protect": "xor:2", "slots": 2, "compare_replicas": 1, **given}
        self.events: list[JobEvent] = []
        self.name = self.name or f"test-{uuid.uuid4().hex[:8]}"
        names = [f"n{i}" for i in range(nodes + spares)]
        self.network = NodeNetwork(self.name, names).open() if self.networked else None
        place = (self.name, names, self.root, self.network, self.place)
        self.cluster = WarmCluster(*place, gate=folder / "begin", own_hosts=self.own_hosts)
        self.gate: Path | None = None
        self.failed_fault: Exception | None = None

    @property
    def losses(self) -> Path:
        return self.folder / "losses.jsonl"

    def training_command(self) -> tuple[str, ...]:
        flags = {
            "--iterations": self.iterations,
            "--losses": self.losses,
            "--width": self.width,
            "--iteration-seconds": self.iteration_seconds,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        script = self.script if self.gate is None else FAULTY
        return self.command or (sys.executable, str(script), *words)

    def spec(self) -> JobSpec:
        settings = {name: value for name, value in self.more.items() if name in SETTINGS}
        return JobSpec(
            name=self.name,
            command=self.training_command(),
            nodes=self.nodes,
            spares=self.spares,
            warm_start=self.own_hosts or WarmCluster.warm is not None,
            settings=SnapshotConfig(**settings),
            log_dir=self.folder / "logs",
            environment={**self.environment, **self._gate_variable()},
            own_timing=self.timing,
            **{
                "budget": RestartBudget(first_delay_seconds=0.1),
                **{name: value for name, value in self.more.items() if name not in SETTINGS},
            },
        )

    def run(self, *faults: tuple[int, Fault]) -> None:
        """Run to the end.  Each fault strikes once its iteration was reached and committed.

        The example does not begin its last iteration before all of them have struck: what the
        supervisor knows of progress is a heartbeat old, and a busy machine makes it older.
        """
        self.gate = self._closed_gate() if faults else None
        asyncio.run(self._run(faults))

    def _closed_gate(self) -> Path | None:
        examples = self.script == EXAMPLE and not self.command
        if WarmCluster.warm is None or not (examples or str(FAULTY) in self.command):
            return None
        gate = self.folder / "gate"
        gate.unlink(missing_ok=True)
        return gate

    def _gate_variable(self) -> dict[str, str]:
        return {} if self.gate is None else {GATE: str(self.gate)}

    async def _run(self, faults: tuple[tuple[int, Fault], ...]) -> None:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        with JobState(self.folder / "state" / self.name, self.name) as state:
            hosts = ReturningHosts(self.cluster, self.hold_seconds)
            waits = self.more.get("on_no_spare") == CHEAPEST
            self.supervisor = Supervisor(self.spec(), self.cluster, state, hosts if waits else None)
            self.supervisor.observers.subscribe(self._notice)
            EventLog(self.folder / EVENTS, self.name).follow(self.supervisor.fleet)
            tasks = [asyncio.create_task(self._inject(faults)), asyncio.create_task(self._begin())]
            run = asyncio.create_task(self.supervisor.run())
            self.stop = Stop(self.supervisor, run)
            for task in tasks:
                # Without its faults the job may never end.
                task.add_done_callback(lambda t: run.cancel() if _failed(t) else None)
            try:
                self.end = await run
            except asyncio.CancelledError:
                for task in filter(_failed, tasks):
                    task.result()
                if self.failed_fault is not None:
                    raise self.failed_fault from None
                raise
            finally:
                for task in tasks:
                    task.cancel()
                print(self.story())

    def interrupt(self) -> None:
        """End the supervisor as Ctrl-C does, from a fault; ``run`` raises CancelledError."""
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)

    def terminate(self) -> None:
        """SIGTERM to the supervisor, from a fault; ``run`` raises CancelledError in the end."""
        self._loop.call_soon_threadsafe(self.stop.after_drain)

    def _notice(self, event: JobEvent) -> None:
        self.events.append(event)
        try:
            if (fault := self.at_event.pop(event.kind, None)) is not None:
                fault(self)
        except Exception as error:
            # A fault that could not strike: the job continues, and its test must not.
            self.failed_fault = error
            self.interrupt()

    async def _begin(self) -> None:
        """Let trainers begin once encoders are up, as imports give them the time elsewhere."""
        parity = self.supervisor.spec.scheme.parity_members
        while True:
            if self.supervisor.pump.encoders.usable or not parity:
                self.cluster.gate.touch()
            else:
                self.cluster.gate.unlink(missing_ok=True)
            await asyncio.sleep(0.02)

    async def _inject(self, faults: tuple[tuple[int, Fault], ...]) -> None:
        for iteration, fault in faults:
            await self.until(lambda at=iteration: self._reached(at))  # type: ignore[misc]
            await asyncio.to_thread(fault, self)
        if self.gate is not None:
            self.gate.touch()

    def _reached(self, iteration: int) -> bool:
        pump, standing = self.supervisor.pump, self.supervisor.standing
        progress = max(self.supervisor.fleet.progress.values(), default=-1)
        protected = standing.protected or standing.committed
        training = pump.cycle is not None
        return training and progress >= iteration and protected is not None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look again after each event of the job; a heartbeat comes twice a second at least."""
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, self.story()
            await asyncio.sleep(0.02)

    def trainers(self) -> list[int]:
        """The process that trains, by rank: not the client that stands for one that was forked."""
        forked = {}
        for pid in procfs.own_processes():
            env = procfs.read_environment(pid)
            # What a trainer starts inherits its environment, and leads no session.
            if env.get(JOB) != self.name or "RANK" not in env or is_client(pid):
                continue
            if _leads_session(pid):
                forked[env.get(NODE), env.get("RANK")] = pid
        pids = self.supervisor.trainers.pids()
        places = [procfs.read_environment(pid) for pid in pids]
        # A client that was just started has none yet.
        return [
            forked.get((env.get(NODE), env.get("RANK")), pid)
            for pid, env in zip(pids, places, strict=True)
        ]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def story(self) -> str:
        start = self.events[0].monotonic if self.events else 0.0
        return "\n".join(
            f"{event.monotonic - start:6.2f} s {event.kind}: {event.text}" for event in self.events
        )

    def restores(self) -> list[tuple[int, str]]:
        return [
            (e.fields["iteration"], e.fields["source"])
            for e in self.events
            if e.kind == "restoring"
        ]

    def result(self) -> Result:
        return read_losses(self.losses)


@contextmanager
def trainers_of(host: WarmHost) -> Iterator[None]:
    """Trainers of jobs, and of runs without us, are forked from this host."""
    before, WarmCluster.warm = WarmCluster.warm, host
    try:
        yield
    finally:
        WarmCluster.warm = before


@contextmanager
def trainers_with(preload: str, environment: Mapping[str, str]) -> Iterator[None]:
    """The same with a host of their own; see WarmHost."""
    host = WarmHost(preload, environment)
    try:
        with trainers_of(host):
            yield
    finally:
        host.close()


def difference(one: Result, other: Result) -> str:
    (losses, sha), (expected, expected_sha) = one, other
    for iteration in sorted(losses.keys() | expected.keys()):
        if losses.get(iteration) != expected.get(iteration):
            pair = f"{losses.get(iteration)} instead of {expected.get(iteration)}"
            return f"iteration {iteration} has loss {pair}"
    return "" if sha == expected_sha else "the final states differ"


def read_losses(path: Path) -> Result:
    """Last loss of each iteration, and the final hash."""
    losses: dict[int, str] = {}
    sha = ""
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "sha256" in entry:
            sha = entry["sha256"]
        else:
            losses[entry["iteration"]] = entry["loss"]
    return losses, sha


def oracle(
    folder: Path, ranks: int, iterations: int = 40, width: int = 64, script: Path = EXAMPLE
) -> Result:
    losses = folder / "oracle.jsonl"
    flags = ["--iterations", str(iterations), "--losses", str(losses), "--width", str(width)]
    run_alone([str(script), *flags], ranks, folder)
    return read_losses(losses)


def run_alone(
    command: Sequence[str],
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a script and its flags on all ranks to the end, with none of our processes."""
    variables = os.environ if environment is None else environment
    base = {k: v for k, v in variables.items() if not k.startswith("MEGATRON_FT_JOB")}
    assert WarmCluster.warm is not None
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        log = folder / f"rank{rank}.log"
        placed = [placed_trainer.__file__, "", "", *command]
        processes.append(WarmCluster.warm.start(placed, base | place, log))
    codes = [process.wait(WAIT_SECONDS) for process in processes]
    assert not any(codes), (codes, (folder / "rank0.log").read_text()[-3000:])


Uninterrupted = Callable[[int, int], Result]
"""The fixture ``uninterrupted``: ranks and iterations to what they compute without faults."""


def log_of(job: Job, rank: int) -> str:
    return (job.folder / "logs" / f"rank{rank}.log").read_text(errors="replace")
