"""Forged facts: nodes on which all is well, to be spoiled one thing at a time."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_ft.arena.limits import MemoryReading
from megatron_ft.cli.doctor.facts import (
    ArenaPlace,
    Clock,
    DrainPlace,
    ExportFolder,
    ExportPlace,
    Facts,
    NodeFacts,
    Rates,
    TrainerFacts,
    Wishes,
    WorldFacts,
    WorldRank,
)
from megatron_ft.cli.doctor.pairs import all_pairs
from megatron_ft.core.scheme import Scheme

GIB = 1 << 30
NODES = ("n0", "n1", "n2", "n3", "n4")
PACKAGES = {"torch": "2.13.0", "megatron-core": "0.19.2", "deepspeed": "0.19.8"}
STEP = "0::/system.slice/slurmstepd.scope/job_7/step_{}/user/task_0\n"


def wishes(**changes: Any) -> Wishes:
    good = Wishes(
        scheme=Scheme.parse("rs:3+1"),
        active=NODES[:4],
        spares=NODES[4:],
        ranks_per_node=8,
        slot_count=2,
        shard_bytes=10 * GIB,
        shard_source="--shard-gib",
        drain_dir="/drain",
        drain_keep=2,
        megatron=True,
    )
    return msgspec.structs.replace(good, **changes)


def node(name: str, **changes: Any) -> NodeFacts:
    inode = 100 + NODES.index(name)
    good = NodeFacts(
        machine=f"boot-{name}",
        host=name,
        user=1000,
        python="3.11.7",
        packages=PACKAGES,
        code="c0de",
        cpus=64,
        began=1000.1,
        ended=1001.0,
        locked_memory=-1,
        descriptors=65536,
        descriptors_hard=-1,
        remove_ipc=False,
        lingers=False,
        cgroup=STEP.format("1"),
        arena=arena(inode=inode),
        rates=Rates(10e9, 9e9, 5e9),
        drain=DrainPlace(1e9, ".token", 1 << 50),
        exports={"/exports": ExportPlace(same=True, locked=True)},
    )
    return msgspec.structs.replace(good, **changes)


def arena(**changes: Any) -> ArenaPlace:
    limits = (
        MemoryReading("free space of /dev/shm", 500 * GIB),
        MemoryReading("memory.max", 600 * GIB),
    )
    good = ArenaPlace("/dev/shm/j/n", "tmpfs", 512 * GIB, limits, device=5)
    return msgspec.structs.replace(good, **changes)


def trainer(name: str, **changes: Any) -> TrainerFacts:
    inode = 100 + NODES.index(name)
    good = TrainerFacts("3.11.7", "/usr/bin/python3", PACKAGES, 64, STEP.format("2"), 5, inode)
    return msgspec.structs.replace(good, **changes)


def world(**changes: Any) -> WorldFacts:
    fabric = "UCX_TLS=rc"
    joined = {n: WorldRank("Open MPI v5", fabric, 5, 100 + i) for i, n in enumerate(NODES)}
    good = WorldFacts(joined, dict.fromkeys(all_pairs(NODES), 20e9), "Open MPI 5")
    return msgspec.structs.replace(good, **changes)


def exports(**changes: Any) -> ExportFolder:
    return msgspec.structs.replace(ExportFolder("--drain-export-dir", "/exports"), **changes)


def facts(**changes: Any) -> Facts:
    good = Facts(
        wishes=wishes(),
        nodes={name: node(name) for name in NODES},
        trainers={name: trainer(name) for name in NODES},
        clocks={name: Clock(-0.4, 0.3) for name in NODES},
        world=world(),
        drain_tokens=dict.fromkeys(NODES, ".token"),
        no_kill="set",
        exports=(exports(),),
    )
    return msgspec.structs.replace(good, **changes)


def with_node(name: str, **changes: Any) -> Facts:
    return facts(nodes={n: node(n, **changes) if n == name else node(n) for n in NODES})


def with_trainer(name: str, **changes: Any) -> Facts:
    return facts(trainers={n: trainer(n, **changes) if n == name else trainer(n) for n in NODES})
