"""The doctor's checks: each judges the facts and returns what is right or wrong, and the remedy.

Pure.  This module holds the checks of what the nodes are to each other, and the table of all.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping

from megatron_ft.arena.limits import format_bytes
from megatron_ft.cli.contents import rule
from megatron_ft.cli.doctor import node_checks
from megatron_ft.cli.doctor.facts import AskedJob, Facts, SharedFolder, WorldFacts
from megatron_ft.cli.doctor.report import Finding, Severity, by_node, ok, refuse, warn
from megatron_ft.core.errors import ProtectionError
from megatron_ft.core.identity import RankRule
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import check_domains, members_of
from megatron_ft.erasure.world import TCP_REMEDY, tcp_rate
from megatron_ft.launchers.slurm.allocation import GRACE_ADVICE, NO_KILL_ADVICE
from megatron_ft.supervisor.elastic import fewer_nodes
from megatron_ft.supervisor.seats import scheme_over

_ONE_VERSION = "install one version everywhere"


def reachable(facts: Facts) -> list[Finding]:
    """Every node answers."""
    advice = "repair the node or leave it out; if all fail alike, see whether this package is there"
    lost = {node: said for node, said in facts.nodes.items() if isinstance(said, str)}
    if lost:
        return [refuse(f"the probe failed: {why}", advice, node) for node, why in lost.items()]
    hosts = len({said.machine for said in facts.answered.values()})
    return [ok(f"all {len(facts.job.nodes)} nodes answer, on {hosts} machine{'s' * (hosts > 1)}")]


def spares(facts: Facts) -> list[Finding]:
    """Without a spare a lost node ends the job, or its memory at least."""
    if facts.job.spares:
        return [ok(f"in reserve: {', '.join(facts.job.spares)}")]
    if facts.job.shrinks:
        return [ok("no spare: the job continues with fewer nodes when one is lost")]
    return [warn("no spare: the job stops when a node is lost", "start with --spares 1 or more")]


def protection(facts: Facts) -> list[Finding]:
    """Stripes over the nodes that train, by failure domain."""
    job = facts.job
    if not job.scheme.parity_members:
        text = "--protect none: the loss of one node loses the job's memory"
        return [warn(text, "take rs:3+1, say")]
    try:
        check_domains(job.active, job.spec.domains, job.scheme)
    except ProtectionError as error:
        said, _, advice = str(error).partition(". ")
        return [refuse(said, advice or "take fewer members")]
    if not job.spec.domains:
        text = f"{job.scheme} over {len(job.active)} nodes"
        return [ok(f"{text} (no --failure-domains, each node is alone)")]
    groups = members_of(job.active, job.spec.domains)
    shown = "; ".join(f"{name}: {', '.join(nodes)}" for name, nodes in groups.items())
    return [ok(f"{len(groups)} failure domains train ({shown}) ({job.domains_from})")]


_SHOWN_REASONS = 4


def fewer(facts: Facts) -> list[Finding]:
    """The numbers of nodes with which the job continues when no spare is left."""
    job = facts.job
    if not job.shrinks:
        return []
    if job.shrink_refusals:
        return [refuse(why, "change the training command") for why in job.shrink_refusals]
    if job.rank_rule is None:
        text = "the job continues with fewer nodes: with how many, its ranks say at the start"
        named = [f"{n} nodes{_shape(job, n)}" for n in job.spec.shapes]
        return [ok("; --shapes: ".join([text, ", ".join(named)] if named else [text]))]
    found, skipped = continuations(job, job.rank_rule)
    reasons = [f"not with {reason}" for reason in skipped]
    if len(reasons) > _SHOWN_REASONS:
        reasons[_SHOWN_REASONS:] = [f"nor with {len(reasons) - _SHOWN_REASONS} other numbers"]
    if not found:
        text = "; ".join(["--on-no-spare shrink: no fewer nodes will do", *reasons])
        return [warn(text, "the job stops when a node is lost: start with --spares 1 or more")]
    numbers = ", ".join(f"{n} nodes ({scheme}){_shape(job, n)}" for n, scheme in found)
    return [ok("; ".join([f"when no spare is left, the job continues with {numbers}", *reasons]))]


def _shape(job: AskedJob, nodes: int) -> str:
    words = job.spec.shapes.get(nodes, ())
    return " forbidden" if words is None else f" with {shlex.join(words)}" if words else ""


def continuations(job: AskedJob, rule: RankRule) -> tuple[list[tuple[int, Scheme]], list[str]]:
    """Numbers of nodes that would train, with the scheme of their stripes, and why not others.

    As the job itself decides when any number of its nodes, the last ones, are lost.
    """
    nodes, spec, wanted = job.active, job.spec, job.scheme
    found, skipped = dict[tuple[int, Scheme], None](), dict[int, str]()
    for left in range(len(nodes) - 1, 0, -1):
        chosen, reasons = fewer_nodes(spec, nodes[:left], len(nodes), rule, wanted)
        for count, reason in zip(range(left, 0, -1), reasons, strict=False):
            skipped.setdefault(count, reason)
        if chosen:
            found[len(chosen), scheme_over(chosen, len(nodes), spec.domains, wanted)] = None
    counts = {count for count, _ in found}
    return list(found), [why for count, why in skipped.items() if count not in counts]


def slurm(facts: Facts) -> list[Finding]:
    """By Slurm's defaults a node's loss kills the whole job, and preemption its steps at once."""
    if facts.no_kill is None:
        return []
    told = "preemption ends all steps as its grace time begins: nothing is drained"
    found = [warn(told, GRACE_ADVICE)] if facts.grace_lost else []
    if facts.no_kill:
        return [ok("--no-kill is seen: the job outlives a node"), *found]
    text = "--no-kill is not seen: Slurm kills the job when a node is lost"
    return [warn(text, NO_KILL_ADVICE), *found]


def steps(facts: Facts) -> list[Finding]:
    """SMP and trainers are Slurm steps of their own: a step dies as a whole."""
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


def same_code(facts: Facts) -> list[Finding]:
    """All nodes must run the same code of ours, and should run the same of others."""
    codes = {node: said.code for node, said in facts.answered.items()}
    if len({*codes.values()}) > 1:
        return [refuse(f"megatron_ft differs between nodes: {_groups(codes)}", _ONE_VERSION)]
    trainers = facts.as_trainers
    found = {"Python": {node: said.python for node, said in trainers.items()}}
    for name in sorted({name for said in trainers.values() for name in said.packages}):
        found[name] = {node: said.packages.get(name, "none") for node, said in trainers.items()}
    differing = [f"{name} ({_groups(by)})" for name, by in found.items() if len({*by.values()}) > 1]
    if differing:
        return [warn(f"versions differ between nodes: {'; '.join(differing)}", _ONE_VERSION)]
    return [ok("megatron_ft and packages agree on all nodes")]


def _groups(values: Mapping[str, str]) -> str:
    found: dict[str, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in found.items())


def encoders(facts: Facts) -> list[Finding]:
    """The world over all nodes, in which each exchanges a message with each other."""
    found = facts.world
    if found is None:
        return []
    if found.error:
        return [_no_world(found)]
    names = list(facts.answered)
    findings = [
        refuse(
            f"gives no answer to {', '.join(names[rank] for rank in said.silent)}",
            "look at its link, its firewall and its MPI's choice of network",
            node,
        )
        for node, said in found.ranks.items()
        if said.silent
    ]
    if findings:
        return findings
    libraries = " and ".join(sorted({rank.library for rank in found.ranks.values()}))
    slow = tcp_rate(facts.job.shard_bytes, facts.job.spec.ranks_per_node) if found.tcp else ""
    if found.no_mpi:
        text = f"encoders use {libraries}, because no MPI can be loaded: {found.no_mpi}"
        advice = "encrypted and slower: install mpi4py for your cluster's MPI, or say "
        advice = TCP_REMEDY if slow else f"{advice}--transport tcp"
        return [warn(f"{text}; {slow}" if slow else text, advice)]
    if slow:
        return [warn(f"encoders use {libraries}; {slow}", TCP_REMEDY)]
    return [ok(f"encoders use {libraries}; every node has answered every other")]


def _no_world(found: WorldFacts) -> Finding:
    kind = "TCP" if found.tcp else "MPI"
    advice = "snapshots would stay on their node: see what is said, and the network between nodes"
    if not found.broken:
        return refuse(f"{kind}: halves of the nodes make worlds, all do not: {found.error}", advice)
    return refuse(f"no {kind} world: {found.error}", advice, *found.broken)


def drain_folder(facts: Facts) -> list[Finding]:
    """The drain folder: one for all nodes, theirs alone, and large enough."""
    folder = str(facts.job.settings.drain_dir or "")
    if not folder:
        text = "no --drain-dir: what memory cannot restore is lost"
        return [warn(text, "give --drain-dir, with an interval")]
    findings = _shared(facts, f"--drain-dir {folder}", folder, trusted=True)
    return findings if any(f.verdict is not Severity.OK for f in findings) else _room(facts)


def export_folder(facts: Facts) -> list[Finding]:
    """The folder of exports: one for all nodes, and of no other job."""
    folder = str(facts.job.settings.drain_export_dir or "")
    if not folder:
        return []
    if facts.exporter:
        text = f"--drain-export-dir {folder}: {facts.exporter} exports there"
        return [refuse(text, "give another folder, or wait until the other job has ended")]
    return _shared(facts, f"--drain-export-dir {folder}", folder, trusted=False)


def _shared(facts: Facts, name: str, folder: str, trusted: bool) -> list[Finding]:
    """Every node sees the doctor's file there, and the doctor every node's."""

    def judge(pair: tuple[bool, SharedFolder]) -> Finding:
        seen, place = pair
        if place.error:
            return refuse(f"{name}: {place.error}", "make it writable on that node")
        if not (seen and place.same):
            advice = "mount the same file system at that path on all nodes"
            return refuse(f"{name} is another folder than here", advice)
        if trusted and place.distrust:
            text = f"{name}: a checkpoint that is made there {place.distrust}"
            return refuse(text, "mount it so that files belong to the user who makes them")
        return ok(f"{name} is one folder for all nodes")

    untried, here = SharedFolder(error="it was not tried"), facts.seen_here.get(folder, ())
    return by_node(
        {n: (n in here, said.folders.get(folder, untried)) for n, said in facts.answered.items()},
        judge,
    )


def _room(facts: Facts) -> list[Finding]:
    job, places = facts.job, [n.folders for n in facts.answered.values()]
    folder, keep = str(job.settings.drain_dir), job.settings.drain_keep
    free = min((f[folder].free_bytes for f in places), default=0)
    snapshot = job.shard_bytes * job.spec.ranks_per_node * len(job.active)
    text = f"{folder} is one folder with {format_bytes(free)} free"
    if free < min(2, keep + 1) * snapshot:
        advice = "make room for two snapshots: the new one is written before the old one goes"
        return [refuse(text, advice)]
    if free < (keep + 1) * snapshot:
        kept = format_bytes((keep + 1) * snapshot)
        advice = f"--drain-keep {keep} needs {kept}; later drains will fail"
        return [warn(text, advice)]
    return [ok(text)]


def contents(facts: Facts) -> list[Finding]:
    job = facts.job
    return [ok(rule(megatron=job.megatron, deepspeed=job.deepspeed))]


CHECKS: Mapping[str, Callable[[Facts], Iterable[Finding]]] = {
    "nodes": reachable,
    "spares": spares,
    "protection": protection,
    "fewer nodes": fewer,
    "contents": contents,
    "slurm": slurm,
    "steps": steps,
    "versions": node_checks.frameworks,
    "same code": same_code,
    "arena folder": node_checks.arena_folder,
    "memory": node_checks.memory,
    "copies": node_checks.copies,
    "threads": node_checks.threads,
    "same arena": node_checks.same_arena,
    "containers": node_checks.containers,
    "RemoveIPC": node_checks.remove_ipc,
    "encoders": encoders,
    "health": node_checks.health,
    "drain folder": drain_folder,
    "export folder": export_folder,
}


def judge(facts: Facts) -> list[Finding]:
    found = [(name, finding) for name, check in CHECKS.items() for finding in check(facts)]
    return [finding._replace(check=name) for name, finding in found]
