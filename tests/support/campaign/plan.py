"""The random campaign as a pure function of its seed: its jobs, and the faults of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ft.core.scheme import Scheme
from tests.support import damage

SCHEMES = ("xor:2", "xor:4", "rs:3+1", "rs:2+2", "replica:2")
TRANSPORTS = ("mpi", "tcp")
FAULTS_PER_JOB = 16

KILLS = {
    "kill-trainer": "a trainer is killed",
    "kill-trainers": "all trainers are killed",
    "kill-smp": "the SMP of a node is killed",
    "kill-smps": "all SMPs are killed",
    "kill-smp-at-start": "trainers are killed, and an SMP while the next ones start",
    "kill-encoder": "an encoder is killed",
    "kill-world": "the encoder world is killed with its launcher",
    "kill-supervisor": "the supervisor is killed; the command is run again",
    "kill-drain": "the process that drains is killed, if one runs just then",
}
SUSPENSIONS = {
    "stop-trainer": "a trainer is suspended for a while",
    "stop-smp": "the SMP of a node is suspended for a while",
    "stop-encoder": "an encoder is suspended for a while",
    "stop-supervisor": "the supervisor is suspended for a while",
}
NODES = {
    "lose-nodes": "nodes are lost with their memory, as many as parity makes up for",
    "lose-too-many": "one node more is lost than parity makes up for",
}
FILES = {
    "remove-socket": "the socket of an SMP is removed",
    "remove-node-folder": "the folder of a node is removed",
    "remove-state": "the state folder of the job is removed",
    "damage-writers": "writers.json of a node is damaged, and its SMP killed",
    "damage-node-file": "node.json of a node is damaged, and its SMP killed",
}
EXITS = {
    "exit-early": "training stops itself before its planned end; the command is run again",
    "exit-unknown": "the same, and training does not say whether its plan is done",
}
DISKS = {
    "cut-drain": "the next drain is killed half way",
    "cut-last-drain": "training stops itself, and the drain of what memory holds is killed",
    "hang-disk": "the drains' file system is frozen, and trainers are killed",
}
SCHEDULER_AWAY = "scheduler-away"
ENCODERS_AWAY = "encoders-away"
RETURN_NODE, PAUSE, KILL_HOST, HIDE_HOST = "return-node", "pause", "kill-host", "hide-host"
SOAK = (
    *("kill-trainer", "kill-smp", "kill-encoder", "lose-nodes", "arena-flip-data"),
    *(RETURN_NODE, PAUSE),
)
"""Faults among which the processes of a soak must not grow."""
RESTARTS = (*("kill-trainer",) * 3, "kill-trainers", KILL_HOST, HIDE_HOST, "lose-nodes")
"""Faults of restarts in a row, by how often they come.  Survivors restart in process, those that
were killed warm, behind a host that cannot be reached cold."""
DAMAGE = tuple(f"arena-{fault}" for fault in (*damage.FAULTS, "stale"))

WEIGHTS: Mapping[str, float] = {
    **dict.fromkeys(KILLS, 3.0),
    **dict.fromkeys(SUSPENSIONS, 1.0),
    "lose-nodes": 6.0,
    "lose-too-many": 1.0,
    **dict.fromkeys(FILES, 1.0),
    **dict.fromkeys(DAMAGE, 1.0),
    "arena-padding": 3.0,
    **dict.fromkeys(EXITS, 2.0),
    **dict.fromkeys(DISKS, 3.0),
    SCHEDULER_AWAY: 4.0,
    ENCODERS_AWAY: 4.0,
}
"""Every kind of random fault, and how often it is drawn in relation to the others."""

OF_DRAINS = {"kill-drain", *DISKS}
"""Kinds that only jobs with drains suffer."""

THEN = ("trainers", "node", "supervisor", "nothing")
"""Events that make damage show: trainers start anew, another node is lost, or the supervisor is."""


@dataclass(frozen=True)
class DrawnFault:
    """One fault: ``wait`` seconds after the job has settled, or after the fault before it.

    ``position`` draws the node, ``seconds`` is how long a suspension or an absence lasts,
    ``then`` what follows on damage, ``seed`` draws the rest.
    """

    kind: str
    wait: float
    position: int
    seconds: float
    then: str
    seed: int


@dataclass(frozen=True)
class Episode:
    """One fault, or two of which the second strikes while the job recovers from the first."""

    first: DrawnFault
    second: DrawnFault | None = None

    @property
    def kind(self) -> str:
        """The row of the table that the episode counts in."""
        return f"{self.second.kind}, in a recovery" if self.second else self.first.kind

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.first.kind, *([self.second.kind] if self.second else []))

    @property
    def faults(self) -> int:
        return (self.first.kind != START_KIND) + (self.second is not None)


START_KIND = "start of a job"
START = Episode(DrawnFault(START_KIND, 0.0, 0, 0.0, "nothing", 0))
"""No fault: a job that only has to begin."""


@dataclass(frozen=True)
class JobPlan:
    number: int
    protect: str
    transport: str
    spares: int
    slots: int
    drains: bool
    episodes: tuple[Episode, ...]
    stripes: int = 1
    ranks_per_node: int = 1
    gap: int = 0
    """Protected snapshots from one fault to the next; one of these is taken every iteration."""
    restarts: bool = False
    """True if survivors restart in process and trainers start as a user's do."""
    iterations: int = 4000
    """More than it trains while it suffers all of its faults."""

    @property
    def nodes(self) -> int:
        return self.stripes * Scheme.parse(self.protect).members

    @property
    def hangs(self) -> bool:
        return any("hang-disk" in episode.kinds for episode in self.episodes)

    def __str__(self) -> str:
        drains = "drains" if self.drains else "no drains"
        return f"{self.protect} {self.transport} {self.spares}sp {self.slots}sl {drains}"


