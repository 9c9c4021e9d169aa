"""The start of an incarnation: every rank registers, stripes are fixed, arenas are made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.errors import (
    ConfigError,
    LayoutMismatchError,
    MegatronFTError,
    RegistrationError,
)
from megatron_ft.core.identity import Ancestor, RankRule, Seat
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, RankPlace, domain_of, plan_stripes
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.plan import Sizes, create_requests


@dataclass
class Roll:
    """Ranks that have said hello, and those that have brought a layout, in this incarnation.

    ``known`` are the shards of the snapshot that is restored, empty if none is; ``stranger`` is
    one that a rank brings and that is not among them.
    """

    world_size: int
    domains: Domains = field(default_factory=dict)
    hellos: dict[str, tuple[str, m.Hello]] = field(default_factory=dict)
    layouts: dict[str, m.Prepare] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    known: frozenset[str] = frozenset()
    stranger: str = ""

    def hear(self, event: m.Event) -> None:
        """Take note of a registration event."""
        if isinstance(event.body, m.Hello):
            self.hellos[event.body.shard_id] = (event.node, event.body)
            if self.known and event.body.shard_id not in self.known:
                self.stranger = event.body.shard_id
                self.complete.set()
        elif isinstance(event.body, m.Prepare):
            self.layouts[event.body.shard_id] = event.body
        if len(self.layouts) == self.world_size and self.layouts.keys() <= self.hellos.keys():
            self.complete.set()

    def missing_ranks(self) -> list[int]:
        """Ranks that have not brought a layout."""
        there = {self.hellos[s][1].rank for s in self.layouts if s in self.hellos}
        return sorted(set(range(self.world_size)) - there)

    def places(self) -> dict[str, str]:
        """Shard to node."""
        return {shard_id: node for shard_id, (node, _) in self.hellos.items()}

    def seats(self) -> dict[str, Seat]:
        """Where each shard belongs, for a later incarnation that has nothing but a disk."""
        return {
            shard: Seat(hello.rank, hello.coordinates, self.layouts[shard].required_bytes)
            for shard, (_, hello) in self.hellos.items()
        }

    def rank_places(self) -> list[RankPlace]:
        """What the stripe planner needs to know of each rank."""
        return [
            RankPlace(
                rank=hello.rank,
                shard_id=shard_id,
                node=node,
                domain=domain_of(node, self.domains),
                local_index=hello.local_index,
                coordinates=hello.coordinates,
                required_bytes=self.layouts[shard_id].required_bytes,
            )
            for shard_id, (node, hello) in self.hellos.items()
        ]

    @property
    def interval(self) -> int:
        """Iterations between snapshots, as the ranks were told, 0 for auto; they must agree."""
        intervals = {prepare.interval for prepare in self.layouts.values()}
        if len(intervals) != 1:
            raise ConfigError(f"ranks have different snapshot intervals: {sorted(intervals)}")
        return intervals.pop()

    def rank_rule(self, needed: bool) -> RankRule | None:
        """With how many ranks the command could go on, as they all say; None if with no others.

        ConfigError if it is ``needed`` and there is none, or they differ.
        """
        rules = {prepare.rank_rule for prepare in self.layouts.values()}
        rule = rules.pop() if len(rules) == 1 else None
        if needed and rule is None:
            raise ConfigError(
                "--on-no-spare shrink: this program does not say with how many ranks it could go "
                "on; Megatron-LM under --inmem-snapshot does, DeepSpeed and plain PyTorch do not. "
                "Take --on-no-spare stop, or hold under Slurm, and spares"
            )
        return rule


async def wait_for_all(roll: Roll, timeout: float) -> None:
    """Wait until every rank has registered; RegistrationError names those that have not."""
    try:
        await asyncio.wait_for(roll.complete.wait(), timeout)
    except asyncio.TimeoutError as error:
        none = not roll.hellos
        raise RegistrationError(_describe_missing(roll, timeout), none) from error


def _describe_missing(roll: Roll, timeout: float) -> str:
    if roll.hellos:
        return (
            f"ranks {roll.missing_ranks()} have not registered within {timeout:.0f} s; see their "
            "logs. If they only need longer to start, give --register-timeout-seconds"
        )
    return (
        f"no rank has registered within {timeout:.0f} s; does the command take snapshots? Megatron "
        'does with --inmem-snapshot, DeepSpeed with "inmem_snapshot" in its JSON, a loop of your '
        "own with a SnapshotManager. If the ranks only need longer to start, give "
        "--register-timeout-seconds"
    )


def settle_stripes(
    roll: Roll, stored: Sequence[StripeState], scheme: Scheme, sizes: Sizes
) -> tuple[StripeState, ...]:
    """The stripes of this incarnation: those stored in the arenas if there are, else planned anew.

    LayoutMismatchError if the shards no longer fit the stored ones.
    """
    if not stored:
        return new_stripes(roll.rank_places(), scheme, sizes)
    room = {shard: stripe.data_bytes for stripe in stored for shard in stripe.members}
    if room.keys() != roll.layouts.keys():
        raise LayoutMismatchError(
            f"the job's snapshots hold shards {sorted(room)}, the trainers bring "
            f"{sorted(roll.layouts)}: run with the parallel shape of the snapshots, or under "
            "another --job name"
        )
    for shard_id, prepare in roll.layouts.items():
        if prepare.required_bytes > room[shard_id]:
            raise LayoutMismatchError(
                f"shard {shard_id} needs {prepare.required_bytes} bytes, its arena has room for "
                f"{room[shard_id]}: has the model changed? Run with the old flags, or under "
                "another --job name"
            )
    return tuple(stored)


def new_stripes(
    places: Sequence[RankPlace], scheme: Scheme, sizes: Sizes
) -> tuple[StripeState, ...]:
    """Stripes planned for ranks that have no arenas yet; ProtectionError as plan_stripes says."""
    return tuple(
        StripeState(
            p.kind,
            p.data_members,
            p.parity_members,
            p.data_bytes,
            p.members,
            sizes.block_bytes,
            sizes.digest_algorithm,
        )
        for p in plan_stripes(places, scheme, block_bytes=sizes.block_bytes)
    )


async def refuse_trainers(
    coordinator: Coordinator, nodes: Iterable[str], error: MegatronFTError
) -> None:
    """Have the trainers that wait for their arenas on these nodes end with this error."""
    refusal = m.ArenasReady(coordinator.incarnation, type(error).__name__, str(error))
    await coordinator.ask_all({node: refusal for node in nodes})


async def make_arenas(
    coordinator: Coordinator,
    stripes: Sequence[StripeState],
    places: Mapping[str, str],
    lineage: tuple[Ancestor, ...],
    slot_count: int,
) -> None:
    """Have every arena made or checked, then let the waiting trainers go on.

    When a node refuses (too little memory, say) every trainer gets that error, before
    training starts, and it is raised here as well.
    """
    incarnation = coordinator.incarnation
    requests = create_requests(stripes, incarnation, lineage, slot_count)
    by_node: dict[str, list[m.CreateArena]] = {}
    for shard_id, request in requests.items():
        by_node.setdefault(places[shard_id], []).append(request)

    async def make(node: str) -> None:
        for request in by_node[node]:
            await coordinator.links[node].make_arena(request)

    nodes = sorted(by_node)
    try:
        await asyncio.gather(*(make(node) for node in nodes))
    except MegatronFTError as error:
        await refuse_trainers(coordinator, nodes, error)
        raise
    await coordinator.ask_all({node: m.ArenasReady(incarnation) for node in nodes})
