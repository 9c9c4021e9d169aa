"""Damage that the scrub found, and its repair from parity during training.

A damaged shard counts as lost until its blocks are repaired, so that a recovery in
between rebuilds it.  Repairs run one at a time and between two snapshots: encoders
have one order at a time, and the slot that is mended must not be given away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.connections import Connections

REPAIR_TIMEOUT_SECONDS = 60.0
MOST_ATTEMPTS = 3

Key = tuple[str, SnapshotId]


class Repairs:
    """Damage by shard and snapshot.  ``found`` and ``repaired`` count blocks over the whole job."""

    def __init__(self, control: Connections) -> None:
        self.found = self.repaired = 0
        self.lost: set[Key] = set()
        """Shards that count as lost for a snapshot: damaged, and not repaired (yet)."""
        self._control = control
        self._open: dict[Key, m.BadBlocks] = {}
        self._attempts: dict[Key, int] = {}
        self._waiting: tuple[m.Repair, asyncio.Future[m.Message]] | None = None

    def on_event(self, event: m.NodeEvent) -> None:
        """Record damage and of what comes back from a repair."""
        body = event.body
        if isinstance(body, m.BadBlocks):
            self._damaged(body)
        elif self._waiting is not None and not self._waiting[1].done():
            if self._ends(body, self._waiting[0]):
                self._waiting[1].set_result(body)

    def begin_incarnation(self) -> None:
        """Another incarnation: what is damaged is rebuilt by its recovery, if it is used at all."""
        self._open.clear()
        self._attempts.clear()
        self._waiting = None

    def count_lost(self, snapshot: SnapshotId, shards: Collection[str]) -> None:
        """Shards of a local snapshot are damaged: no parity can repair them."""
        for shard in sorted(shards):
            if (shard, snapshot) not in self.lost:
                self.lost.add((shard, snapshot))
                text = f"{shard} in snapshot {snapshot} has wrong bytes and no parity"
                text += "; it counts as lost"
                self._control.observers.emit("corrupt", text, shard=shard)

    @property
    def due(self) -> bool:
        """True if there is something to repair and encoders to do it."""
        return bool(self._open) and bool(self._control.usable_world)

    async def work(self, stripes: Sequence[m.StripeOrder], places: Mapping[str, str]) -> None:
        """Repair one damaged shard; ``stripes`` are the orders of all stripes with parity."""
        damage = self._open.pop(next(iter(self._open)))
        stripe = next((s for s in stripes if damage.shard_id in s.members), None)
        reason = "there is no parity"
        if stripe is not None:
            reason = await self._repair(damage, stripe, places)
            self._waiting = None
        if reason:
            text = f"stays damaged: {reason}; it counts as lost, and the next recovery rebuilds it "
            self._emit("not_repaired", damage, f"{text}or takes an older snapshot")

    def _damaged(self, damage: m.BadBlocks) -> None:
        key = damage.shard_id, damage.snapshot
        count = len(damage.data_blocks) + len(damage.parity_blocks) + damage.more
        attempts = self._attempts.get(key, 0)
        under_way = self._waiting is not None and _key(self._waiting[0]) == key
        if key in self._open or under_way or attempts >= MOST_ATTEMPTS:
            return  # the scrub reports it again and again
        self.found += count
        self.lost.add(key)
        self._open[key] = damage
        self._attempts[key] = attempts + 1
        text = f"has {count} blocks that fail their digests; it counts as lost until they are"
        self._emit("corrupt", damage, f"{text} repaired", blocks=count)

    async def _repair(
        self, damage: m.BadBlocks, stripe: m.StripeOrder, places: Mapping[str, str]
    ) -> str:
        """Have it done; why it was not, or nothing."""
        control = self._control
        request = m.Repair(
            control.incarnation,
            damage.snapshot,
            control.usable_world,
            (stripe,),
            damage.shard_id,
            damage.data_blocks,
            damage.parity_blocks,
        )
        answered: asyncio.Future[m.Message] = asyncio.get_running_loop().create_future()
        self._waiting = request, answered
        try:
            await control.ask_all({places[shard]: request for shard in stripe.members})
            answer = await asyncio.wait_for(answered, REPAIR_TIMEOUT_SECONDS)
        except (asyncio.TimeoutError, MegatronFTError) as error:
            reason = str(error) or f"no answer of the encoders in {REPAIR_TIMEOUT_SECONDS:.0f} s"
            # Some of the encoders may wait for the others now.
            if control.usable_world == request.world:
                control.end_world(request.world, f"the repair of {damage.shard_id}: {reason}")
            return reason
        if not isinstance(answer, m.Repaired):
            return getattr(answer, "reason", "an encoder died")
        return self._repaired(damage, answer)

    @staticmethod
    def _ends(body: object, request: m.Repair) -> bool:
        """True if an event is the end of a repair, good or bad.

        A late event of an earlier world is not.
        """
        if isinstance(body, m.Repaired):
            return (body.shard_id, body.snapshot) == _key(request)
        if isinstance(body, m.OrderFailed):
            return (body.snapshot, body.world) == (request.snapshot, request.world)
        encoder = "encoder", request.world
        return isinstance(body, m.WriterGone) and (body.role, body.who) == encoder

    def _repaired(self, damage: m.BadBlocks, answer: m.Repaired) -> str:
        self.repaired += answer.blocks
        if answer.left:
            return f"{answer.left} blocks could not be recomputed from the rest of the stripe"
        if damage.more:
            return f"{answer.blocks} blocks were repaired, and {damage.more} are left to be listed"
        self.lost.discard((damage.shard_id, damage.snapshot))
        text = f"has {answer.blocks} blocks repaired from parity"
        self._emit("repaired", damage, text, blocks=answer.blocks)
        return ""

    def _emit(self, kind: str, damage: m.BadBlocks, text: str, **fields: int) -> None:
        text = f"{damage.shard_id} in snapshot {damage.snapshot} {text}"
        self._control.observers.emit(kind, text, shard=damage.shard_id, **fields)


def _key(request: m.Repair) -> Key:
    return request.shard_id, request.snapshot
