"""The trial world: every encoder of a world of all nodes exchanges a message with every other.

``python -m megatron_ft.cli.doctor.trial_world TOKEN`` is one rank, started as encoders are; it
prints a TrialRank.  Where the world of all nodes does not start, smaller ones find out which node
is in its way.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_ft.cli.doctor.facts import TrialRank, WorldFacts, answers, last_words, say
from megatron_ft.core.environment import NODE, NODE_DIR
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.erasure.transport import Transport
from megatron_ft.erasure.world import join_world
from megatron_ft.launchers.launcher import Launcher, Placement
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.supervisor.encoder_processes import EncoderStarter

MESSAGE_BYTES = 1 << 16
"""More than fits into a first packet, so that it takes the way that parity takes."""

ANSWER_SECONDS = 30.0
WORLD_SECONDS = 60.0 + ANSWER_SECONDS
_TAG = 1


def silent_ranks(transport: Transport, seconds: float = ANSWER_SECONDS) -> tuple[int, ...]:
    """Exchange a message with every other rank; those with which that is not done in time."""
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    transfers = {
        rank: [
            transport.irecv(np.empty_like(message), rank, _TAG),
            transport.isend(message, rank, _TAG),
        ]
        for rank in others
    }
    deadline = time.monotonic() + seconds
    while transfers and time.monotonic() < deadline:
        transfers = {r: both for r, both in transfers.items() if not transport.test(both)}
        time.sleep(0.001)
    return tuple(transfers)


def main() -> None:
    world = join_world()
    transport = world.transport()
    silent = silent_ranks(transport)
    device, inode = _marker(sys.argv[1])
    node = os.environ.get(NODE, "")
    say(TrialRank(node, world.library, transport.size, device, inode, silent))
    if silent:
        # The end of MPI would wait for the messages that nobody answers.
        os._exit(0)
    world.leave()


def _marker(token: str) -> tuple[int, int]:
    try:
        status = os.stat(os.path.join(os.environ[NODE_DIR], token))
    except (KeyError, OSError):
        return 0, 0
    return status.st_dev, status.st_ino


class TrialWorlds:
    """Starts trial worlds over nodes of ``launcher``; logs go to ``folder``.

    ``transport`` is the one that the user wants, as for EncoderStarter.
    """

    def __init__(self, launcher: Launcher, folder: Path, token: str, transport: str) -> None:
        self._folder, self._token = folder, token
        self._starter = EncoderStarter(launcher, transport)
        self._count = 0

    async def examine(self, nodes: Sequence[str]) -> WorldFacts:
        """Try a world of all; where it does not start, find the nodes that are in its way."""
        ranks, error = await self._world(nodes)
        broken: tuple[str, ...] = ()
        if not error:
            return WorldFacts(ranks, tcp=self._starter.over_tcp, no_mpi=self._starter.no_mpi)
        if len(nodes) > 1:
            broken = await self._broken(nodes)
        tcp, no_mpi = self._starter.over_tcp, self._starter.no_mpi
        return WorldFacts({}, broken, error, tcp, no_mpi)

    async def _broken(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """The nodes of the smallest parts that start no world; () if both halves start one."""
        middle = len(nodes) // 2
        found: list[str] = []
        for part in (nodes[:middle], nodes[middle:]):
            _, error = await self._world(part)
            if error:
                found += (len(part) > 1 and await self._broken(part)) or part
        return tuple(found)

    async def _world(self, nodes: Sequence[str]) -> tuple[dict[str, TrialRank], str]:
        """The ranks of one world by node, and why it is none."""
        self._count += 1
        log = self._folder / f"world{self._count}.log"
        argv = [sys.executable, "-m", "megatron_ft.cli.doctor.trial_world", self._token]
        environment = {**base_environment(), "OMP_NUM_THREADS": "1"}
        placements = [Placement(node, argv, environment) for node in nodes]
        try:
            world = await asyncio.to_thread(self._starter.start, placements, log)
        except MegatronFTError as error:
            return {}, str(error)
        try:
            status = await asyncio.wait_for(world.wait(), WORLD_SECONDS)
            error_text = f"status {status}: {last_words(log)}"
        except asyncio.TimeoutError:
            error_text = f"no end within {WORLD_SECONDS:.0f} s: {last_words(log)}"
        finally:
            world.kill()
            await world.wait()
        ranks = {rank.node: rank for rank in answers(log, TrialRank)}
        whole = [rank.size for rank in ranks.values()] == [len(nodes)] * len(nodes)
        return ranks, "" if whole else error_text


if __name__ == "__main__":
    main()
