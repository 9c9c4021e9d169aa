"""All checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ft.cli.doctor.checks import cluster, node
from megatron_ft.cli.doctor.facts import Facts, Finding

CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    cluster.reachable,
    cluster.spares,
    cluster.protection,
    cluster.slurm,
    node.steps,
    node.frameworks,
    node.same,
    cluster.folder,
    cluster.room,
    cluster.leftovers,
    node.same_arena,
    node.same_processes,
    node.remove_ipc,
    node.descriptors,
    node.locked_memory,
    node.cores,
    cluster.rates,
    cluster.world,
    cluster.clocks,
    cluster.drain,
    node.folders,
)


def judge(facts: Facts) -> list[Finding]:
    """Everything that can be said of these facts.  Pure."""
    return [finding for check in CHECKS for finding in check(facts)]
