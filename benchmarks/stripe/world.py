"""Start a stripe's members as a world of virtual nodes, and collect what they measured."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.stripe.rank import Answer, Done, Memory, Plan
from megatron_ft.cli.doctor.facts import answers, last_words
from megatron_ft.launchers.launcher import Placement
from megatron_ft.supervisor.encoder_processes import EncoderStarter
from tests.support.networked_cluster import NetworkedCluster
from tests.support.node_network import NodeNetwork

ROOT = Path(__file__).parents[2]
WORLD_SECONDS = 900.0


class Measured:
    """What all ranks of one world said."""

    def __init__(self, plan: Plan, said: Sequence[Answer]) -> None:
        self.plan, self.said = plan, said

    def seconds(self, work: str) -> list[float]:
        """Of each round, until the last rank was done."""
        return [max(d.seconds for d in round) for round in self._rounds(work)]

    def cpu_seconds(self, work: str) -> list[float]:
        """Of each round, the mean of the ranks."""
        members = self.plan.k + self.plan.m
        return [sum(d.cpu_seconds for d in round) / members for round in self._rounds(work)]

    def one(self, work: str) -> list[Done]:
        """The first round, by rank."""
        return self._rounds(work)[0]

    @property
    def memory(self) -> list[Memory]:
        """Of the ranks that measured it."""
        return [answer for answer in self.said if isinstance(answer, Memory)]

    def _rounds(self, work: str) -> list[list[Done]]:
        done = [d for d in self.said if isinstance(d, Done) and d.work == work]
        rounds = [[d for d in done if d.round == n + 1] for n in range(self.plan.rounds)]
        members = self.plan.k + self.plan.m
        if any(len(found) != members for found in rounds):
            raise RuntimeError(f"not all of {members} ranks said how long {work} took")
        return [sorted(found, key=lambda d: d.rank) for found in rounds]


def measure(plan: Plan, transport: str, *, over_lo: bool = False, megabits: float = 0) -> Measured:
    """Run the plan in a world of its own.

    ``over_lo`` keeps MPI from sharing memory; ``megabits`` gives each node a namespace and a
    link of that rate each way.  RuntimeError with the world's last words if it fails.
    """
    names = [f"n{number}" for number in range(plan.k + plan.m)]
    job = f"bench-{uuid.uuid4().hex[:8]}"
    argv = [sys.executable, "-m", "benchmarks.stripe.rank", msgspec.json.encode(plan).decode()]
    placements = [Placement(name, argv, _environment(over_lo)) for name in names]
    with (
        _network(job, names, megabits) as network,
        tempfile.TemporaryDirectory(prefix="mft-") as at,
    ):
        log, cluster = Path(at) / "log", NetworkedCluster(job, names)
        cluster.use_network(network)
        try:
            world = EncoderStarter(cluster, transport).start(placements, log)
            status = asyncio.run(asyncio.wait_for(world.wait(), WORLD_SECONDS))
        finally:
            cluster.destroy()
        if status:
            raise RuntimeError(f"the world over {transport} ended with {status}: {last_words(log)}")
        return Measured(plan, [*answers(log, Done), *answers(log, Memory)])


@contextmanager
def _network(job: str, names: Sequence[str], megabits: float) -> Iterator[NodeNetwork | None]:
    if not megabits:
        yield None
        return
    with NodeNetwork(job, names) as network:
        for name in names:
            network.limit(name, megabits)
        yield network


def _environment(over_lo: bool) -> Mapping[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if over_lo:
        found |= {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    return found
