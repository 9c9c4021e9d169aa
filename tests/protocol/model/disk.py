"""Steps of drains, loaders, readers and damage; mixed into World."""

from __future__ import annotations

from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint.decide import Decision
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from tests.protocol.model.drain import Checkpoint, Drain, choice, tidied
from tests.protocol.model.incarnation import DRAIN, Incarnation, IncarnationFailed
from tests.protocol.model.judge import Violation
from tests.protocol.model.memory import DAMAGED
from tests.protocol.model.processes import Loader, Reader


class DiskSteps:
    """What touches the disk, or only reads memory."""

    # Readers.

    def _do_pin(self, name: str, snapshot: SnapshotId) -> None:
        node = self.nodes[name]
        self.readers_seen += 1
        number = self.readers_seen
        if isinstance(node.machine.handle(m.Pin(str(number), snapshot, number)), m.Refused):
            return
        self.readers[number] = self._reader(number, name, snapshot)

    def _reader(self, number: int, name: str, snapshot: SnapshotId, shard: str = "") -> Reader:
        """A reader of this snapshot, of one shard or of all."""
        node = self.nodes[name]
        slots = [
            (arena.shard, slot)
            for arena in node.arenas.values()
            for slot in arena.slots
            if slot.header.snapshot == snapshot and shard in ("", arena.shard)
        ]
        assert node.machine is not None
        return Reader(number, name, snapshot, slots, node.pins_hold)

    def _do_read(self, number: int) -> None:
        reader = self.readers[number]
        reader.step()
        if reader.done():
            self._judge_reader(reader)
            self.whole_reads += reader.unchanged()
            self._do_reader_dies(number)

    def _judge_reader(self, reader: Reader) -> None:
        in_force = reader.pinned_by == self.nodes[reader.node].pins_hold
        if in_force and (reader.wrong() or not reader.unchanged()):
            raise Violation(f"rule 8: {reader.snapshot} was reused on {reader.node} while pinned")
        if reader.unchanged() and reader.wrong():
            raise Violation(f"rule 8: a reader took {reader.wrong()} for {reader.snapshot}")

    def _do_reader_dies(self, number: int) -> None:
        reader = self.readers.pop(number)
        machine = self.nodes[reader.node].machine
        if machine is not None:
            machine.reader_gone(str(number))

    # Drains: supervisor/drains.py and checkpoint/drain.py.

    def _do_drain(self) -> None:
        """Begin to drain the newest committed snapshot: clear what is unfinished, and hold."""
        incarnation = self.incarnation
        assert incarnation is not None and self.newest is not None
        snapshot = self.newest
        self.drains_begun += 1
        nodes = tuple(sorted(set(incarnation.places.values())))
        iteration = self.judge.iterations[snapshot]
        incarnation.drain = Drain(
            snapshot, iteration, incarnation.lineage, nodes, waiting=len(nodes)
        )
        for name in nodes:
            if self.nodes[name].up:
                self.send(
                    incarnation, name, m.Hold(incarnation.incarnation, "drain", snapshot), DRAIN
                )
            else:
                incarnation.drain.waiting -= 1
                incarnation.drain.failed = True

    def _do_held(self) -> None:
        """All nodes have answered: start to write, or give up."""
        incarnation = self.incarnation
        assert incarnation is not None and incarnation.drain is not None
        if incarnation.drain.failed or incarnation.drain.waiting:
            self._fail_drain(incarnation)
            return
        # What an older drain has not finished is removed, so it can never be published.
        self.orphans = [one for one in self.orphans if one.stage != "publishing"]
        incarnation.drain.stage = "writing"

    def _do_write(self, shard: str) -> None:
        """One shard's process: open it, or read one part, or look once more and be done."""
        incarnation = self.incarnation
        assert incarnation is not None and incarnation.drain is not None
        drain, node = incarnation.drain, self.nodes[incarnation.places[shard]]
        if shard not in drain.readers:
            drain.readers[shard] = self._reader(0, node.name, drain.snapshot, shard)
            if not drain.readers[shard].slots:
                self._fail_drain(incarnation)
                return
            if not self.shape.coarse:
                return
        reader = drain.readers[shard]
        while not reader.done():
            reader.step()
            if not self.shape.coarse:
                return
        self._judge_reader(reader)
        if reader.unchanged() and reader.whole():
            drain.files[shard] = (drain.snapshot, shard)
            if len(drain.files) == len(self.judge.shards):
                drain.stage = "publishing"
        else:
            self._fail_drain(incarnation)

    def _fail_drain(self, incarnation: Incarnation) -> None:
        assert incarnation.drain is not None
        incarnation.drain.failed = True
        self._release(incarnation)

    def _do_drain_dies(self) -> None:
        assert self.incarnation is not None
        self._fail_drain(self.incarnation)

    def _do_publish(self) -> None:
        incarnation = self.incarnation
        assert incarnation is not None and incarnation.drain is not None
        if incarnation.drain.stage == "publishing":
            self._publish(incarnation.drain)
            self.judge.durable = incarnation.drain.snapshot
            incarnation.drain.stage = "tidying"
        else:
            self._tidy(incarnation.drain)
            self._release(incarnation)

    def _do_orphan(self, index: int) -> None:
        """A drain of a supervisor that is gone: the process that runs continues, none is
        started."""
        drain = self.orphans[index]
        if drain.stage == "publishing":
            self._publish(drain)
            self._after_late_publish(drain)
        else:
            self._tidy(drain)
        if drain.stage != "tidying late":
            self.orphans.pop(index)

    def _after_late_publish(self, drain: Drain) -> None:
        """Nobody is there to start the process that would remove older ones."""

    def _publish(self, drain: Drain) -> None:
        """The manifest."""
        files = tuple(sorted(drain.files.items()))
        found = Checkpoint(drain.snapshot, drain.iteration, drain.lineage, files)
        self.disk = [*(c for c in self.disk if c.snapshot != found.snapshot), found]
        self.judge.on_disk([one.snapshot for one in self.disk])

    def _tidy(self, drain: Drain) -> None:
        """What is superfluous goes."""
        self.disk = tidied(self.disk, drain.lineage)
        drain.stage = "done"
        self.judge.on_disk([one.snapshot for one in self.disk])

    def _release(self, incarnation: Incarnation) -> None:
        drain = incarnation.drain
        assert drain is not None
        drain.stage, drain.waiting = "releasing", 0
        for name in drain.nodes:
            if self.nodes[name].up:
                drain.waiting += 1
                self.send(incarnation, name, m.Unhold(incarnation.incarnation, "drain"), DRAIN)

    def _do_released(self) -> None:
        """All have answered, or never will: their next incarnation voids the pin."""
        assert self.incarnation is not None
        self.incarnation.drain = None

    # Continuing from disk: supervisor/disk_restore.py and checkpoint/load.py.

    def choose_from_disk(self, memory: Decision) -> Checkpoint | None:
        if not self.shape.disk or self.disk_away or not self.judge.registered:
            return None
        return choice(self.disk, len(self.judge.shards), self.judge.noted, memory)

    def check_not_lost(self, memory: Decision) -> None:
        """Nothing serves: that is said, and the job is over."""
        if memory.snapshot is None and self.judge.local_floor is not None:
            there = [one for one in self.disk if one.snapshot in self.judge.valid]
            if there and self.shape.disk and not self.disk_away:
                raise Violation(f"I2: {there} is on the disk, and the job gives up")
            self.over = True
            raise IncarnationFailed

    def start_loaders(self, incarnation: Incarnation) -> None:
        assert incarnation.source is not None and incarnation.decision is not None
        for name in self.active:
            shards = [shard for shard in incarnation.targets if incarnation.places[shard] == name]
            if not shards:
                continue
            if not self.nodes[name].alive:
                raise IncarnationFailed
            loader = Loader(self._pid(), name, world=f"load{incarnation.number}")
            loader.snapshot, loader.iteration = (
                incarnation.source.snapshot,
                incarnation.source.iteration,
            )
            loader.files, loader.left = dict(incarnation.source.files), shards
            loader.arenas = dict(self.nodes[name].arenas)
            hello = m.EncoderHello(loader.pid, loader.world, incarnation.incarnation)
            loader.outbox.append(hello)
            self.processes[loader.pid] = loader
            self._register_at_once(loader)

    def _loaders(self, incarnation: Incarnation) -> list[Loader]:
        found = (p for p in self.processes.values() if isinstance(p, Loader))
        return [p for p in found if p.world == f"load{incarnation.number}"]

    def loaders_ended(self, incarnation: Incarnation) -> bool:
        return not any(loader.alive for loader in self._loaders(incarnation))

    def check_loaded(self, incarnation: Incarnation) -> None:
        """A loader that did not end well fails the incarnation; what it was to bring is not
        there."""
        loaded = sum(loader.stored for loader in self._loaders(incarnation))
        if incarnation.source is not None and loaded != len(incarnation.targets):
            raise IncarnationFailed
        if incarnation.source is not None:
            self.known_bad -= {
                (shard, incarnation.source.snapshot) for shard in incarnation.targets
            }

    def _do_load(self, pid: int) -> None:
        loader = self.processes[pid]
        assert isinstance(loader, Loader)
        loader.step()
        while self.shape.coarse and loader.target is not None and loader.part:
            loader.step()
        self.changed = True

    def _do_disk_away(self) -> None:
        self.disk_away = True

    def _do_disk_back(self) -> None:
        self.disk_away = False

    # Damage.

    def _do_flip(self, name: str, shard: str, index: int) -> None:
        """A block of a committed slot goes bad."""
        self.nodes[name].arenas[shard].slots[index].write_data(0, DAMAGED)
        self.judge.hurt.add(shard)
        self.changed = True

    def committed_slots(self, name: str) -> list[tuple[str, int]]:
        """Slots of a node that hold something committed and undamaged, with parity."""
        return [
            (arena.shard, index)
            for arena in self.nodes[name].arenas.values()
            for index, slot in enumerate(arena.slots)
            if slot.header.state == SlotState.COMMITTED
            and slot.header.parity_valid
            and DAMAGED not in slot.data
        ]
