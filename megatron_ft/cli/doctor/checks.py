"""The doctor's checks: each judges the facts and returns what is right or wrong, and the remedy.

Pure.  This module holds the checks of what the nodes are to each other, and the table of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median_high

from megatron_ft.arena.limits import format_bytes
from megatron_ft.cli.doctor import node_checks
from megatron_ft.cli.doctor.examine import IN_SCRIPT, MISSING, SET
from megatron_ft.cli.doctor.facts import ExportFolder, ExportPlace, Facts, NodeFacts, WorldFacts
from megatron_ft.cli.doctor.pairs import SLOW_NODE, judge_pairs
from megatron_ft.cli.doctor.report import (
    Finding,
    Judged,
    Severity,
    by_node,
    ok,
    rate_text,
    refuse,
    warn,
)
from megatron_ft.core.errors import ProtectionError
from megatron_ft.erasure.stripes import check_domains
from megatron_ft.supervisor.placement import describe_domains

CLOCK_SECONDS = 1.0
ARENA_SHARE = 0.5
"""An arena to which a copy has less than this share of memcpy's rate is slow."""

_SAME_MOUNT = "mount the same file system at that path on all nodes"


def reachable(facts: Facts) -> list[Judged]:
    """Check that every node has answered."""
    advice = "repair the node or leave it out; if all fail alike, see whether this package is there"
    lost = {node: said for node, said in facts.nodes.items() if isinstance(said, str)}
    if lost:
        return [refuse(f"the probe failed: {why}", advice, node) for node, why in lost.items()]
    hosts = len({said.machine for said in facts.answered.values()})
    return [
        ok(f"all {len(facts.wishes.nodes)} nodes answer, on {hosts} machine{'s' * (hosts > 1)}")
    ]


def spares(facts: Facts) -> list[Judged]:
    """Check for spares: without one a lost node ends the job, or its memory at least."""
    if facts.wishes.spares:
        return [ok(f"in reserve: {', '.join(facts.wishes.spares)}")]
    return [warn("no spare: the job stops when a node is lost", "start with --spares 1 or more")]


def protection(facts: Facts) -> list[Judged]:
    """Stripes over the nodes that train, by failure domain."""
    wishes = facts.wishes
    if not wishes.scheme.parity_members:
        text = "--protect none: the loss of one node loses the job's memory"
        return [warn(text, "take rs:3+1, say")]
    try:
        check_domains(wishes.active, wishes.domains, wishes.scheme)
    except ProtectionError as error:
        said, _, advice = str(error).partition(". ")
        return [refuse(said, advice or "take fewer members")]
    text = describe_domains(wishes.active, wishes.nodes, wishes.domains, wishes.scheme)
    source = wishes.domains_from or "no --failure-domains, each node is alone"
    if not wishes.domains:
        text = f"{wishes.scheme} over {len(wishes.active)} nodes"
    return [ok(f"{text} ({source})")]


def slurm(facts: Facts) -> list[Judged]:
    """Check for --no-kill: by Slurm's defaults the loss of a node kills the whole job."""
    advice = "put `#SBATCH --no-kill` into the batch script"
    if facts.no_kill is None:
        return []
    if facts.no_kill == SET:
        return [ok("--no-kill is set: the job outlives a node")]
    if facts.no_kill == MISSING:
        text = "--no-kill is not set: Slurm kills the whole job when a node is lost"
        return [refuse(text, advice)]
    if facts.no_kill == IN_SCRIPT:
        text = "unknown: --no-kill is in the batch script, but Slurm does not show sbatch's command"
        return [warn(text, "see that it was submitted without --no-kill=off")]
    text = "--no-kill is not in the batch script, and Slurm does not tell how it was submitted"
    return [warn(text, advice)]


def steps(facts: Facts) -> list[Judged]:
    """Check that SMP and trainers are Slurm steps of their own: a step dies as a whole."""
    trainers = facts.as_trainers
    shared = [
        node
        for node, said in facts.answered.items()
        if node in trainers and _step(said.cgroup)
        if _step(said.cgroup) == _step(trainers[node].cgroup)
    ]
    if shared:
        text = "SMP and trainers share the cgroup of one job step: it dies as a whole"
        return [refuse(text, "start each by an srun of its own, as --launcher slurm does", *shared)]
    return [] if facts.no_kill is None else [ok("SMP and trainers have cgroups of their own")]


def _step(cgroup: str) -> str:
    """The job step in the path of a cgroup, empty if there is none."""
    for line in cgroup.splitlines():
        job, _, rest = line.rpartition("/job_")[2].partition("/step_")
        if "/job_" in line and rest and job.isdigit():
            return f"{job}.{rest.partition('/')[0]}"
    return ""


_WORK = {
    "memory": "copying in memory",
    "arena": "copying into the arena folder",
    "encode": "encoding",
}


