"""A restore: the plan that a recovery has made, and the shards that encoders make for it.

Lost shards are rebuilt from parity.  If the ranks that have registered are of another layout, the
snapshot was brought back in its own: the old arenas become sources, new ones are made beside them,
and encoders fill these.  The result is a snapshot of the lineage, from which trainers restore as
always.  Sources go when a snapshot of the new layout is protected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import UNSET

from megatron_ft.checkpoint.decide import Decision
from megatron_ft.core.errors import LayoutMismatchError, MegatronFTError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.disk_restore import DiskSource
from megatron_ft.supervisor.events import RebuiltEvent, ReshapedEvent
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.orders import (
    create_requests,
    orders_by_node,
    shards_by_node,
    stripe_orders,
)
from megatron_ft.supervisor.slot_choice import SlotChoice

REBUILD_TIMEOUT_SECONDS = 1800.0


class RebuildError(MegatronFTError):
    """A rebuild did not finish; ``corrupt`` is a shard whose bytes turned out wrong, or empty."""

    def __init__(self, reason: str, corrupt: str = "") -> None:
        super().__init__(reason)
        self.corrupt = corrupt


@dataclass(frozen=True)
class RestorePlan:
    """A decision, where shards live now, and the new lineage.

    ``disk`` is set where the snapshot comes from a drained checkpoint; ``kept`` are ranks whose
    process was released and waits to train again; ``decided`` is when this was
    decided.  ``sources`` is what becomes of shards of an older layout; if they return, they are
    the shards of ``places``.  ``reshaped`` says that the ranks to come have another layout than
    the snapshot.  ``reached`` is the last iteration before the failure, -1 if none is known.
    """

    decision: Decision
    places: dict[str, str]
    active: tuple[str, ...]
    incarnation: int
    lineage: tuple[Ancestor, ...]
    slots: SlotChoice
    disk: DiskSource | None = None
    kept: tuple[int, ...] = ()
    sources: m.Sources = "drop"
    reshaped: bool = False
    reached: int = -1
    decided: float = field(default_factory=time.monotonic)

    def adoption(self, node: str) -> m.Adopt:
        """Request by which ``node`` keeps its shards, or nothing if nothing is restored."""
        snapshot = self.decision.snapshot
        kept = snapshot is not None and not (self.disk is not None and self.disk.fresh)
        keep = tuple(s for s, n in self.places.items() if n == node and kept)
        return m.Adopt(self.incarnation, self.lineage, snapshot, keep, self.sources)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that train, and behind them others that hold shards of the snapshot."""
        return tuple(dict.fromkeys((*self.active, *sorted(self.places.values()))))

    @property
    def behind(self) -> int:
        """The iteration up to which training repeats what was lost, -1 if nothing was."""
        return self.reached if self.reached > self.decision.iteration else -1

    def origins(self) -> dict[str, str]:
        """Origin of each shard's bytes: "memory" of its own node, "parity" or "disk"."""
        lost = dict.fromkeys(self.lost(), "parity")
        disk = dict.fromkeys(() if self.disk is None else self.disk.shards, "disk")
        return {**dict.fromkeys(self.places, "memory"), **lost, **disk}

    def lost(self) -> tuple[str, ...]:
        """Shards that must be rebuilt from parity."""
        return tuple(shard for members in self.decision.lost.values() for shard in members)

    def describe(self) -> tuple[str, str]:
        """The restore as a sentence, and in a word where the bytes come from."""
        start = f"restoring iteration {self.decision.iteration}"
        if self.reshaped:
            start += f", of {len(self.places)} shards in another layout"
        if self.disk is None and not self.lost():
            return f"{start} from own memory", "own memory"
        shards, source = (
            (self.lost(), "parity") if self.disk is None else (self.disk.shards, "disk")
        )
        names = ", ".join(shards) if len(shards) <= 4 else f"{len(shards)} shards"
        folder = "" if self.disk is None else f" ({self.disk.folder})"
        rest = "" if self.disk is not None and self.disk.fresh else ", the rest from own memory"
        return f"{start}: {names} from {source}{folder}{rest}", source


async def make_arenas(
    fleet: Fleet, requests: Mapping[str, m.CreateArena], places: Mapping[str, str]
) -> None:
    """Make or check these shards' arenas, on all nodes at once and one by one on each."""

    async def make(node: str, shards: Sequence[str]) -> None:
        for shard_id in shards:
            await fleet.links[node].make_arena(requests[shard_id])

    by_node = shards_by_node(requests, places)
    await asyncio.gather(*(make(node, shards) for node, shards in by_node.items()))


async def make_targets(fleet: Fleet, plan: RestorePlan, shards: Sequence[str]) -> None:
    """Arenas for shards that are brought back, where their node has none yet."""
    stripes = plan.decision.stripes
    requests = create_requests(stripes, plan.incarnation, plan.lineage, plan.slots.count)
    await make_arenas(fleet, {shard: requests[shard] for shard in shards}, plan.places)


