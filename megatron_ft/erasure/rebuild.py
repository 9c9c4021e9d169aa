"""Lost members of a stripe, brought back: data and parity, from any k survivors of each row.

The work goes round: piece by piece and row by row, another survivor gathers k pieces,
solves for the lost ones, and sends them to where they belong.  So each survivor
sends and receives an even share, L N/(N-1) bytes for one lost member, instead of one
that takes k L bytes in through its one network link.  A rebuilt member is checked while it
arrives, so that its memory is not read once more afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import numpy as np

from megatron_ft.arena.digest import digest_block, digest_table, verify_root
from megatron_ft.core.errors import UnrecoverableError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.handshake import agreed_table, introduce
from megatron_ft.erasure.member import (
    CorruptMemberError,
    DataCheck,
    Digests,
    MemberView,
    ParityCheck,
    StripeCode,
    chunk_of,
    parity_digests_of,
    parity_root,
    piece_of,
)
from megatron_ft.erasure.rows import SparePieces
from megatron_ft.erasure.sums import SumCheck
from megatron_ft.erasure.transport import (
    EXCHANGES_IN_FLIGHT,
    Ahead,
    ExchangeWindow,
    Link,
    MessageKind,
    Pending,
    Transport,
    barrier,
    buffer_sets,
)


class RebuildCheck:
    """Digests of a lost member's blocks, each taken where it lies, when its piece had arrived.

    What should be there is known only at the end: the table is in the last blocks of the data.
    """

    def __init__(self, code: StripeCode, member: MemberView) -> None:
        """Nothing has arrived yet; 8 bytes are kept for each block."""
        self._code, self._member = code, member
        self._data: Digests = np.zeros(code.data_members * code.chunk_blocks, np.uint64)
        self._parity: Digests = np.zeros(code.parity_blocks, np.uint64)

    def arrived(self, symbol: int, part: slice) -> None:
        """Take digests of a part that has arrived: of the chunk kept as ``symbol`` of a row."""
        code, member = self._code, self._member
        chunk, in_parity = code.layout.chunk(symbol), code.layout.is_parity(symbol)
        region, digests = (member.parity, self._parity) if in_parity else (member.data, self._data)
        blocks, first = code.blocks(part), chunk * code.chunk_blocks
        found = parity_digests_of(code, chunk_of(code, region, chunk)[part])
        digests[first + blocks.start : first + blocks.stop] = found

    def require(self, record: SealedRecord) -> None:
        """Check all that has arrived against ``record`` and the solvers; CorruptMemberError."""
        wrong = self._wrong_data(record)
        if wrong is not None:
            raise CorruptMemberError(
                record.shard_id, "its rebuilt data does not match the stripe's table", wrong
            )
        parity = np.flatnonzero(self._parity != self._member.parity_digests)
        if parity.size:
            raise CorruptMemberError(
                record.shard_id, "its rebuilt parity is not what was computed", int(parity[0])
            )

    def _wrong_data(self, record: SealedRecord) -> int | None:
        """The first wrong block; the table is read only now."""
        data, size = self._member.data, self._code.block_bytes
        if not verify_root(data, record):
            return 0
        found = self._data[: -(-record.digest_offset // size)].copy()
        if record.digest_offset % size:  # the last block is shared with the table
            last = data[record.digest_offset // size * size : record.digest_offset]
            found[-1] = digest_block(last)
        bad = np.flatnonzero(found != digest_table(data, record))
        return int(bad[0]) if bad.size else None


_Checks = tuple[DataCheck, ParityCheck]


@dataclass(frozen=True)
class RebuildResult:
    """Values that a member stores after a rebuild; a survivor's are unchanged."""

    record: SealedRecord
    parity_root: bytes
    stripe_table: tuple[SealedRecord, ...]


def rebuild(
    code: StripeCode,
    member: MemberView,
    transport: Transport,
    peers: Sequence[int],
    lost: Collection[int],
    *,
    index: int | None = None,
) -> RebuildResult:
    """Recompute data, parity and parity digests of the ``lost`` members, by member number.

    All members call this together, lost ones with writable data.  Survivors' blocks are
    checked before use; a wrong one raises CorruptMemberError that names its shard,
    which then counts as lost: call again with it among ``lost``.  A lost member's data
    is checked in full against the stripe's table, block by block as it arrives, before this
    returns on any member.
    UnrecoverableError if more than m members are lost, before any byte moves.
    """
    member.require_fit(code)
    task = _Task(code, tuple(sorted(set(lost))))
    link = Link(transport, peers, index)
    introductions = introduce(link, member, frozenset(task.lost))
    table = agreed_table(introductions, code.members)
    # Lost members make the checks too, so that a bad table raises on every member alike.
    checks = {n: (i.data_check(code), i.parity_check(code)) for n, i in introductions.items()}
    if link.member in task.lost:
        arriving = RebuildCheck(code, member)
        _Receiver(link, task, member, arriving).run()
        arriving.require(table[link.member])
    else:
        with SparePieces(code, code.small_piece_bytes) as spare:
            _Survivor(link, task, member, checks, spare).run()
    barrier(link)
    return RebuildResult(table[link.member], parity_root(member.parity_digests), table)