def rates(facts: Facts) -> list[Judged]:
    """Copies and encoding; a node that is much slower than the others is named."""
    nodes = {n: said.rates for n, said in facts.answered.items()}
    findings = [
        refuse(f"cannot be measured: {rates.error}", "see the error", node)
        for node, rates in nodes.items()
        if rates.error
    ]
    slow: dict[str, list[str]] = {}
    for what, name in _WORK.items():
        by = {node: getattr(rates, what) for node, rates in nodes.items()}
        for node, share in slow_nodes(by, facts.one_machine).items():
            slow.setdefault(node, []).append(f"{name} runs at {share:.0%}")
    advice = "look for other processes, a throttled processor or a missing memory channel there"
    for node, texts in slow.items():
        findings.append(warn(f"{', '.join(texts)} of the typical node's rate", advice, node))
    bad = [n for n, rates in nodes.items() if 0 < rates.arena < ARENA_SHARE * rates.memory]
    if bad and not facts.one_machine:
        text = f"copies into the arena folder have less than {ARENA_SHARE:.0%} of memcpy's rate"
        advice = "is it on a tmpfs, without a memory limit that reclaims?"
        findings.append(warn(text, advice, *bad))
    shown = [rates for rates in nodes.values() if rates.memory and not rates.error]
    if findings or not shown:
        return findings
    names = {"memory": "memcpy", "arena": "into the arena", "encode": "encode"}
    least = {name: min(getattr(rates, what) for rates in shown) for what, name in names.items()}
    text = ", ".join(f"{name} {rate_text(rate)}" for name, rate in least.items() if rate)
    return [ok(f"at least: {text}")]


def slow_nodes(rates: Mapping[str, float], one_machine: bool = False) -> dict[str, float]:
    """Nodes that are slow, with their shares of the typical rate; rates of 0 are left out.

    On ``one_machine`` none is: its nodes have the same cores, and disturb each other.
    """
    known = {node: rate for node, rate in rates.items() if rate}
    if len(known) < 3 or one_machine:
        return {}
    typical = median_high(known.values())
    return {n: rate / typical for n, rate in known.items() if rate < SLOW_NODE * typical}


def mpi(facts: Facts) -> list[Judged]:
    """The world over all nodes."""
    found = facts.world
    if found is None:
        return []
    if found.error:
        return [_no_world(found, len(facts.answered))]
    libraries = " and ".join(sorted({rank.library for rank in found.joined.values()}))
    if found.no_mpi and found.tcp:
        text = f"encoders use {libraries}, because no MPI can be loaded: {found.no_mpi}"
        advice = "encrypted and slower: install mpi4py for your cluster's MPI, or say "
        return [warn(text, f"{advice}--transport tcp")]
    if found.tcp:
        return [ok(f"encoders use {libraries}, as --transport says")]
    fabric = next(iter(found.joined.values())).fabric
    started = f", started by {found.launcher}" if found.launcher else ""
    text = f"{libraries}{started}; {fabric or 'its settings name no fabric'}"
    if len({rank.library for rank in found.joined.values()}) > 1:
        return [warn(text, "take one MPI on all nodes")]
    return [ok(text)]


def _no_world(found: WorldFacts, answered: int) -> Judged:
    kind = "TCP" if found.tcp else "MPI"
    advice = "snapshots would stay on their node: see what is said, and the network between nodes"
    if not found.broken:
        text = f"worlds of two nodes work, one of all does not: {found.error}"
        return refuse(text, f"see what {kind} says")
    if len(found.broken) == answered:
        return refuse(f"no {kind} world: {found.error}", advice)
    return refuse(f"no {kind} world with it: {found.error}", advice, *found.broken)


def pairs(facts: Facts) -> list[Judged]:
    """Rates between nodes."""
    nodes = list(facts.world.joined) if facts.world else []
    if facts.world is None or facts.world.error or len(nodes) < 2:
        return []
    verdict = judge_pairs(nodes, facts.world.rates, facts.one_machine)
    typical, mend = rate_text(verdict.typical), "take it out, or mend its network"
    advice = "look at its link, cable and neighbours; a stripe is as fast as its slowest node"
    findings = [refuse("gives no answer, to nobody", mend, node) for node in verdict.broken]
    findings += [refuse("no answer between them", mend, *pair) for pair in verdict.broken_links]
    for node, share in verdict.slow.items():
        text = f"{share:.0%} of the typical rate of {typical}, with every partner"
        findings.append(warn(text, advice, node))
    for pair, share in verdict.slow_links.items():
        text = f"{share:.0%} of the typical rate of {typical} between them"
        findings.append(warn(text, advice, *pair))
    if findings:
        return findings
    count, least = len(facts.world.rates), rate_text(min(facts.world.rates.values()))
    return [ok(f"all {count} pairs of nodes work, at {least} to {typical} a direction")]


