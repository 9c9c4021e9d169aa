"""Cases of `megatron-ft chaos`: all faults, the cases that make sense, draws from a seed.  Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_points import NO_SPARE, POINTS, Point

ITSELF = ("exception", "delay", "clock")
"""Faults that a process can only inflict on itself, at its own points."""

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP; SIGCONT once the lease has run out",
    "exception": "an exception that nobody expects",
    "delay": "the process stands still for a moment",
    "clock": "the time of day jumps ahead by an hour in the process",
    "return": "the node is lost and comes back later with its old arenas",
    "flip-data": "a bit of the newest committed data flips",
    "flip-parity": "a bit of its parity flips",
    "flip-digest": "a bit of its digest table flips",
    "flip-header": "a bit of one copy of its header flips",
    "arena-header": "both copies of the arena's header are overwritten",
    "slot-header": "both copies of the newest slot's header are overwritten",
    "magic": "a bit of the arena's magic flips",
    "truncate": "the arena is cut in half",
    "extend": "the arena's file is extended by a page",
    "mode": "the arena's file is opened to others",
    "folder": "a folder takes the place of the arena",
    "link": "a symbolic link takes the place of the arena",
    "missing": "the arena's file is removed",
    "full": "no room is left",
    "slow": "every write takes long",
    "cut": "the node's network is cut off, and healed later",
    "latency": "packets to and from the node take long, for a while",
}
"""Every fault, in a line."""

_PROCESS = ("kill", "stop", *ITSELF)
VICTIMS = {
    "trainer": _PROCESS,
    "smp": _PROCESS,
    "encoder": _PROCESS,
    "supervisor": _PROCESS,
    "drain": _PROCESS,
    "trainers": ("kill",),
    "world": ("kill",),
    "node": ("kill", "return"),
    "arena": (
        *("flip-data", "flip-parity", "flip-digest", "flip-header", "arena-header"),
        *("slot-header", "magic", "truncate", "extend", "mode", "folder", "link", "missing"),
    ),
    "memory": ("full",),
    "disk": ("full", "slow"),
    "network": ("cut", "latency"),
}
"""Everything that can be struck, with its faults."""


@dataclass(frozen=True)
class Case:
    """One fault at one point, with so many more nodes lost at the same moment.

    ``disk`` says whether the job drains; without it, what memory cannot serve is refused.
    """

    point: str
    victim: str
    fault: str
    losses: int = 0
    disk: bool = True

    @classmethod
    def parse(cls, text: str) -> Case:
        """``<point>:<victim>:<fault>:<losses>[:nodisk]``; ConfigError says what is wrong."""
        words = text.split(":")
        disk = words[4:] != ["nodisk"]
        if not 4 <= len(words) <= 5 or (disk and words[4:]) or not words[3].isdecimal():
            raise ConfigError(
                f"{text!r} is no case; write <point>:<victim>:<fault>:<losses>, as in "
                "encode.half:encoder:kill:1"
            )
        case = cls(words[0], words[1], words[2], int(words[3]), disk)
        case.check()
        return case

    def check(self) -> None:
        """ConfigError if there is no such point, victim or fault."""
        if self.point not in POINTS:
            raise ConfigError(f"no point {self.point!r}; `megatron-ft chaos --list` has them")
        if self.point not in tabled():
            raise ConfigError(
                f"no chaos job reaches {self.point}: its model belongs to no framework, so it "
                "cannot shrink to fewer nodes; --list names the points, choose another"
            )
        faults = VICTIMS.get(self.victim)
        if faults is None or self.fault not in faults:
            known = ", ".join(VICTIMS) if faults is None else ", ".join(faults)
            raise ConfigError(f"nothing does {self.fault!r} to {self.victim!r}; there are {known}")
        if self.fault in ITSELF and self.victim != POINTS[self.point].role:
            raise ConfigError(
                f"{self.fault} is what a process does to itself: {self.point} is reached by "
                f"the {POINTS[self.point].role}"
            )

    def __str__(self) -> str:
        """The text that ``parse`` takes."""
        end = "" if self.disk else ":nodisk"
        return f"{self.point}:{self.victim}:{self.fault}:{self.losses}{end}"

    @property
    def at(self) -> Point:
        """The point."""
        return POINTS[self.point]

    def nodes_lost(self) -> int:
        """Nodes whose memory is gone once all has struck, what leads to the point included."""
        provoked = self.at.occasion == "node lost"
        return self.losses + provoked + (self.victim == "node")

    def possible(self, nodes: int) -> bool:
        """True if ``nodes`` are enough for the losses of this case."""
        return self.nodes_lost() <= nodes


def tabled() -> dict[str, Point]:
    """The points that the table's job can reach; it belongs to no framework and cannot shrink."""
    return {name: point for name, point in POINTS.items() if point.occasion != NO_SPARE}


