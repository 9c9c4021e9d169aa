"""Encoders as real processes over MPI and over TCP, with this test as every node's SMP."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import required_bytes, seal
from megatron_ft.arena.format import ArenaHeader, Geometry, SlotHeader, SlotState
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.core.identity import Ancestor
from megatron_ft.erasure.stripes import padded_bytes
from megatron_ft.erasure.worker import ENCODE_RATE, EXIT_SMP_GONE, connect, welcomed
from megatron_ft.rpc import messages as m
from tests.support.erasure_samples import META, SNAPSHOT
from tests.support.erasure_world import BOTH, JOB, World, join, start_world

TIMEOUT = 90.0
WORLD = "w1"
BLOCK = 1024
SLOT = 1
MODULE = ["-m", "megatron_ft.erasure.worker", "--world", WORLD]


class Stripe:
    """Shards with an arena each, on nodes by number; two may be on one node."""

    def __init__(self, index: int, k: int, parity: int, nodes: tuple[int, ...], root: Path) -> None:
        self.k, self.m, self.nodes, self.index = k, parity, nodes, index
        self.shards = tuple(f"s{index}-{number}" for number in range(len(nodes)))
        self.lengths = [5000 + 900 * number for number in range(len(nodes))]
        needed = [required_bytes(length, len(META), BLOCK) for length in self.lengths]
        self.data_bytes = padded_bytes(needed, k, BLOCK)
        homes = zip(nodes, self.shards, strict=True)
        self.paths = [root / f"n{node}" / f"{shard}.arena" for node, shard in homes]
        for number in range(len(nodes)):
            self.create(number)
            self.seal(number)

    def create(self, number: int) -> None:
        """An empty arena, as on a node that has just joined."""
        geometry = Geometry(2, self.data_bytes, self.data_bytes // self.k * self.m, BLOCK)
        header = ArenaHeader(
            job=uuid.UUID(JOB), shard_id=self.shards[number], incarnation=3,
            lineage=(Ancestor(3, None),), codec="rs", data_members=self.k,
            parity_members=self.m, member_index=number, members=self.shards,
            geometry=geometry,
        )  # fmt: skip
        Arena.create(self.paths[number], header, replace=True).close()

    def seal(self, number: int) -> None:
        with Arena.open(self.paths[number]) as arena:
            data = arena.data(SLOT, writable=True)
            length = self.lengths[number]
            data[:length] = np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)
            record = seal(
                data, shard_id=self.shards[number], snapshot=SNAPSHOT, iteration=15,
                tensor_bytes=length, meta=META, layout_hash=b"h" * 32, block_bytes=BLOCK,
            )  # fmt: skip
            header = SlotHeader(SlotState.ENCODING, SNAPSHOT, 15, record=record)
            arena.write_slot(SLOT, header)

    def order(self, node: int, lost: tuple[int, ...] = ()) -> m.StripeOrder:
        local = [number for number, home in enumerate(self.nodes) if home == node]
        return m.StripeOrder(
            index=self.index, kind="rs", data_members=self.k, parity_members=self.m,
            data_bytes=self.data_bytes, block_bytes=BLOCK,
            members=self.shards, world_ranks=self.nodes,
            arenas={self.shards[n]: str(self.paths[n]) for n in local},
            slots={self.shards[n]: SLOT for n in local},
            lost=tuple(self.shards[n] for n in lost),
        )  # fmt: skip

    def store(self, answer: m.Encoded | m.Rebuilt) -> None:
        """What the SMP does with a result."""
        number = self.shards.index(answer.shard_id)
        with Arena.open(self.paths[number]) as arena:
            slot = arena.slot(SLOT)
            record = answer.record if isinstance(answer, m.Rebuilt) else slot.record
            arena.write_slot(
                SLOT,
                replace(
                    slot,
                    state=SlotState.PROTECTED,
                    snapshot=SNAPSHOT,
                    iteration=15,
                    record=record,
                    parity_valid=True,
                    parity_root=answer.parity_root,
                    stripe_table=answer.stripe_table,
                ),  # fmt: skip
            )

    def content(self, number: int) -> tuple[bytes, bytes, bytes]:
        with Arena.open(self.paths[number]) as arena:
            views = (arena.data(SLOT), arena.parity(SLOT), arena.parity_digests(SLOT))
            return views[0].tobytes(), views[1].tobytes(), views[2].tobytes()

    def flip(self, number: int) -> None:
        with Arena.open(self.paths[number]) as arena:
            arena.data(SLOT, writable=True)[1234] ^= 1


class Smp:
    """This test as the SMP of one node."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self.environment = ProcessEnvironment(JOB, folder.name, folder, 3)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(f"ipc://{self.environment.socket}")
        self.environment.socket.chmod(0o600)
        self.peer, self.pid = b"", 0

    def receive(self) -> m.Message:
        assert self.socket.poll(int(TIMEOUT * 1000)), f"{self.environment.node} heard nothing"
        self.peer, frame = self.socket.recv_multipart()
        message = m.decode(frame)
        assert isinstance(message, m.Message)
        return message

    def send(self, message: m.Message) -> None:
        self.socket.send_multipart([self.peer, m.encode(message)])

    def welcome(self) -> None:
        hello = self.receive()
        assert isinstance(hello, m.EncoderHello)
        assert hello.world == WORLD
        self.pid = hello.pid
        self.send(m.EncoderWelcome(JOB, self.environment.node))


