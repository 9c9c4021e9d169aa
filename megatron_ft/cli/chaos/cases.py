"""Cases of `megatron-ft chaos`: victims, faults, all cases that make sense, draws from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_points import FRAMEWORK_OCCASIONS, POINTS, Point

FAULTS = {
    "kill": "SIGKILL; a node loses its memory, too",
    "stop": "SIGSTOP; SIGCONT once the lease has run out",
    "exception": "an exception that nobody expects",
    "delay": "the process stands still for a moment",
    "return": "the node is lost and comes back later with its old arenas",
}
"""Every fault, in a line."""

ITSELF = ("exception", "delay")
"""Faults that a process can only inflict on itself, at its own points."""

_PROCESS = ("kill", "stop", *ITSELF)
VICTIMS = {
    **dict.fromkeys(("trainer", "smp", "encoder", "supervisor", "drain"), _PROCESS),
    "trainers": ("kill",),
    "world": ("kill",),
    "node": ("kill", "return"),
}
"""Everything that can be struck, with its faults."""


@dataclass(frozen=True)
class Case:
    """One fault at one point, with ``losses`` more nodes lost at the same moment.

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
                f"{text!r} is not a case; write <point>:<victim>:<fault>:<losses>, as in "
                "encode.half:encoder:kill:1"
            )
        case = cls(words[0], words[1], words[2], int(words[3]), disk)
        case.check()
        return case

    def check(self) -> None:
        """ConfigError if there is no such point, victim or fault."""
        if self.point not in reachable():
            raise ConfigError(
                f"no chaos job reaches {self.point!r}; `megatron-ft chaos --list` has the points"
            )
        faults = VICTIMS.get(self.victim)
        if faults is None or self.fault not in faults:
            known = ", ".join(VICTIMS) if faults is None else ", ".join(faults)
            raise ConfigError(f"nothing does {self.fault!r} to {self.victim!r}; there are {known}")
        if self.fault in ITSELF and self.victim != self.at.role:
            raise ConfigError(
                f"{self.fault} is what a process does to itself: {self.point} is reached by "
                f"the {self.at.role}"
            )

    def __str__(self) -> str:
        end = "" if self.disk else ":nodisk"
        return f"{self.point}:{self.victim}:{self.fault}:{self.losses}{end}"

    @property
    def at(self) -> Point:
        return POINTS[self.point]

    def nodes_lost(self) -> int:
        """Nodes whose memory is gone once all has struck, what leads to the point included."""
        provoked = self.at.occasion == "node lost"
        return self.losses + provoked + (self.victim == "node")


def reachable() -> dict[str, Point]:
    """The points that a chaos job can reach; its model belongs to no framework."""
    return {n: point for n, point in POINTS.items() if point.occasion not in FRAMEWORK_OCCASIONS}


def all_cases(nodes: int, parity: int) -> list[Case]:
    """Every case that ``nodes`` are enough for, those with fewer further losses first.

    At each point each running process is killed, with no further loss, one, as many as
    parity makes up for, and one too many; and the process at the point raises an exception.
    Every other fault strikes where it hurts.
    """
    found: list[Case] = []
    for point in reachable().values():
        for victim in _living_at(point):
            found += [
                Case(point.name, victim, "kill", n) for n in sorted({0, 1, parity, parity + 1})
            ]
        found.append(Case(point.name, point.role, "exception"))
    found += _other_faults(parity)
    possible = [case for case in dict.fromkeys(found) if case.nodes_lost() <= nodes]
    return sorted(possible, key=lambda case: case.losses)


def _living_at(point: Point) -> tuple[str, ...]:
    living = ["trainer", "smp", "encoder", "supervisor"]
    if point.occasion in ("trainer lost", "node lost"):
        living.remove("trainer")
    if point.occasion in ("trainer lost", "smp lost", "supervisor lost") or (
        point.name == "rebuild.target"
    ):
        living.remove("encoder")
    return tuple(dict.fromkeys((point.role, *living)))


def _other_faults(parity: int) -> Iterator[Case]:
    """Every fault but the death of a single process."""
    for point in (
        *("capture.copied", "smp.protected.stored", "encode.half", "commit.between"),
        *("drain.writing", "restore.half", "rebuild.half", "recovery.adopted"),
    ):
        for fault in ("stop", "delay"):
            yield Case(point, POINTS[point].role, fault)
    for point in ("capture.copied", "encode.half", "commit.between"):
        yield Case(point, "trainers", "kill")
        yield Case(point, "world", "kill")
        for losses in (0, parity - 1, parity):
            yield Case(point, "node", "kill", losses)
        yield Case(point, "node", "return")
    yield Case("rebuild.half", "world", "kill")
    yield Case("rebuild.half", "node", "return")
    yield Case("commit.between", "node", "kill", parity, disk=False)


def draw(seed: int, count: int, nodes: int, parity: int) -> list[Case]:
    """The first ``count`` cases that a seed stands for; the same on every machine."""
    chance = random.Random(f"megatron-ft chaos {seed}")
    known = all_cases(nodes, parity)
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