@dataclass(frozen=True)
class _Unit:
    """One piece of one row: ``sources`` are k survivors, the first of which solves it."""

    row: int
    part: slice
    sources: tuple[int, ...]


@dataclass(frozen=True)
class _Task:
    """Schedule of solvers and units; every member computes the same one by itself."""

    code: StripeCode
    lost: tuple[int, ...]

    def __post_init__(self) -> None:
        members, parity = self.code.members, self.code.parity_members
        if not all(0 <= number < members for number in self.lost):
            raise ValueError(f"lost members {self.lost} of a stripe of {members}")
        if len(self.lost) > parity:
            raise UnrecoverableError(
                f"{len(self.lost)} of {members} members of a stripe are lost, its parity makes up "
                f"for {parity}; an older snapshot or a checkpoint must serve"
            )

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        return tuple(n for n in range(self.code.members) if n not in self.lost)

    @cached_property
    def parts(self) -> tuple[slice, ...]:
        return tuple(self.code.pieces(self.code.small_piece_bytes))

    @property
    def rounds(self) -> int:
        """Number of rounds; in each, every survivor solves one unit (in the last, maybe none)."""
        units = len(self.parts) * self.code.members if self.lost else 0
        return -(-units // len(self.survivors))

    def unit(self, round_number: int, solver: int) -> _Unit | None:
        """The unit that the solver, counted among survivors, has in a round."""
        count = len(self.survivors)
        piece, row = divmod(round_number * count + solver % count, self.code.members)
        if piece >= len(self.parts):
            return None
        rotated = [self.survivors[(solver + s) % count] for s in range(self.code.data_members)]
        return _Unit(row, self.parts[piece], tuple(rotated))


class _Survivor:
    """Solves one unit a round, and gives k-1 pieces to the other solvers."""

    def __init__(
        self,
        link: Link,
        task: _Task,
        member: MemberView,
        checks: Mapping[int, _Checks],
        spare: SparePieces,
    ) -> None:
        self._link, self._task, self._member = link, task, member
        self._code, self._window = task.code, ExchangeWindow(link)
        self._codec, self._sums = task.code.codec(), SumCheck.of(task.code, spare)
        self._own_place = task.survivors.index(link.member)
        self._last_step = max(1, self._code.data_members - 1)
        self._checks = checks
        self._gathered = spare.sets(buffer_sets(self._last_step), self._code.data_members)
        turns = product(range(task.rounds), range(1, self._last_step + 1))
        self._given = Ahead(partial(self._give, *turn) for turn in turns)
        self._solved = spare.sets(2, 0 if self._code.copies_only else len(task.lost))
        self._copies: list[list[Bytes]] = [[], []]

    def run(self) -> None:
        """Solve all rounds; results go out once some of the next round's transfers run."""
        first = min(EXCHANGES_IN_FLIGHT - 1, self._last_step)
        for number in range(self._task.rounds):
            self._gather(number, range(1, first + 1))
            if number == self._task.rounds // 2:
                reach("rebuild.half")
            self._window.settle(first)
            if number:
                self._give_back(number - 1)
            self._gather(number, range(first + 1, self._last_step + 1))
        self._window.drain()
        if self._task.rounds:
            self._give_back(self._task.rounds - 1)
        self._window.drain()
        self._link.wait(self._given.rest())

    def _gather(self, number: int, steps: range) -> None:
        for step in steps:
            self._window.post(
                partial(self._swap, number, step), partial(self._arrived, number, step)
            )

    def _swap(self, number: int, step: int) -> list[Pending]:
        """Receive our unit's source number ``step``."""
        mine = self._task.unit(number, self._own_place)
        started = list(self._given.due())
        if mine is not None and step < self._code.data_members:
            buffer = _cut(self._set(number)[step], mine.part)
            started.append(self._link.receive(buffer, mine.sources[step], MessageKind.SOURCE))
        return started

    def _give(self, number: int, step: int) -> Sequence[Pending]:
        """Be source number ``step`` of another solver's unit."""
        other = self._task.unit(number, self._own_place - step)
        if other is None or step >= self._code.data_members:
            return ()  # of whole copies a solver has its only source itself
        piece = self._own_piece(other)
        return [self._link.send(piece, other.sources[0], MessageKind.SOURCE)]

    def _own_piece(self, unit: _Unit) -> Bytes:
        return piece_of(self._code, self._member, self._link.member, unit.row, unit.part)

    def _set(self, number: int) -> list[Bytes]:
        return self._gathered[number % len(self._gathered)]

    def _arrived(self, number: int, step: int) -> None:
        if step == self._last_step:
            self._solve(number)

    def _solve(self, number: int) -> None:
        unit = self._task.unit(number, self._own_place)
        if unit is None:
            return
        pieces = self._sources(number, unit)
        if self._code.copies_only:
            self._copies[number % 2] = pieces * len(self._task.lost)
        else:
            symbols = [self._code.layout.symbol(unit.row, n) for n in unit.sources]
            wanted = [self._code.layout.symbol(unit.row, n) for n in self._task.lost]
            outputs = self._outputs(number, unit)
            if self._sums is None:
                self._codec.kernel(wanted, symbols)(pieces, outputs)
            else:
                checks = [self._check_of(source, unit) for source in unit.sources]
                self._sums.compute(wanted, symbols, pieces, outputs, checks)

    def _sources(self, number: int, unit: _Unit) -> list[Bytes]:
        """The k pieces of a unit, with zeros for padding; the first one is our own.

        Checked here unless their sum will be.
        """
        buffers = [_cut(buffer, unit.part) for buffer in self._set(number)]
        arrived = [self._own_piece(unit), *buffers[1:]]
        return [
            self._checked(source, unit, piece, buffer)
            for source, piece, buffer in zip(unit.sources, arrived, buffers, strict=True)
        ]

    def _checked(self, source: int, unit: _Unit, piece: Bytes, buffer: Bytes) -> Bytes:
        check, offset = self._check_of(source, unit)
        if self._sums is None:
            check.require(offset, piece)
        return check.coded(offset, piece, buffer) if isinstance(check, DataCheck) else piece

    def _check_of(self, source: int, unit: _Unit) -> tuple[DataCheck | ParityCheck, int]:
        """The check of a survivor's piece, and the offset of the piece in what it checks."""
        layout = self._code.layout
        symbol = layout.symbol(unit.row, source)
        data_check, parity_check = self._checks[source]
        offset = layout.chunk(symbol) * self._code.chunk_bytes + unit.part.start
        return (parity_check if layout.is_parity(symbol) else data_check), offset

    def _outputs(self, number: int, unit: _Unit) -> list[Bytes]:
        """Buffers for a solved unit, one for each lost member; a whole copy is our own piece."""
        if self._code.copies_only:
            return self._copies[number % 2]
        return [_cut(buffer, unit.part) for buffer in self._solved[number % 2]]

    def _give_back(self, number: int) -> None:
        unit = self._task.unit(number, self._own_place)
        if unit is None:
            return
        for output, target in zip(self._outputs(number, unit), self._task.lost, strict=True):
            self._window.post(partial(self._send_result, unit, output, target))

    def _send_result(self, unit: _Unit, output: Bytes, target: int) -> list[Pending]:
        started = [self._link.send(output, target, MessageKind.RESULT)]
        if self._code.layout.is_parity(self._code.layout.symbol(unit.row, target)):
            digests = parity_digests_of(self._code, output).view(np.uint8)
            started.append(self._link.send(digests, target, MessageKind.DIGEST))
        return started


class _Receiver:
    """Takes the pieces of a lost member in the order in which survivors solve them."""

    def __init__(self, link: Link, task: _Task, member: MemberView, arriving: RebuildCheck) -> None:
        self._link, self._task, self._member, self._arriving = link, task, member, arriving
        self._code, self._window = task.code, ExchangeWindow(link)

    def run(self) -> None:
        for number in range(self._task.rounds):
            for solver in range(len(self._task.survivors)):
                unit = self._task.unit(number, solver)
                if unit is not None:
                    symbol = self._code.layout.symbol(unit.row, self._link.member)
                    self._window.post(
                        partial(self._receive, unit, symbol),
                        partial(self._arriving.arrived, symbol, unit.part),
                    )
        self._window.drain()

    def _receive(self, unit: _Unit, symbol: int) -> list[Pending]:
        code, source = self._code, unit.sources[0]
        home = piece_of(code, self._member, self._link.member, unit.row, unit.part)
        started = [self._link.receive(home, source, MessageKind.RESULT)]
        if code.layout.is_parity(symbol):
            first = code.layout.chunk(symbol) * code.chunk_blocks
            blocks = code.blocks(unit.part)
            digests = self._member.parity_digests[first + blocks.start : first + blocks.stop]
            started.append(self._link.receive(digests.view(np.uint8), source, MessageKind.DIGEST))
        return started


def _cut(buffer: Bytes, part: slice) -> Bytes:
    return buffer[: part.stop - part.start]
