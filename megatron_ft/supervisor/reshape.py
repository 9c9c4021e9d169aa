"""Reshape: shards of the ranks that have registered, made in memory from those of another layout.

A recovery has brought the snapshot back in its own layout (recovery.py).  Trainers of the new
layout have planned their shards and wait for arenas.  The old arenas become sources, new ones are
made beside them, and encoders fill these.  The result is a snapshot of the lineage, from which
trainers restore as always.  Sources go when a snapshot of the new layout is protected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from megatron_ft.core.errors import LayoutMismatchError, MegatronFTError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.recovery import (
    REBUILD_TIMEOUT_SECONDS,
    WORLD_TIMEOUT_SECONDS,
    RebuildError,
    RestorePlan,
)


async def make_sources(coordinator: Coordinator, plan: RestorePlan) -> None:
    """Have all nodes make room for arenas of the new layout beside those of the old one."""
    request = m.MakeSources(plan.incarnation)
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
    done = await _filled(coordinator, {node: request for node in plan.nodes}, set(places))
    reach("reshape.filled")
    commit = m.Commit(plan.incarnation, snapshot, "local")
    await coordinator.ask_all({node: commit for node in plan.active})
    coordinator.record_commit(snapshot, iteration, "local")
    needed, received = (sum(counts) for counts in zip(*done, strict=True))
    seconds = time.monotonic() - started
    coordinator.observers.emit(
        "reshaped",
        f"iteration {iteration}: {len(plan.places)} shards reshaped to {len(places)} in "
        f"{seconds:.2f} s ({needed / (1 << 20):.0f} MiB, {received / (1 << 20):.0f} MiB between "
        "nodes); nothing was read from disk",
        iteration=iteration,
        bytes_needed=needed,
        bytes_received=received,
        seconds=seconds,
    )


async def _filled(
    coordinator: Coordinator, requests: Mapping[str, m.Reshape], missing: set[str]
) -> list[tuple[int, int]]:
    """Ask the nodes, and wait for all ``missing`` shards: bytes needed and received of each."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    counts: list[tuple[int, int]] = []

    def fail(error: MegatronFTError) -> None:
        if not done.done():
            done.set_exception(error)

    def on_event(event: m.NodeEvent) -> None:
        body = event.body
        if isinstance(body, m.Reshaped) and body.record.shard_id in missing:
            missing.discard(body.record.shard_id)
            counts.append((body.bytes_needed, body.bytes_received))
            if not missing and not done.done():
                done.set_result(None)
        elif isinstance(body, m.OrderFailed) and body.world == coordinator.world:
            unfit = body.error == LayoutMismatchError.__name__
            again = RebuildError(body.reason, body.corrupt)
            fail(LayoutMismatchError(body.reason) if unfit else again)
        elif isinstance(body, m.WriterGone) and body.role == "encoder":
            reason = f"the encoder on {event.node} died while it reshaped a snapshot"
            # Unless an encoder's own account of the error comes first.
            asyncio.get_running_loop().call_later(1.0, fail, RebuildError(reason))

    coordinator.listeners.append(on_event)
    try:
        await coordinator.ask_all(requests)
        await asyncio.wait_for(done, REBUILD_TIMEOUT_SECONDS)
    except asyncio.TimeoutError as error:
        raise RebuildError(f"no end of the reshape of {', '.join(sorted(missing))}") from error
    finally:
        coordinator.listeners.remove(on_event)
    return counts
