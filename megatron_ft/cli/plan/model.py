"""Closed forms of a plan: memory, traffic, seconds, survival, interval, ETTR and spares.  Pure.

Bytes and seconds throughout.  docs/how-to/plan.md derives the formulas and says what they assume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_ft.arena.limits import format_bytes, node_bytes
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import MAX_MEMBERS, NO_PARITY, Scheme
from megatron_ft.erasure.stripes import stripe_sets
from megatron_ft.supervisor.schedule import best_seconds

STALL_SHARE = 0.03
"""Training that a snapshot costs, in times of its copy, while iterations are longer than the copy:
stall and shadow of an iteration of four copies (docs/validation/benchmarks.md, H100,
2026-11-24)."""

ENOUGH_SPARES = 0.99
"""Share of node losses at which a recommended number of spares has one left."""

_LONGEST_CHAIN = 60
_USUAL = ("rs:3+1", "rs:7+1", "rs:15+1", "rs:2+2", "rs:6+2", "rs:14+2", "replica:2", "none")


@dataclass(frozen=True)
class PlannedJob:
    """The job that is planned, the rates of its machines, and how often they fail.

    ``copy`` and ``digest`` are rates of a rank; ``encode``, for one member of parity, and ``link``
    are rates of a node.  Of all failures, one every ``mtbf``, ``node_share`` lose a node's memory.
    ``detect`` is the time until a lost node is known, ``restart`` that of starting trainers,
    ``replacement`` that until another node is a spare.  ``spares`` is -1 for as many as
    ENOUGH_SPARES asks for.
    """

    shard_bytes: int
    nodes: int
    ranks_per_node: int
    host_bytes: float
    iteration: float
    mtbf: float
    node_share: float
    copy: float
    digest: float
    encode: float
    link: float
    slots: int = 2
    nodes_per_domain: int = 1
    detect: float = 30.0
    restart: float = 60.0
    replacement: float = 86400.0
    spares: int = -1
    drain: float = 3600.0
    budget: float = 0.01
    run: float = 30 * 86400.0

    @property
    def node_mtbf(self) -> float:
        """Seconds between losses of any node; infinite if none is lost."""
        return self.mtbf / self.node_share if self.node_share else math.inf

    def can_have(self, scheme: Scheme) -> bool:
        """True if the nodes can be divided into its stripes."""
        sets = stripe_sets(self.nodes, self.nodes_per_domain, scheme)
        return scheme.members <= self.nodes and sets is not None


@dataclass(frozen=True)
class Forecast:
    """A job under a scheme that it ``can_have``; ``iterations`` is the interval, 0: the best."""

    job: PlannedJob
    scheme: Scheme
    iterations: int = 0

    @cached_property
    def set_sizes(self) -> list[int]:
        """Nodes in each set that shares stripes, as ``erasure/stripes.py`` divides them."""
        count = stripe_sets(self.job.nodes, self.job.nodes_per_domain, self.scheme)
        assert count is not None, "the scheme was not checked"
        short, longer = divmod(self.job.nodes, count)
        return [short + (i < longer) for i in range(count)]

    @property
    def shortest(self) -> Scheme:
        """The scheme of the shortest stripe: it costs the most memory and traffic."""
        return self.scheme.shortened(min(self.set_sizes)) if self._parity else self.scheme

    @property
    def node_bytes(self) -> int:
        """Arenas of a node: slots, parity and headers."""
        job = self.job
        return node_bytes(job.shard_bytes, job.ranks_per_node, job.slots, self.shortest)

    @property
    def fits(self) -> bool:
        return self.node_bytes <= self.job.host_bytes

    @property
    def encode_bytes(self) -> float:
        """Bytes over a node's link, each way, a snapshot: L (N-1)/(N-m) a rank."""
        return self._state * (self.shortest.members - 1) / self.shortest.data_members

    @property
    def rebuild_bytes(self) -> float:
        """Bytes that a node receives when it is rebuilt: L N/(N-m) a rank; 0 without parity."""
        return bool(self._parity) * self._state * self.shortest.members / self.shortest.data_members

    @property
    def copy_seconds(self) -> float:
        """Time of the copy alone, which ends before training's next step."""
        return self.job.shard_bytes / self.job.copy

    @property
    def safe_seconds(self) -> float:
        """From a snapshot's iteration until it is committed: copied, digested, coded and sent."""
        encode = max(self._coding, self.encode_bytes / self.job.link)
        return self.copy_seconds + self.job.shard_bytes / self.job.digest + encode

    @property
    def cost_seconds(self) -> float:
        """Training time that a snapshot takes."""
        beyond = max(0.0, self.copy_seconds - self.job.iteration)
        return beyond + STALL_SHARE * self.copy_seconds

    @cached_property
    def interval(self) -> int:
        """Iterations between snapshots by the job's own rule, but none before the last is safe."""
        best = best_seconds(self.cost_seconds, self.job.budget, self.job.mtbf)
        least = math.ceil(max(best, self.safe_seconds) / self.job.iteration)
        return self.iterations or max(1, least)

    @property
    def work(self) -> float:
        """Seconds of training between two snapshots, without what the snapshot costs."""
        return self.interval * self.job.iteration

    @property
    def repair_seconds(self) -> float:
        """From a node's loss until memory is complete again, with a spare at hand."""
        return self.job.detect + max(self._coding, self.rebuild_bytes / self.job.link)

    @cached_property
    def spares(self) -> int:
        """The given number, or the least that leaves one at ENOUGH_SPARES of node losses."""
        if self.job.spares >= 0 or not self.job.node_share:
            return max(0, self.job.spares)
        below, count = 0.0, 0
        while below < ENOUGH_SPARES:
            below, count = below + self._replaced[count], count + 1
        return count

    @property
    def spare_missing(self) -> float:
        """Share of node losses that find no spare."""
        return max(0.0, 1 - sum(self._replaced[: self.spares])) if self.job.node_share else 0.0

    @cached_property
    def _replaced(self) -> list[float]:
        """Chance that 0, 1, ... nodes are being replaced: Poisson."""
        out = self.job.replacement / self.job.node_mtbf
        if not out:
            return [1.0]
        most = int(out + 10 * math.sqrt(out)) + 30
        return [math.exp(n * math.log(out) - out - math.lgamma(n + 1)) for n in range(most)]

    @cached_property
    def fatal_chance(self) -> float:
        """Chance that a node's loss begins a chain of losses which memory does not survive.

        Each loss before the repair ends begins it anew, and strikes all other nodes alike.
        """
        ways = [1]  # to lose 0, 1, ... nodes without losing more than m of a set
        for size in self.set_sizes:
            part = [math.comb(size, i) for i in range(self._parity + 1)]
            longest = min(len(ways) + self._parity, _LONGEST_CHAIN)
            ways = [
                sum(ways[k - i] * n for i, n in enumerate(part) if 0 <= k - i < len(ways))
                for k in range(longest)
            ]
        nodes, fatal, reached, survived = self.job.nodes, 0.0, 1.0, 1.0
        for lost in range(1, min(nodes, _LONGEST_CHAIN) + 1):
            now = ways[lost] / math.comb(nodes, lost) if lost < len(ways) else 0.0
            fatal, survived = fatal + reached * (survived - now), now
            rate = (nodes - lost) / nodes / self.job.node_mtbf
            reached *= -math.expm1(-rate * self.repair_seconds)
        return fatal

    @property
    def memory_mtbf(self) -> float:
        """Mean seconds until memory alone does not save the job; infinite if that cannot be."""
        fatal, between = self.fatal_chance, self.job.node_mtbf
        return (between + (1 - fatal) * self.repair_seconds) / fatal if fatal else math.inf

    @property
    def survival(self) -> float:
        """Chance that memory alone saves the whole run."""
        return math.exp(-self.job.run / self.memory_mtbf)

    @property
    def ettr(self) -> float:
        """Expected share of wall time that is productive.

        Daly (2006, doi:10.1016/j.future.2004.11.016) with snapshots that count once they are
        committed, times the same of a disk tier for what memory does not survive.
        """
        job, rate = self.job, 1 / self.job.mtbf
        node = math.exp(-rate * (self.repair_seconds + job.restart))
        ready = job.node_share * node + (1 - job.node_share) * math.exp(-rate * job.restart)
        ready *= sum(self._replaced[: self.spares + 1])  # nodes enough: M/G/infinity
        kept = math.exp(-rate * self.safe_seconds) * _kept(rate * (self.work + self.cost_seconds))
        overhead = self.work / (self.work + self.cost_seconds)
        memory = overhead * kept * ready
        return memory * _kept(job.drain / max(memory, 1e-9) / self.memory_mtbf)

    @property
    def _parity(self) -> int:
        return self.scheme.parity_members

    @property
    def _state(self) -> int:
        return self.job.shard_bytes * self.job.ranks_per_node

    @property
    def _coding(self) -> float:
        return self._state * self._parity / self.job.encode