async def rebuild(job: JobContext, plan: RestorePlan, snapshot: SnapshotId) -> None:
    """Rebuild lost shards from parity by the encoders; RebuildError if one cannot."""
    orders = stripe_orders(plan.decision.stripes, plan.places, plan.nodes, plan.decision.lost)
    parts = orders_by_node(orders, plan.places)
    iteration = plan.decision.iteration
    requests = {
        node: m.Rebuild(
            plan.incarnation, snapshot, iteration, job.encoders.name, parts.get(node, ())
        )
        for node in plan.nodes
    }
    started = time.monotonic()
    reports = await shards_made(job, requests, snapshot, plan.lost(), "rebuild")
    seconds = time.monotonic() - started
    decoded = sum(report.record.used_bytes for report in reports)
    job.emit(
        RebuiltEvent(bytes_decoded=decoded, seconds=seconds),
        f"{len(reports)} lost shards rebuilt from parity in {seconds:.2f} s "
        f"({decoded / (1 << 20):.0f} MiB)",
    )


async def shards_made(
    job: JobContext,
    requests: Mapping[str, m.Message],
    snapshot: SnapshotId,
    shards: Iterable[str],
    work: str,
) -> list[m.Rebuilt | m.Reshaped]:
    """Reports of encoders that all ``shards`` of ``snapshot`` are made, as nodes are asked to.

    RebuildError if an encoder fails, which may go well the next time; LayoutMismatchError if the
    snapshot is of another model.  ``work`` names it in errors.
    """
    missing, reports = set(shards), list[m.Rebuilt | m.Reshaped]()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: MegatronFTError) -> None:
        if not done.done():
            done.set_exception(error)

    def on_event(event: m.NodeEvent) -> None:
        body = event.body
        # Late events of the encoders before these say nothing of them.
        world = job.encoders.name
        if isinstance(body, m.Rebuilt | m.Reshaped) and body.record.snapshot == snapshot:
            missing.discard(body.record.shard_id)
            reports.append(body)
            if not missing and not done.done():
                done.set_result(None)
        elif isinstance(body, m.OrderFailed) and body.world == world:
            again = RebuildError(body.reason, body.corrupt)
            fail(LayoutMismatchError(body.reason) if body.unfit else again)
        elif isinstance(body, m.WriterGone) and (body.role, body.who) == ("encoder", world):
            reason = f"the encoder on {event.node} died during the {work}"
            # Unless an encoder's own account of the error comes first.
            asyncio.get_running_loop().call_later(1.0, fail, RebuildError(reason))

    try:
        with job.fleet.listening(on_event):
            await job.fleet.ask_all(requests)
            await asyncio.wait_for(done, REBUILD_TIMEOUT_SECONDS)
    except asyncio.TimeoutError as error:
        raise RebuildError(f"no end of the {work} of {', '.join(sorted(missing))}") from error
    return reports


async def make_sources(fleet: Fleet, plan: RestorePlan) -> None:
    """Make room on all nodes for arenas of the new layout beside those of the old one."""
    assert plan.decision.snapshot is not None, "there is something to reshape"
    request = m.MakeSources(plan.incarnation, plan.decision.snapshot)
    await fleet.ask_all({node: request for node in plan.nodes})
    reach("reshape.sources")


async def return_sources(fleet: Fleet, plan: RestorePlan) -> None:
    """Make the sources arenas again after a refusal, so that commands find the snapshot in them.

    Where that fails the next recovery does it.
    """
    with suppress(MegatronFTError):
        await fleet.ask_all({node: plan.adoption(node) for node in plan.nodes})


async def reshape(job: JobContext, plan: RestorePlan, places: Mapping[str, str]) -> None:
    """Fill the new arenas of ``places`` (shard to node) from the plan's snapshot; commit that.

    RebuildError if an encoder fails; LayoutMismatchError if the snapshot does not hold what the
    new layout needs: it is of another model.
    """
    await job.encoders.ready()
    source, iteration = plan.decision.snapshot, plan.decision.iteration
    assert source is not None, "there is something to reshape"
    # Before the first one that is captured; see SnapshotCycle.
    snapshot, started = SnapshotId(plan.incarnation, 0), time.monotonic()
    ranks = {shard: plan.nodes.index(node) for shard, node in plan.places.items()}
    request = m.Reshape(plan.incarnation, snapshot, iteration, job.encoders.name, source, ranks)
    requests: dict[str, m.Message] = {node: request for node in plan.nodes}
    reports = await shards_made(job, requests, snapshot, places, "reshape")
    reach("reshape.filled")
    commit = m.Commit(plan.incarnation, snapshot, "local")
    await job.fleet.ask_all({node: commit for node in plan.active})
    job.standing.commits(snapshot, iteration, "local")
    made = [report for report in reports if isinstance(report, m.Reshaped)]
    needed = sum(report.bytes_needed for report in made)
    received = sum(report.bytes_received for report in made)
    counts = [report.storage_bytes_read for report in made]
    stored = sum(count for count in counts if count is not None)
    from_disk = f"{stored} bytes were" if stored else "nothing was"
    seconds = time.monotonic() - started
    event = ReshapedEvent(
        iteration=iteration,
        bytes_needed=needed,
        bytes_received=received,
        storage_bytes_read=UNSET if None in counts else stored,
        seconds=seconds,
    )
    job.emit(
        event,
        f"iteration {iteration}: {len(plan.places)} shards reshaped to {len(places)} in "
        f"{seconds:.2f} s ({needed / (1 << 20):.0f} MiB, {received / (1 << 20):.0f} MiB between "
        f"nodes); {from_disk} read from disk",
    )
