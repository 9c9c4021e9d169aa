"""All checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ft.cli.doctor.checks import (
    cluster,
    container,
    exports,
    limits,
    memory,
    network,
    speed,
    versions,
)
from megatron_ft.cli.doctor.facts import Facts
from megatron_ft.cli.doctor.finding import Finding

CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    cluster.reachable,
    cluster.spares,
    cluster.protection,
    cluster.slurm,
    limits.steps,
    versions.frameworks,
    versions.same,
    memory.folder,
    memory.room,
    memory.leftovers,
    container.same_arena,
    container.same_processes,
    limits.remove_ipc,
    limits.descriptors,
    limits.locked_memory,
    limits.cores,
    speed.rates,
    network.world,
    speed.clocks,
    speed.drain,
    exports.folders,
)


def judge(facts: Facts) -> list[Finding]:
    """Everything that can be said of these facts.  Pure."""
    return [finding for check in CHECKS for finding in check(facts)]
