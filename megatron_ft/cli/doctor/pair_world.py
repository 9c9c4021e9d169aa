"""One rank of the world that measures every pair of nodes.

``python -m megatron_ft.cli.doctor.pair_world REQUEST`` with a WorldRequest in JSON.  What it
finds is printed line by line, so that a world that hangs has told what it knew.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from megatron_ft.cli.doctor.facts import WorldRank, say
from megatron_ft.cli.doctor.pair_meter import PairMeter, WorldRequest, meet
from megatron_ft.cli.doctor.pairs import round_robin
from megatron_ft.core.environment import NODE, NODE_DIR
from megatron_ft.erasure.world import join_world


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This rank is in a world; ``pid`` is its number on its node."""

    node: str
    pid: int
    rank: WorldRank
    size: int


def fabric(environment: Any = os.environ) -> str:
    """What the settings of MPI say about the network; MPI itself does not tell."""
    names = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_mtl",
             "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD")  # fmt: skip
    return ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))


def main() -> None:
    """Join, say so, measure, and leave."""
    request = msgspec.json.decode(sys.argv[1], type=WorldRequest)
    world = join_world()
    transport, (device, inode) = world.transport(), _marker(request.token)
    rank = WorldRank(world.library, fabric(), device, inode)
    say(Joined(os.environ.get(NODE, ""), os.getpid(), rank, transport.size))
    rounds = request.rounds or round_robin(transport.size)
    meter = PairMeter(transport, request, say)
    meet(transport, request.pair_seconds)
    meter.run(rounds)
    if not meet(transport, len(rounds) * request.pair_seconds):
        # MPI would wait in its end for the messages that nobody answers.
        os._exit(0)
    world.leave()


def _marker(token: str) -> tuple[int, int]:
    try:
        status = os.stat(os.path.join(os.environ[NODE_DIR], token))
    except (KeyError, OSError):
        return 0, 0
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    main()