class Cluster:
    """Nodes with an SMP and an encoder each, and the world of the encoders."""

    def __init__(self, root: Path, nodes: int, transport: str) -> None:
        self.root, self.transport = root, transport
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        folders = [root / f"n{n}" for n in range(nodes)]
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True)
        self.smps = [Smp(self.context, folder) for folder in folders]
        self.world: World | None = None

    def start(self, **variables: str) -> None:
        environments = [{**smp.environment.variables(), **variables} for smp in self.smps]
        self.world = start_world(self.transport, MODULE, environments, self.root)
        for smp in self.smps:
            smp.welcome()

    def order(
        self,
        kind: type[m.EncodeOrder | m.RebuildOrder],
        stripes: list[Stripe],
        lost: tuple[int, ...] = (),
    ) -> None:
        for node, smp in enumerate(self.smps):
            local = tuple(s.order(node, lost) for s in stripes if node in s.nodes)
            smp.send(kind(SNAPSHOT, WORLD, local))

    def answers(self) -> list[m.Message]:
        """All that the nodes say until each has said that it is done, or that it failed."""
        found: list[m.Message] = []
        for smp in self.smps:
            while not found or not isinstance(found[-1], m.OrderDone | m.OrderFailed):
                found.append(smp.receive())
            found.append(m.Ok())
        return [message for message in found if not isinstance(message, m.Ok)]

    def ended(self) -> int:
        assert self.world is not None
        return join(self.world, TIMEOUT)

    def last_words(self) -> list[m.Message]:
        """What nodes have said before the world ended: of one at least, which is awaited."""
        poller = zmq.Poller()
        for smp in self.smps:
            poller.register(smp.socket, zmq.POLLIN)
        assert poller.poll(int(TIMEOUT * 1000)), "nobody has said anything"
        found: list[m.Message] = []
        for smp in self.smps:
            while smp.socket.poll(0):
                found.append(smp.receive())
        return found

    def close(self) -> None:
        if self.world is not None:
            self.world.kill()
            join(self.world, TIMEOUT)
        self.context.destroy(linger=0)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("c"), 3, transport)
    yield made
    made.close()


def encode_all(cluster: Cluster, stripes: list[Stripe]) -> None:
    cluster.order(m.EncodeOrder, stripes)
    answers = cluster.answers()
    encoded = [a for a in answers if isinstance(a, m.Encoded)]
    assert sorted(a.shard_id for a in encoded) == sorted(s for t in stripes for s in t.shards)
    assert len([a for a in answers if isinstance(a, m.OrderDone)]) == len(cluster.smps)
    for answer in encoded:
        assert answer.bytes_sent > 0 and answer.seconds > 0 and answer.world == WORLD
        stripe = next(t for t in stripes if answer.shard_id in t.shards)
        assert tuple(r.shard_id for r in answer.stripe_table) == stripe.shards
        stripe.store(answer)


@BOTH
def test_a_world_encodes_and_rebuilds(cluster: Cluster) -> None:
    """The second stripe has two members on one node, as after a loss without a spare."""
    stripes = [Stripe(0, 2, 1, (2, 0, 1), cluster.root), Stripe(1, 1, 2, (0, 1, 1), cluster.root)]
    cluster.start()
    encode_all(cluster, stripes)
    before = [[t.content(number) for number in range(3)] for t in stripes]

    for t in stripes:
        t.create(1)
    cluster.order(m.RebuildOrder, stripes, lost=(1,))
    rebuilt = [a for a in cluster.answers() if isinstance(a, m.Rebuilt)]
    assert sorted(a.shard_id for a in rebuilt) == ["s0-1", "s1-1"]
    for t in stripes:
        for answer in rebuilt:
            if answer.shard_id in t.shards:
                assert answer.record == answer.stripe_table[1]
                t.store(answer)
    assert before == [[t.content(number) for number in range(3)] for t in stripes]
    require_data_read_only(cluster, stripes)
    require_idle(cluster)


