"""A driver that feeds a snapshot cycle with the answers of all nodes."""

from __future__ import annotations

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import Action, CyclePhase, Judge, Send, SnapshotCycle
from megatron_ft.supervisor.orders import stripe_orders
from megatron_ft.supervisor.schedule import Schedule
from tests.protocol.model.memory import record_of

NODES = ("n0", "n1", "n2")


PLACES = {f"dp{i}": node for i, node in enumerate(NODES)}


STRIPE = StripeState("xor", 2, 1, 128, tuple(PLACES), 64)


ORDERS = stripe_orders([STRIPE], PLACES, NODES)


WORLD = "w7"


class Driver:
    """A cycle with the messages of its nodes spelled out."""

    def __init__(self, interval: int = 2, *, parity: bool = True, **given: Judge) -> None:
        orders = ORDERS if parity else ()
        self.cycle = SnapshotCycle(7, PLACES, orders, Schedule(interval), **given)

    def propose(self, progress: int = 10, world: str = WORLD) -> list[Action]:
        return self.cycle.propose(progress, world)

    def seal(self, *shards: str) -> list[Action]:
        bodies = (m.Sealed(record_of(self.cycle.snapshot, s, 12)) for s in shards or PLACES)
        return [a for body in bodies for a in self.cycle.handle(PLACES[body.record.shard_id], body)]

    def encoded(self, *shards: str) -> list[Action]:
        snapshot = self.cycle.snapshot
        return [
            action
            for shard in shards or PLACES
            for action in self.cycle.handle(
                PLACES[shard], m.Encoded(snapshot, WORLD, shard, b"", (), 0, 0.0)
            )
        ]

    def encoders_die(self, *nodes: str) -> list[Action]:
        gone = m.WriterGone("encoder", WORLD, 1)
        return [a for node in nodes or NODES for a in self.cycle.handle(node, gone)]

    def confirm(self, sent: list[Action], *nodes: str) -> list[Action]:
        sends = [a for a in sent if isinstance(a, Send) and (not nodes or a.node in nodes)]
        return [a for s in sends for a in self.cycle.answered(s.node, s.message, m.Ok())]

    def encoding(self) -> Driver:
        self.propose()
        self.seal()
        assert self.cycle.phase == CyclePhase.ENCODING
        return self


def to_all(actions: list[Action], kind: type[m.Message]) -> bool:
    """Whether the actions are one message of ``kind`` to every node, and nothing else."""
    sends = [a for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]
    return len(sends) == len(actions) and sorted(s.node for s in sends) == list(NODES)
