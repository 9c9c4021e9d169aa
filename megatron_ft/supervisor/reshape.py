"""Reshape: shards of the ranks that have registered, made in memory from those of another layout.

A recovery has brought the snapshot back in its own layout (recovery.py).  Trainers of the new
layout have planned their shards and wait for arenas.  The old arenas become sources, new ones are
made beside them, and encoders fill these.  The result is a snapshot of the lineage, from which
trainers restore as always.  Sources go when a snapshot of the new layout is protected.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.recovery import (
    WORLD_TIMEOUT_SECONDS,
    RestorePlan,
    shards_made,
)


async def make_sources(coordinator: Coordinator, plan: RestorePlan) -> None:
    """Have all nodes make room for arenas of the new layout beside those of the old one."""
    assert plan.decision.snapshot is not None, "there is something to reshape"
    request = m.MakeSources(plan.incarnation, plan.decision.snapshot)
    await coordinator.ask_all({node: request for node in plan.nodes})
    reach("reshape.sources")


async def return_sources(coordinator: Coordinator, plan: RestorePlan) -> None:
    """Make the sources arenas again after a refusal, so that commands find the snapshot in them.

    Where that fails the next recovery does it.
    """
    with suppress(MegatronFTError):
        await coordinator.ask_all({node: plan.adoption(node) for node in plan.nodes})


async def reshape(coordinator: Coordinator, plan: RestorePlan, places: Mapping[str, str]) -> None:
    """Fill the new arenas of ``places`` (shard to node) from the plan's snapshot; commit that.

    RebuildError if an encoder fails; LayoutMismatchError if the snapshot does not hold what the
    new layout needs: it is of another model.
    """
    await coordinator.world_ready(WORLD_TIMEOUT_SECONDS)
    source, iteration = plan.decision.snapshot, plan.decision.iteration
    assert source is not None, "there is something to reshape"
    # Before the first one that is captured; see SnapshotCycle.
    snapshot, started = SnapshotId(plan.incarnation, 0), time.monotonic()
    ranks = {shard: plan.nodes.index(node) for shard, node in plan.places.items()}
    request = m.Reshape(plan.incarnation, snapshot, iteration, coordinator.world, source, ranks)
    requests: dict[str, m.Message] = {node: request for node in plan.nodes}
    reports = await shards_made(coordinator, requests, snapshot, places, "reshape")
    reach("reshape.filled")
    commit = m.Commit(plan.incarnation, snapshot, "local")
    await coordinator.ask_all({node: commit for node in plan.active})
    coordinator.record_commit(snapshot, iteration, "local")
    made = [report for report in reports if isinstance(report, m.Reshaped)]
    needed = sum(report.bytes_needed for report in made)
    received = sum(report.bytes_received for report in made)
    counts = [report.storage_bytes_read for report in made]
    stored = sum(count for count in counts if count is not None)
    measured = {} if None in counts else {"storage_bytes_read": stored}
    from_disk = f"{stored} bytes were" if stored else "nothing was"
    seconds = time.monotonic() - started
    coordinator.observers.emit(
        "reshaped",
        f"iteration {iteration}: {len(plan.places)} shards reshaped to {len(places)} in "
        f"{seconds:.2f} s ({needed / (1 << 20):.0f} MiB, {received / (1 << 20):.0f} MiB between "
        f"nodes); {from_disk} read from disk",
        iteration=iteration,
        bytes_needed=needed,
        bytes_received=received,
        **measured,
        seconds=seconds,
    )