def processes_at(point: Point) -> tuple[str, ...]:
    """Roles of the processes that live when a point is reached."""
    living = ["trainer", "smp", "encoder", "supervisor"]
    if point.occasion in ("trainer lost", "node lost"):
        living.remove("trainer")
    if (
        point.occasion in ("trainer lost", "smp lost", "supervisor lost")
        or point.name == "rebuild.target"
    ):
        living.remove("encoder")
    return tuple(dict.fromkeys((point.role, *living)))


def losses_of(parity: int) -> list[int]:
    """Numbers of further losses: none, one, as many as parity makes up for, one too many."""
    return sorted({0, 1, parity, parity + 1})


def table(
    nodes: int, parity: int, *, every_process: bool = False, pairs: bool = False
) -> list[Case]:
    """The cases of the table.

    At each point the process that reaches it is killed, or, with ``every_process``, each of
    those that live then; with each number of further losses, none first.  With ``pairs`` each
    of those processes is killed, and each number of losses strikes, but not all of both together.
    An exception strikes at every point as well, every other fault at one point at least.
    """
    cases: list[Case] = []
    for number, point in enumerate(tabled().values()):
        victims = processes_at(point) if every_process or pairs else (point.role,)
        kills = [[Case(point.name, v, "kill", n) for n in losses_of(parity)] for v in victims]
        rows = [[case for case in row if case.possible(nodes)] for row in kills]
        cases += _in_pairs(rows, number) if pairs else itertools.chain(*rows)
        cases.append(Case(point.name, point.role, "exception"))
    cases += list(other_faults(parity))
    possible = [case for case in dict.fromkeys(cases) if case.possible(nodes)]
    return sorted(possible, key=lambda case: case.losses)


def _in_pairs(rows: Sequence[Sequence[Case]], number: int) -> Iterator[Case]:
    """One case at least of every row and of every column of a point; rows have one length.

    ``number`` turns them, so that over the points each process meets each number of losses.
    """
    columns = len(rows[0])
    for turn in range(max(len(rows), columns)):
        yield rows[turn % len(rows)][(turn + number) % columns]


def other_faults(parity: int) -> Iterator[Case]:
    """Every fault but the death of a single process, where it hurts."""
    for point, role in (
        ("capture.copied", "trainer"),
        ("smp.protected.stored", "smp"),
        ("encode.half", "encoder"),
        ("commit.between", "supervisor"),
        ("drain.writing", "drain"),
        ("restore.half", "trainer"),
        ("rebuild.half", "encoder"),
        ("recovery.adopted", "supervisor"),
    ):
        for fault in ("stop", "delay", "clock"):
            yield Case(point, role, fault)
    for fault in VICTIMS["arena"]:
        for losses in (0, parity):
            yield Case("commit.last", "arena", fault, losses)
    for point in ("capture.copied", "encode.half", "commit.between"):
        yield Case(point, "trainers", "kill")
        yield Case(point, "world", "kill")
        for losses in (0, parity - 1, parity):
            yield Case(point, "node", "kill", losses)
        yield Case(point, "node", "return")
    yield Case("rebuild.half", "world", "kill")
    yield Case("rebuild.half", "node", "return")
    yield Case("commit.last", "memory", "full")
    yield Case("commit.last", "disk", "full")
    yield Case("commit.last", "disk", "slow")
    yield Case("commit.between", "network", "cut")
    for point in ("encode.half", "commit.between"):
        yield Case(point, "network", "latency")
    yield Case("commit.between", "node", "kill", parity, disk=False)


def draw(seed: int, count: int, nodes: int, parity: int) -> list[Case]:
    """The first ``count`` cases that a seed stands for; the same on every machine."""
    chance = random.Random(f"megatron-ft chaos {seed}")
    known = table(nodes, parity, every_process=True)
    return [chance.choice(known) for _ in range(count)]


@dataclass(frozen=True)
class Chance:
    """Details that a case leaves to a seed: positions of nodes, and the arrival that counts."""

    position: int
    nth: int
    order: tuple[int, ...]

    @classmethod
    def of(cls, case: Case, seed: int, nodes: int) -> Chance:
        """The same for the same case and seed on every machine."""
        chance = random.Random(f"{case} {seed}")
        order = tuple(chance.sample(range(nodes), nodes))
        steady = case.at.occasion == "training"
        return cls(chance.randrange(nodes), chance.randint(1, 3) if steady else 1, order)
