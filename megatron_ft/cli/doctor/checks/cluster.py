"""Nodes that answer, spares, failure domains, and what Slurm does when a node is lost.

The transport between every pair of nodes: does it work, at which rate, who is slow.

Rates of each node, its clock, and the drain folder.

Memory for arenas.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_high

from megatron_ft.arena.limits import MemoryReading, format_bytes, memory_shortfall
from megatron_ft.cli.doctor.examine import IN_SCRIPT, MISSING, SET
from megatron_ft.cli.doctor.facts import (
    ArenaPlace,
    Facts,
    Finding,
    Judged,
    NodeFacts,
    Verdict,
    WorldFacts,
    by_node,
)
from megatron_ft.cli.doctor.needs import node_bytes, shortest_scheme
from megatron_ft.cli.doctor.pairs import SLOW_NODE, judge_pairs
from megatron_ft.core.errors import ProtectionError
from megatron_ft.erasure.stripes import check_domains
from megatron_ft.supervisor.placement import describe_domains


def reachable(facts: Facts) -> list[Finding]:
    """Every node must have answered."""
    lost = [(node, said) for node, said in facts.nodes.items() if isinstance(said, str)]
    if not lost:
        names = facts.wishes.nodes
        hosts = len({said.machine for said in facts.answered.values()})
        text = f"all {len(names)} nodes answer, on {hosts} machine{'s' if hosts > 1 else ''}"
        return [Finding("nodes", Verdict.OK, text)]
    advice = "repair the node or leave it out; if all fail alike, see whether this package is there"
    return [
        Finding("nodes", Verdict.REFUSED, f"the probe failed: {reason}", advice, (node,))
        for node, reason in lost
    ]


def spares(facts: Facts) -> list[Finding]:
    """Without a spare a lost node ends the job, or its memory at least."""
    wishes = facts.wishes
    if wishes.spares:
        return [Finding("spares", Verdict.OK, f"in reserve: {', '.join(wishes.spares)}")]
    text = "no spare: the job stops when a node is lost"
    return [Finding("spares", Verdict.WARNING, text, "start with --spares 1 or more")]


def protection(facts: Facts) -> list[Finding]:
    """Stripes over the nodes that train, by failure domain."""
    wishes = facts.wishes
    if not wishes.scheme.parity_members:
        text = "--protect none: the loss of one node loses the job's memory"
        return [Finding("protection", Verdict.WARNING, text, "take rs:3+1, say")]
    try:
        check_domains(wishes.active, wishes.domains, wishes.scheme)
    except ProtectionError as error:
        said, _, advice = str(error).partition(". ")
        return [Finding("protection", Verdict.REFUSED, said, advice or "take fewer members")]
    text = describe_domains(wishes.active, wishes.nodes, wishes.domains, wishes.scheme)
    source = wishes.domains_from or "no --failure-domains, each node is alone"
    if not wishes.domains:
        text = f"{wishes.scheme} over {len(wishes.active)} nodes"
    return [Finding("protection", Verdict.OK, f"{text} ({source})")]


def slurm(facts: Facts) -> list[Finding]:
    """With Slurm's defaults the loss of a node kills the whole job."""
    if facts.no_kill is None:
        return []
    if facts.no_kill == SET:
        return [Finding("slurm", Verdict.OK, "--no-kill is set: the job outlives a node")]
    advice = "put `#SBATCH --no-kill` into the batch script"
    if facts.no_kill == MISSING:
        text = "--no-kill is not set: Slurm kills the whole job when a node is lost"
        return [Finding("slurm", Verdict.REFUSED, text, advice)]
    if facts.no_kill == IN_SCRIPT:
        text = "unknown: --no-kill is in the batch script, but Slurm does not show sbatch's command"
        advice = "see that it was submitted without --no-kill=off"
        return [Finding("slurm", Verdict.WARNING, text, advice)]
    text = "--no-kill is not in the batch script, and Slurm does not tell how it was submitted"
    return [Finding("slurm", Verdict.WARNING, text, advice)]


_INSTALL = "snapshots would stay on their node: see what is said, and the network between nodes"
_SLOWER = "encrypted and slower: install mpi4py for your cluster's MPI, or say --transport tcp"