def clocks(facts: Facts) -> list[Judged]:
    """Clocks that are off for sure, whatever the answer took on its way.

    Only logs and file times depend on them.
    """
    off = {node: max(clock.least, -clock.most) for node, clock in facts.clocks.items()}
    advice = "run chrony or ntpd there; logs and file times mislead until then"
    findings = [
        warn(f"its clock is off by {seconds:.1f} s or more", advice, node)
        for node, seconds in off.items()
        if seconds > CLOCK_SECONDS
    ]
    if findings or not facts.clocks:
        return findings
    widest = max(max(abs(clock.least), abs(clock.most)) for clock in facts.clocks.values())
    return [ok(f"within {widest:.1f} s, as far as answers can tell")]


def drain_folder(facts: Facts) -> list[Judged]:
    """The drain folder: written by each node, one folder for all, and how fast."""
    folder = facts.wishes.drain_dir
    if not folder:
        text = "no --drain-dir: what memory cannot restore is lost"
        return [warn(text, "give --drain-dir, with an interval")]

    def judge(item: tuple[str, NodeFacts]) -> Judged:
        node, place = item[0], item[1].drain
        if place is None or place.error:
            reason = place.error if place else "it was not tried"
            return refuse(f"{folder}: {reason}", "make it writable on that node")
        if not place.token or facts.drain_tokens.get(node) != place.token:
            return refuse(f"{folder} is another folder than here", _SAME_MOUNT)
        return ok("")

    known = {node: (node, said) for node, said in facts.answered.items()}
    bad = [judged for judged in by_node(known, judge) if judged.verdict is not Severity.OK]
    return bad or _drain_room(facts, folder)


def _drain_room(facts: Facts, folder: str) -> list[Judged]:
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
    short = f"{text}, but only {format_bytes(free)} are free"
    if free < min(2, kept) * snapshot:
        advice = "make room for two snapshots: the new one is written before the old one goes"
        return [refuse(short, advice)]
    if free < kept * snapshot:
        advice = (
            f"--drain-keep {wishes.drain_keep} needs {format_bytes(kept * snapshot)}: one more is "
            "written before the oldest goes, and with less no drain after it succeeds; what an "
            "earlier run of the job has left there counts"
        )
        return [warn(short, advice)]
    slow = slow_nodes({n: place.rate for n, place in places.items()}, facts.one_machine)
    advice = "look at its mount and its network"
    return [
        ok(text),
        *(
            warn(f"writes at {share:.0%} of the typical node's rate", advice, node)
            for node, share in slow.items()
        ),
    ]


_UNTRIED = ExportPlace(error="it was not tried")
_ALONE = "see to it that no other job exports there"


def export_folder(facts: Facts) -> list[Judged]:
    """Folders of exports, one after the other; nothing if there are none."""
    return [judged for here in facts.exports for judged in _export_folder(facts, here)]


def _export_folder(facts: Facts, here: ExportFolder) -> list[Judged]:
    name = f"{here.flag} {here.folder}"
    if here.holder:
        text = f"{name}: {here.holder} exports there"
        advice = "give one of them another folder, or wait until the other has ended"
        return [refuse(text, advice)]
    places = {n: said.exports.get(here.folder, _UNTRIED) for n, said in facts.answered.items()}
    findings = by_node(places, partial(_export_place, name))
    bad = [judged for judged in findings if judged.verdict is not Severity.OK]
    if here.problem and all(judged.verdict is not Severity.REFUSED for judged in bad):
        return [warn(f"{name} cannot be locked ({here.problem})", _ALONE)]
    return bad or findings


def _export_place(name: str, place: ExportPlace) -> Judged:
    if place.error:
        return refuse(f"{name}: {place.error}", "make it writable on that node")
    if not place.same:
        return refuse(f"{name} is another folder than here", _SAME_MOUNT)
    if place.problem:
        return warn(f"{name} cannot be locked there ({place.problem})", _ALONE)
    if not place.locked:
        advice = (
            "mount it with locks for all machines (NFS: neither nolock nor local_lock; Lustre: "
            f"flock), or {_ALONE}"
        )
        return warn(f"{name}: a lock that is taken here is not seen there", advice)
    return ok(f"{name} is one folder, which can be locked; no other job exports there")


CHECKS: Mapping[str, Callable[[Facts], Iterable[Judged]]] = {
    "nodes": reachable,
    "spares": spares,
    "protection": protection,
    "slurm": slurm,
    "steps": steps,
    "versions": node_checks.frameworks,
    "same code": node_checks.same_code,
    "arena folder": node_checks.arena_folder,
    "memory": node_checks.memory,
    "leftovers": node_checks.leftovers,
    "same arena": node_checks.same_arena,
    "containers": node_checks.containers,
    "RemoveIPC": node_checks.remove_ipc,
    "descriptors": node_checks.descriptors,
    "locked memory": node_checks.locked_memory,
    "cores": node_checks.cores,
    "rates": rates,
    "mpi": mpi,
    "pairs": pairs,
    "clocks": clocks,
    "drain folder": drain_folder,
    "export folder": export_folder,
}


def judge(facts: Facts) -> list[Finding]:
    """Every finding of every check, by the check's name."""
    return [Finding(name, *judged) for name, check in CHECKS.items() for judged in check(facts)]
