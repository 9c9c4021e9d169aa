"""How much memory a job's nodes hold, as their SMPs say, and which software it runs on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megatron_ft import __version__
from megatron_ft.cli import status
from megatron_ft.cli.demo.frameworks import Framework
from megatron_ft.core.errors import NoMpiError
from megatron_ft.launchers.virtual import VirtualCluster

_PACKAGES = ("torch", "numpy", "mpi4py", "pyeclib", "pyzmq")


@dataclass(frozen=True)
class NodeMemory:
    """Bytes on one node: its arenas, and its SMP beside them; 0 shards mean a spare."""

    node: str
    shards: int
    arena_bytes: int
    smp_bytes: int


def node_memory(cluster: VirtualCluster) -> list[NodeMemory]:
    """Ask every SMP of the job; nodes that do not answer are left out.  Blocks for a moment."""
    jobs = status.collect(cluster.root, cluster.job)
    nodes: Mapping[str, Any] = jobs.get(cluster.job, {}).get("nodes", {})
    return [
        NodeMemory(name, len(view["shards"]), view["arena_bytes"], view["smp_bytes"])
        for name, view in sorted(nodes.items())
        if "error" not in view
    ]


def versions(cluster: VirtualCluster, framework: Framework) -> dict[str, str]:
    """Names and versions of what the demo ran on; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "megatron-ft": __version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {**found, **framework.versions(), "mpi": _mpi_of(cluster)}


def _mpi_of(cluster: VirtualCluster) -> str:
    try:
        mpi = cluster.mpi()
    except NoMpiError:
        return "none, encoders use TCP"
    return f"{mpi.kind.value} {mpi.version}"