def world(facts: Facts) -> list[Finding]:
    """The world over all nodes."""
    found = facts.world
    if found is None:
        return []
    if found.error:
        return _no_world(facts, found)
    rank = next(iter(found.joined.values()))
    libraries = sorted({rank.library for rank in found.joined.values()})
    text = " and ".join(libraries)
    text += f", started by {found.launcher}" if found.launcher else ""
    text += f"; {rank.fabric}" if rank.fabric else "; its settings name no fabric"
    if found.tcp:
        return [_over_tcp(found, " and ".join(libraries)), *pairs(facts)]
    if len(libraries) > 1:
        advice = "take one MPI on all nodes"
        return [Finding("mpi", Verdict.WARNING, text, advice), *pairs(facts)]
    return [Finding("mpi", Verdict.OK, text), *pairs(facts)]


def pairs(facts: Facts) -> list[Finding]:
    """Rates between nodes."""
    assert facts.world is not None
    nodes = list(facts.world.joined)
    if len(nodes) < 2:
        return []
    verdict = judge_pairs(nodes, facts.world.rates, facts.one_machine)
    typical = rate_text(verdict.typical)
    findings = [_refused("gives no answer, to nobody", (node,)) for node in verdict.broken]
    findings += [_refused("no answer between them", pair) for pair in verdict.broken_links]
    findings += [
        _slow(f"{share:.0%} of the typical rate of {typical}, with every partner", (node,))
        for node, share in verdict.slow.items()
    ]
    findings += [
        _slow(f"{share:.0%} of the typical rate of {typical} between them", pair)
        for pair, share in verdict.slow_links.items()
    ]
    if findings:
        return findings
    least = rate_text(min(facts.world.rates.values()))
    text = f"all {len(facts.world.rates)} pairs of nodes work, at {least} to {typical} a direction"
    return [Finding("pairs", Verdict.OK, text)]


def _over_tcp(found: WorldFacts, libraries: str) -> Finding:
    if found.no_mpi:
        text = f"encoders use {libraries}, because no MPI can be loaded: {found.no_mpi}"
        return Finding("mpi", Verdict.WARNING, text, _SLOWER)
    return Finding("mpi", Verdict.OK, f"encoders use {libraries}, as --transport says")


def _no_world(facts: Facts, found: WorldFacts) -> list[Finding]:
    kind = "TCP" if found.tcp else "MPI"
    if not found.broken:
        text = f"worlds of two nodes work, one of all does not: {found.error}"
        return [Finding("mpi", Verdict.REFUSED, text, f"see what {kind} says")]
    text = f"no {kind} world with it: {found.error}"
    if len(found.broken) == len(facts.answered):
        return [Finding("mpi", Verdict.REFUSED, f"no {kind} world: {found.error}", _INSTALL)]
    return [Finding("mpi", Verdict.REFUSED, text, _INSTALL, found.broken)]


def _refused(text: str, nodes: tuple[str, ...]) -> Finding:
    return Finding("pairs", Verdict.REFUSED, text, "take it out, or mend its network", nodes)


def _slow(text: str, nodes: tuple[str, ...]) -> Finding:
    advice = "look at its link, cable and neighbours; a stripe is as fast as its slowest node"
    return Finding("pairs", Verdict.WARNING, text, advice, nodes)


ARENA_SHARE = 0.5
"""An arena to which a copy has less than this share of memcpy's rate is slow."""

CLOCK_SECONDS = 1.0


def rates(facts: Facts) -> list[Finding]:
    """Copies and encoding; a node that is much slower than the others is named."""
    nodes = {n: said.rates for n, said in facts.answered.items()}
    failed = {n: r.error for n, r in nodes.items() if r.error}
    findings = [
        Finding("rates", Verdict.REFUSED, f"cannot be measured: {error}", "see the error", (node,))
        for node, error in failed.items()
    ]
    slow = _slow_work(facts)
    bad = [n for n, r in nodes.items() if 0 < r.arena < ARENA_SHARE * r.memory]
    if bad and not facts.one_machine:
        text = f"copies into the arena folder have less than {ARENA_SHARE:.0%} of memcpy's rate"
        advice = "is it on a tmpfs, without a memory limit that reclaims?"
        slow.append(Finding("rates", Verdict.WARNING, text, advice, tuple(bad)))
    shown = [r for r in nodes.values() if r.memory and not r.error]
    if shown and not findings + slow:
        least = [min(getattr(r, what) for r in shown) for what in ("memory", "arena", "encode")]
        pairs = zip(("memcpy", "into the arena", "encode"), least, strict=True)
        text = ", ".join(f"{name} {rate_text(rate)}" for name, rate in pairs if rate)
        slow.append(Finding("rates", Verdict.OK, f"at least: {text}"))
    return findings + slow