def jobs(
    seed: int, protect: Sequence[str] = SCHEMES, begins: tuple[str, ...] = ("",)
) -> Iterator[JobPlan]:
    """The endless list of jobs that a seed stands for; the same on every machine.

    Schemes and transports follow each other in turn, so that a short campaign has them all.  Only
    faults are drawn whose names begin with one of ``begins``.
    """
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind.startswith(begins)}
    for number in itertools.count():
        chance = random.Random(f"megatron-ft chaos --random {seed} {number}")
        turn, place = divmod(number, len(protect))
        drains = chance.random() < 0.5 or OF_DRAINS >= weights.keys()
        possible = {k: w for k, w in weights.items() if drains or k not in OF_DRAINS}
        yield JobPlan(
            number=number,
            protect=protect[place],
            transport=TRANSPORTS[(turn + place) % 2],
            spares=chance.randint(0, 2),
            slots=chance.randint(2, 3),
            drains=drains,
            episodes=tuple(_episode(chance, possible) for _ in range(FAULTS_PER_JOB)),
        )


def soak(
    seed: int, shape: JobPlan, *, snapshots: int = 0, faults: int = 0, restarts: int = 0
) -> JobPlan:
    """One long job of this shape: ``faults`` among ``snapshots``, or ``restarts`` in a row.

    Every kind comes as often as any other.
    """
    chance, episodes = random.Random(f"soak {seed}"), list[Episode]()
    kinds = RESTARTS if restarts else SOAK
    while len(episodes) < (restarts or faults):
        for kind in chance.sample(kinds, len(kinds)):
            fault = replace(_fault(chance, {kind: 1.0}, longest_wait=0.0), then="trainers")
            episodes.append(Episode(fault))
    return replace(
        shape,
        episodes=tuple(episodes[: restarts or faults]),
        gap=max(2, snapshots // (faults + 1)),
        restarts=bool(restarts),
        iterations=4000 + 8 * snapshots + 100 * restarts,
    )


def _episode(chance: random.Random, possible: Mapping[str, float]) -> Episode:
    first = _fault(chance, possible, longest_wait=1.0)
    again = chance.random() < 0.2
    return Episode(first, _fault(chance, possible, longest_wait=3.0) if again else None)


def _fault(chance: random.Random, possible: Mapping[str, float], longest_wait: float) -> DrawnFault:
    return DrawnFault(
        kind=chance.choices(list(possible), list(possible.values()))[0],
        wait=chance.uniform(0.0, longest_wait),
        position=chance.randrange(1 << 16),
        seconds=chance.uniform(0.3, 6.0),
        then=chance.choices(THEN, [6, 2, 1, 1])[0],
        seed=chance.randrange(1 << 32),
    )