def _kept(failures: float) -> float:
    """Share of work that is kept, with this many failures expected from one save to the next."""
    return failures / math.expm1(min(failures, 700.0)) if failures else 1.0


def check(job: PlannedJob, scheme: Scheme) -> Forecast:
    """The forecast of a scheme; ConfigError, with the nearest possible one, if it cannot be had."""
    reason = (
        f"--protect {scheme}: --nodes {job.nodes} with --nodes-per-domain {job.nodes_per_domain} "
        "cannot be divided into its stripes"
    )
    if job.can_have(scheme):
        wanted = Forecast(job, scheme)
        if wanted.fits:
            return wanted
        reason = f"--protect {scheme} needs {_need(wanted)}, --host-memory-gib "
        reason += f"is {job.host_bytes / (1 << 30):g}"
    nearest = next((one for one in _nearest(job, scheme) if one.fits), None)
    if nearest is None:
        need = _need(Forecast(job, NO_PARITY))
        raise ConfigError(f"{reason}; even none needs {need}: take more nodes, or larger ones")
    raise ConfigError(f"{reason}; the nearest possible is {nearest.scheme}, with {_need(nearest)}")


def _need(forecast: Forecast) -> str:
    return f"{format_bytes(forecast.node_bytes)} a node"


def _nearest(job: PlannedJob, wanted: Scheme) -> Iterator[Forecast]:
    """As much parity, over stripes as long or longer if there are nodes enough; then less."""
    for parity in range(wanted.parity_members, 0, -1):
        most = min(job.nodes, MAX_MEMBERS) - parity
        for data in range(max(1, min(wanted.data_members, most)), most + 1):
            scheme = Scheme("rs", data, parity)
            if job.can_have(scheme):
                yield Forecast(job, scheme)
    yield Forecast(job, NO_PARITY)


def candidates(job: PlannedJob) -> list[Forecast]:
    """Usual schemes that the nodes can have, whether they fit or not."""
    schemes = map(Scheme.parse, _USUAL)
    return [Forecast(job, scheme) for scheme in schemes if job.can_have(scheme)]


def recommend(forecasts: list[Forecast]) -> Forecast | None:
    """The one that fits with the highest ETTR, to 0.01 %; of equal ones the least memory."""
    fitting = [one for one in forecasts if one.fits]
    return max(fitting, key=lambda one: (round(one.ettr, 4), -one.node_bytes), default=None)