def _slow_work(facts: Facts) -> list[Finding]:
    """One finding for each node at which something is slow."""
    said: dict[str, list[str]] = {}
    for what, name in _NAMES.items():
        rates = {n: getattr(node.rates, what) for n, node in facts.answered.items()}
        for node, share in slow_nodes(rates, facts.one_machine).items():
            said.setdefault(node, []).append(f"{name} runs at {share:.0%}")
    advice = "look for other processes, a throttled processor or a missing memory channel there"
    return [
        Finding(
            "rates",
            Verdict.WARNING,
            f"{', '.join(texts)} of the typical node's rate",
            advice,
            (node,),
        )
        for node, texts in said.items()
    ]


def clocks(facts: Facts) -> list[Finding]:
    """Clocks that are off for sure, whatever the answer took on its way.

    Only logs and file times depend on them.
    """
    off = {
        node: max(clock.least, -clock.most)
        for node, clock in facts.clocks.items()
        if max(clock.least, -clock.most) > CLOCK_SECONDS
    }
    findings = [
        Finding(
            "clocks",
            Verdict.WARNING,
            f"its clock is off by {seconds:.1f} s or more",
            "run chrony or ntpd there; logs and file times mislead until then",
            (node,),
        )
        for node, seconds in off.items()
    ]
    if findings or not facts.clocks:
        return findings
    widest = max(max(abs(c.least), abs(c.most)) for c in facts.clocks.values())
    return [Finding("clocks", Verdict.OK, f"within {widest:.1f} s, as far as answers can tell")]


def drain(facts: Facts) -> list[Finding]:
    """The drain folder: written by each node, one folder for all, and how fast."""
    folder = facts.wishes.drain_dir
    if not folder:
        text = "no --drain-dir: what memory cannot restore is lost"
        return [
            Finding("drain folder", Verdict.WARNING, text, "give --drain-dir, with an interval")
        ]
    token_of = facts.drain_tokens

    def judge(item: tuple[str, NodeFacts]) -> Judged:
        node, said = item
        place = said.drain
        if place is None or place.error:
            reason = place.error if place else "it was not tried"
            return Verdict.REFUSED, f"{folder}: {reason}", "make it writable on that node"
        if not place.token or token_of.get(node) != place.token:
            text = f"{folder} is another folder than here"
            return Verdict.REFUSED, text, "mount the same file system at that path on all nodes"
        return Verdict.OK, "", ""

    known = {node: (node, said) for node, said in facts.answered.items()}
    findings = [f for f in by_node("drain folder", known, judge) if f.verdict is not Verdict.OK]
    if findings:
        return findings
    return _drain_rates(facts, folder)


def _drain_rates(facts: Facts, folder: str) -> list[Finding]:
    places = {n: said.drain for n, said in facts.answered.items() if said.drain}
    if not places:
        return []
    wishes, least = facts.wishes, min(place.rate for place in places.values())
    free = min(place.free_bytes for place in places.values())
    text = f"{folder} is one folder, written at {rate_text(least)} a node or more"
    need = (wishes.shard_bytes or 0) * wishes.ranks_per_node
    if need:
        text += f": a snapshot takes {need / least:.0f} s"
    snapshot, kept = need * len(wishes.active), wishes.drain_keep + 1
    if free < kept * snapshot:
        text += f", but only {format_bytes(free)} are free"
        if free < 2 * snapshot:
            advice = "make room for two snapshots: the new one is written before the old one goes"
            return [Finding("drain folder", Verdict.REFUSED, text, advice)]
        advice = (
            f"--drain-keep {wishes.drain_keep} needs {format_bytes(kept * snapshot)}: one more is "
            "written before the oldest goes, and with less no drain after it succeeds; what an "
            "earlier run of the job has left there counts"
        )
        return [Finding("drain folder", Verdict.WARNING, text, advice)]
    slow = slow_nodes({n: place.rate for n, place in places.items()}, facts.one_machine)
    return [Finding("drain folder", Verdict.OK, text)] + [
        Finding(
            "drain folder", Verdict.WARNING, f"writes at {share:.0%} of the typical node's rate",
            "look at its mount and its network", (node,),
        )
        for node, share in slow.items()
    ]  # fmt: skip