def require_data_read_only(cluster: Cluster, stripes: list[Stripe]) -> None:
    """Also of what was a rebuild target."""
    paths = {str(path) for t in stripes for path in t.paths}
    geometry = {}
    for path in paths:
        with Arena.open(Path(path)) as arena:
            geometry[path] = arena.geometry
    seen = 0
    for smp in cluster.smps:
        for line in Path(f"/proc/{smp.pid}/maps").read_text().splitlines():
            span, mode, offset, _, _, *name = line.split(maxsplit=5)
            if not name or name[0] not in paths or "w" not in mode:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            first = geometry[name[0]].data_offset(SLOT)
            last = first + geometry[name[0]].data_bytes
            at = int(offset, 16)
            assert at + end - start <= first or at >= last, line
            seen += 1
    assert seen, "no encoder has mapped any parity writable"


def require_idle(cluster: Cluster) -> None:
    """A waiting encoder only waits, so it uses no processor, and it has low priority."""
    encoders = [psutil.Process(smp.pid) for smp in cluster.smps]
    before = [sum(p.cpu_times()[:2]) for p in encoders]
    assert cluster.smps[0].socket.poll(1000) == 0
    after = [sum(p.cpu_times()[:2]) for p in encoders]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 0.2
    assert all(p.nice() >= 10 for p in encoders)
    assert all(p.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE for p in encoders)


@BOTH
def test_encoders_send_as_fast_as_they_may_and_no_faster(cluster: Cluster) -> None:
    """The cap is far below what any machine reaches, so it is also what they come close to."""
    rate = 6000.0
    stripe = Stripe(0, 2, 1, (2, 0, 1), cluster.root)
    cluster.start(**{ENCODE_RATE: str(rate)})
    cluster.order(m.EncodeOrder, [stripe])
    encoded = [a for a in cluster.answers() if isinstance(a, m.Encoded)]
    reached = [a.bytes_sent / a.seconds for a in encoded]
    print("share of the cap:", [value / rate for value in reached])
    assert len(reached) == 3 and max(reached) <= 1.1 * rate, reached
    # A busy machine may delay one of them, by seconds only where nothing runs at all.
    assert max(reached) >= 0.5 * rate, reached


@BOTH
def test_a_damaged_survivor_is_reported_and_ends_the_world(cluster: Cluster) -> None:
    stripe = Stripe(0, 2, 1, (0, 1, 2), cluster.root)
    cluster.start()
    encode_all(cluster, [stripe])
    stripe.create(0)
    stripe.flip(2)
    cluster.order(m.RebuildOrder, [stripe], lost=(0,))
    assert cluster.ended() != 0
    reports = cluster.last_words()
    failed = [r for r in reports if isinstance(r, m.OrderFailed)]
    assert {r.corrupt for r in failed} == {"s0-2"}
    assert all("s0-2, block 1" in r.reason for r in failed)
    assert not any(isinstance(r, m.Rebuilt) for r in reports)


@BOTH
def test_an_order_for_another_snapshot_is_refused(cluster: Cluster) -> None:
    stripe = Stripe(0, 2, 1, (0, 1, 2), cluster.root)
    cluster.start()
    # One alone: whoever fails first ends the others, perhaps before they can say anything.
    wrong = m.EncodeOrder(SNAPSHOT._replace(sequence=99), WORLD, (stripe.order(0),))
    cluster.smps[0].send(wrong)
    assert cluster.ended() != 0
    failed = cluster.smps[0].receive()
    assert isinstance(failed, m.OrderFailed) and not failed.corrupt
    assert "ControlPlaneError" in failed.reason and "3.99" in failed.reason


@BOTH
def test_encoders_leave_when_an_smp_goes_away(cluster: Cluster) -> None:
    cluster.start()
    cluster.smps[1].socket.close()
    assert cluster.ended() == EXIT_SMP_GONE


def test_an_smp_that_does_not_answer_is_named(tmp_path: Path) -> None:
    environment = ProcessEnvironment(JOB, "n7", tmp_path, 1)
    with connect(environment, lambda: None) as smp:
        with pytest.raises(ControlPlaneError, match=r"n7.*0\.1 s.*smp\.sock"):
            welcomed(environment, smp, 0.1)
