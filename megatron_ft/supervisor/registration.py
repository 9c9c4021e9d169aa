"""Registration of the ranks of one incarnation, and the stripes that their shards form.

Every rank says hello with its place in the job and brings a layout.  The stripes are those that
arenas store already, if something is restored, or planned anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.environment import STARTS
from megatron_ft.core.errors import (
    ConfigError,
    LayoutMismatchError,
    MegatronFTError,
    RegistrationError,
)
from megatron_ft.core.identity import RankRule, ShardPlacement
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, RankPlace, domain_of, plan_stripes
from megatron_ft.rpc import messages as m

OTHER_SHAPE = (
    "Run with the shape of the snapshots; or write a checkpoint of the framework, `megatron-ft "
    "export --to DIR`, and start a job of another --job name with --load DIR"
)
"""Advice to a user whose command has another parallel shape than the job's snapshots."""


LATE = 0.2
"""Share of the time to register behind which ranks that have not are named; they may train."""


@dataclass
class Registration:
    """Ranks that have said hello, and those that have brought a layout, in this incarnation.

    ``unfit`` is the last word of a rank that cannot use its snapshot with this command; ``late``
    is what was said of ranks that are late, while they are.  ``refused`` as of ``refuse``.
    """

    world_size: int
    domains: Domains = field(default_factory=dict)
    hellos: dict[str, tuple[str, m.Hello]] = field(init=False, default_factory=dict)
    layouts: dict[str, m.Prepare] = field(init=False, default_factory=dict)
    complete: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    unfit: m.Unfit | None = field(init=False, default=None)
    late: str = field(init=False, default="")
    refused: MegatronFTError | None = field(init=False, default=None)

    def on_event(self, event: m.NodeEvent) -> None:
        if isinstance(event.body, m.Hello):
            self.hellos[event.body.shard_id] = (event.node, event.body)
        elif isinstance(event.body, m.Prepare):
            self.layouts[event.body.shard_id] = event.body
        elif isinstance(event.body, m.Unfit):
            self.unfit = event.body
        if len(self.layouts) == self.world_size and self.layouts.keys() <= self.hellos.keys():
            self.complete.set()
            self.late = ""

    def refuse(self, error: MegatronFTError) -> None:
        """This incarnation cannot train: its trainers end with this error."""
        self.refused = error

    async def wait(self, timeout: float, warn: Callable[[str], None]) -> None:
        """Wait until every rank has registered; RegistrationError names those that have not.

        Those that are ``late`` are named once before: they may train without any protection.
        """
        try:
            await asyncio.wait_for(self.complete.wait(), LATE * timeout)
            return
        except asyncio.TimeoutError:
            self.late = self._describe_late(LATE * timeout, timeout)
            warn(self.late)
        try:
            await asyncio.wait_for(self.complete.wait(), (1.0 - LATE) * timeout)
        except asyncio.TimeoutError as error:
            text = self._describe_missing(timeout)
            raise RegistrationError(text, not self.hellos) from error

    def check_fit(self) -> None:
        """The rank's error if it is unfit: the same command would fail in the same way."""
        if self.unfit is not None:
            raise self.unfit.error

    def missing_ranks(self) -> list[int]:
        there = {self.hellos[s][1].rank for s in self.layouts if s in self.hellos}
        return sorted(set(range(self.world_size)) - there)

    def places(self) -> dict[str, str]:
        return {shard_id: node for shard_id, (node, _) in self.hellos.items()}

    def starts(self) -> dict[str, list[int]]:
        """Numbers of ranks by the way in which they came up, one of STARTS."""
        ranks = {k: sorted(h.rank for _, h in self.hellos.values() if h.start == k) for k in STARTS}
        return {kind: numbers for kind, numbers in ranks.items() if numbers}

    def cold(self) -> dict[str, list[int]]:
        """Reasons for which ranks have started cold that were to start warm, to these ranks."""
        found: dict[str, list[int]] = {}
        for _, hello in self.hellos.values():
            if hello.start == "cold" and hello.why_cold:
                found.setdefault(hello.why_cold, []).append(hello.rank)
        return found

    def placements(self) -> dict[str, ShardPlacement]:
        """Placement of each shard, for a later incarnation that has nothing but a disk."""
        return {
            shard: ShardPlacement(hello.rank, hello.coordinates, self.layouts[shard].required_bytes)
            for shard, (_, hello) in self.hellos.items()
        }

    @property
    def interval(self) -> int:
        """Iterations between snapshots, as configured, 0 for auto; the ranks must agree."""
        intervals = {prepare.interval for prepare in self.layouts.values()}
        if len(intervals) != 1:
            raise ConfigError(f"ranks have different snapshot intervals: {sorted(intervals)}")
        return intervals.pop()

    def rank_rule(self, needed: bool) -> RankRule | None:
        """Numbers of ranks that the command could continue with, as all say; None if no others.

        ConfigError if it is ``needed`` and there is none, or they differ.
        """
        rules = {prepare.rank_rule for prepare in self.layouts.values()}
        rule = rules.pop() if len(rules) == 1 else None
        if needed and rule is None:
            raise ConfigError(
                "this program does not say with how many ranks it could continue. A snapshot of "
                "another layout and --on-no-spare shrink need that. Megatron-LM says it under "
                '--inmem-snapshot, DeepSpeed with "train_batch_size" in its JSON and at most one '
                'of "train_micro_batch_size_per_gpu" and "gradient_accumulation_steps", a loop '
                "of your own with SnapshotManager(rank_rule=...). Or run with as many ranks as "
                "before, with spares, and --on-no-spare stop (under Slurm, hold)"
            )
        return rule

    def other_layout(self, stored: Sequence[StripeState]) -> bool:
        """True if ranks have other shards than the ``stored`` stripes, or the same in another
        layout."""
        known = {shard for stripe in stored for shard in stripe.members}
        unfit = self.unfit is not None and type(self.unfit.error) is LayoutMismatchError
        return bool(stored) and (unfit or bool(self.hellos.keys() - known))

    def stripes(
        self, stored: Sequence[StripeState], scheme: Scheme, block_bytes: int
    ) -> tuple[StripeState, ...]:
        """The stripes of this incarnation: the ``stored`` ones if there are, else planned anew.

        A shard may have outgrown its arena since: then a larger one is made while it trains.
        LayoutMismatchError if the shards are not the stored ones.
        """
        if not stored:
            return new_stripes(self._rank_places(), scheme, block_bytes)
        known = {shard for stripe in stored for shard in stripe.members}
        if known != self.layouts.keys():
            raise LayoutMismatchError(
                f"the job's snapshots hold shards {sorted(known)}, the trainers bring "
                f"{sorted(self.layouts)}: another parallel shape. {OTHER_SHAPE}"
            )
        return tuple(stored)

    def _rank_places(self) -> list[RankPlace]:
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

    def _describe_late(self, seconds: float, timeout: float) -> str:
        missing = self.missing_ranks()
        who = "no rank" if len(missing) == self.world_size else f"ranks {missing} of the job"
        have = "has" if len(missing) == self.world_size else "have not"
        greeted = sorted({hello.rank for _, hello in self.hellos.values()} & set(missing))
        more = f" (ranks {greeted} are connected and have not saved yet)" if greeted else ""
        return (
            f"nothing is protected: {seconds:.0f} s after the start {who} {have} registered{more}. "
            f"They still start or compile, or they train without snapshots. {_WAYS} "
            f"Without them the job ends after {timeout:.0f} s"
        )

    def _describe_missing(self, timeout: float) -> str:
        text = f"ranks {self.missing_ranks()} have not registered within {timeout:.0f} s"
        if not self.hellos:
            text = (
                f"no rank has registered within {timeout:.0f} s; does the command take snapshots? "
            )
            text += _WAYS.removesuffix(".")
        return f"{text}. If they only need longer to start, give --register-timeout-seconds"


_WAYS = (
    'Megatron registers with --inmem-snapshot, DeepSpeed with "inmem_snapshot" in its JSON, '
    "transformers.Trainer and Accelerate through DeepSpeed or InMemoryState, a loop of your own "
    "with a SnapshotManager that saves."
)


def new_stripes(
    places: Sequence[RankPlace], scheme: Scheme, block_bytes: int
) -> tuple[StripeState, ...]:
    """Stripes planned for ranks that have no arenas yet; ProtectionError as plan_stripes says."""
    return tuple(
        StripeState(
            p.kind,
            p.data_members,
            p.parity_members,
            p.data_bytes,
            p.members,
            block_bytes,
        )
        for p in plan_stripes(places, scheme, block_bytes=block_bytes)
    )