def slow_nodes(rates: Mapping[str, float], one_machine: bool = False) -> dict[str, float]:
    """Nodes that are slow, with their shares of the typical rate; rates of 0 are left out.

    On ``one_machine`` none is: its nodes have the same cores, and disturb each other.
    """
    known = {node: rate for node, rate in rates.items() if rate}
    if len(known) < 3 or one_machine:
        return {}
    typical = median_high(known.values())
    return {n: rate / typical for n, rate in known.items() if rate < SLOW_NODE * typical}


def rate_text(rate: float) -> str:
    """A rate for people."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


_NAMES = {
    "memory": "copying in memory",
    "arena": "copying into the arena folder",
    "encode": "encoding",
}


MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def room(facts: Facts) -> list[Finding]:
    """Every limit of memory against what the arenas will need.

    Nodes that share a machine share its memory, and there spares are not counted.
    """
    wishes = facts.wishes
    if wishes.shard_bytes is None:
        readings = [_tightest(said.arena) for said in facts.answered.values() if said.arena.limits]
        if not readings:
            return []
        tight = min(readings, key=lambda r: r.available_bytes)
        text = f"{format_bytes(tight.available_bytes)} left by {tight.limit}; need not known"
        advice = "give --shard-gib, or --parameters, to have it compared"
        return [Finding("memory", Verdict.WARNING, text, advice)]
    actual = shortest_scheme(wishes.active, wishes.domains, wishes.scheme)
    each = node_bytes(wishes.shard_bytes, wishes.ranks_per_node, wishes.slot_count, actual)
    machines = [said.machine for said in facts.answered.values()]
    arithmetic = (
        f"{format_bytes(wishes.shard_bytes)} a shard ({wishes.shard_source}) x "
        f"{wishes.ranks_per_node} ranks x {wishes.slot_count} slots x "
        f"(1 + {actual.parity_members}/{actual.data_members})"
    )

    def judge(said: NodeFacts) -> Judged:
        together = min(machines.count(said.machine), len(wishes.active))
        need = together * each
        shared = f" for {together} nodes on one machine" if together > 1 else ""
        text = f"needs {format_bytes(need)}{shared} = {arithmetic}"
        readings = [MemoryReading(r.limit, r.available_bytes) for r in said.arena.limits]
        short = memory_shortfall(need, readings)
        if short is None:
            return Verdict.OK, text, ""
        left = format_bytes(max(short.available_bytes, 0))
        advice = (
            "raise that limit (a tmpfs: `mount -o remount,size=...`; a container: its shared "
            "memory size and memory limit), use fewer slots or less parity, or --arena-dir"
        )
        return Verdict.REFUSED, f"{text}, but {short.limit} leaves {left}", advice

    return by_node("memory", facts.answered, judge)


def folder(facts: Facts) -> list[Finding]:
    """The arena folder: usable, and in memory."""

    def judge(said: NodeFacts) -> Judged:
        arena = said.arena
        if arena.error:
            text = f"arena folder {arena.folder}: {arena.error}"
            return Verdict.REFUSED, text, "choose another --arena-dir, or mend its permissions"
        kind = f"{arena.filesystem} of {format_bytes(arena.total_bytes)}"
        if arena.filesystem not in MEMORY_FILESYSTEMS:
            text = f"arenas would be on {kind}: every snapshot is written to a disk"
            return Verdict.WARNING, text, "give an --arena-dir on a tmpfs such as /dev/shm"
        return Verdict.OK, f"arenas are on {kind}", ""

    return by_node("arena folder", facts.answered, judge)


def leftovers(facts: Facts) -> list[Finding]:
    """Memory of jobs that no longer run; those that run only share the machine."""

    def judge(said: NodeFacts) -> Judged:
        dead = [job for job in said.arena.leftovers if not job.process and job.allocated_bytes]
        if not dead:
            return Verdict.OK, "no dead job keeps memory", ""
        names = ", ".join(f"{j.job} ({format_bytes(j.allocated_bytes)})" for j in dead)
        return (
            Verdict.WARNING,
            f"jobs that no longer run keep memory: {names}",
            ("remove it with `megatron-ft clean --job NAME`, unless it is to be restored from"),
        )

    return by_node("leftovers", facts.answered, judge)


def _tightest(arena: ArenaPlace) -> MemoryReading:
    tight = min(arena.limits, key=lambda limit: limit.available_bytes)
    return MemoryReading(tight.limit, tight.available_bytes)
