"""Forged facts: nodes on which all is well, to be spoiled one thing at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.arena.limits import MemoryReading
from megatron_ft.cli.doctor.facts import (
    ArenaPlace,
    AskedJob,
    Facts,
    NodeFacts,
    SharedFolder,
    TrainerFacts,
    TrialRank,
    WorldFacts,
)
from megatron_ft.config import SETTINGS, SnapshotConfig
from megatron_ft.supervisor.health import Vote
from megatron_ft.supervisor.spec import JobSpec

GIB = 1 << 30
NODES = ("n0", "n1", "n2", "n3", "n4")
PACKAGES = {"torch": "2.13.0", "megatron-core": "0.19.2", "deepspeed": "0.19.8"}
STEP = "0::/system.slice/slurmstepd.scope/job_7/step_{}/user/task_0\n"


def asked(**changes: Any) -> AskedJob:
    """A job; changes are fields of AskedJob, of its spec, or settings."""
    own = {n: changes.pop(n) for n in AskedJob.__struct_fields__ if n in changes}
    given = {n: changes.pop(n) for n in SETTINGS if n in changes}
    given = {"slots": 2, "drain_dir": Path("/drain"), **given}
    if given["drain_dir"]:
        given = {"drain_interval": 10, "drain_export_dir": Path("/exports"), **given}
    settings = SnapshotConfig(**given)
    active = own.setdefault("active", NODES[:4])
    own = {"spares": NODES[4:], "shard_bytes": 10 * GIB, "megatron": True, **own}
    usual = {"command": ("python", "train.py"), "nodes": len(active), "ranks_per_node": 8}
    spec = JobSpec(name="job", settings=settings, **{**usual, **changes})
    return AskedJob(spec=spec, **{"scheme": spec.scheme, **own})


def node(name: str, **changes: Any) -> NodeFacts:
    inode = 100 + NODES.index(name)
    good = NodeFacts(
        machine=f"boot-{name}",
        user=1000,
        code="c0de",
        cgroup=STEP.format("1"),
        removes_ipc=False,
        arena=arena(inode=inode),
        copies="copied and digested in one pass",
        cores=96,
        folders=folders(),
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
    good = TrainerFacts("3.11.7", "/usr/bin/python3", PACKAGES, STEP.format("2"), 5, inode)
    good = msgspec.structs.replace(good, cores=96)
    return msgspec.structs.replace(good, **changes)


def world(**changes: Any) -> WorldFacts:
    good = WorldFacts({n: rank(n) for n in NODES})
    return msgspec.structs.replace(good, **changes)


def rank(name: str, **changes: Any) -> TrialRank:
    good = TrialRank(name, "Open MPI v5", len(NODES), 5, 100 + NODES.index(name))
    return msgspec.structs.replace(good, **changes)


def folders(name: str = "", **changes: Any) -> dict[str, SharedFolder]:
    """The shared folders of a node, one of them changed."""
    good = {path: SharedFolder(same=True, free_bytes=1 << 50) for path in ("/drain", "/exports")}
    return {
        p: msgspec.structs.replace(f, **(changes if p == name else {})) for p, f in good.items()
    }


def facts(**changes: Any) -> Facts:
    good = Facts(
        job=asked(),
        nodes={name: node(name) for name in NODES},
        trainers={name: trainer(name) for name in NODES},
        world=world(),
        seen_here={"/drain": NODES, "/exports": NODES},
        no_kill=True,
        votes=dict.fromkeys(NODES, Vote("healthy")),
    )
    return msgspec.structs.replace(good, **changes)


def with_node(name: str, **changes: Any) -> Facts:
    return facts(nodes={n: node(n, **changes) if n == name else node(n) for n in NODES})


def with_trainer(name: str, **changes: Any) -> Facts:
    return facts(trainers={n: trainer(n, **changes) if n == name else trainer(n) for n in NODES})
