"""Versions: supported ones, and the same on all nodes.

Whether trainers, SMP and encoders can work together where some of them are in containers.

Folders of exports: written from every node, locked, and no other job's.

Limits of processes and habits of the site that end them.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from megatron_ft.arena.limits import format_bytes
from megatron_ft.cli.doctor.facts import (
    ArenaPlace,
    ExportFolder,
    ExportPlace,
    Facts,
    Finding,
    Judged,
    NodeFacts,
    TrainerFacts,
    Verdict,
    by_node,
)
from megatron_ft.core.frameworks import DEEPSPEED, MEGATRON, Releases, version_numbers
from megatron_ft.supervisor.container import mount_advice, processes_advice

_CONTAINER = re.compile(r"(?:docker|libpod|crio|cri-containerd)[-/]([0-9a-f]{12,64})|/kubepods")


def same_arena(facts: Facts) -> list[Finding]:
    """SMP, trainer and encoder of a node must see one file system: one inode of the marker."""
    joined = facts.world.joined if facts.world else {}
    findings = []
    for node, said in facts.answered.items():
        smp, trainer = _place(said.arena), facts.as_trainers.get(node)
        if isinstance(facts.trainers.get(node), str):
            text = f"a process started as a trainer: {facts.trainers[node]}"
            advice = "run the training command's Python on that node by hand"
            findings.append(Finding("same arena", Verdict.REFUSED, text, advice, (node,)))
        elif said.arena.error:
            continue
        folder = Path(said.arena.folder)
        if trainer is not None and (trainer.device, trainer.inode) != smp:
            reason = trainer.error or "it has another file there"
            advice = mount_advice(facts.wishes.container, _root(folder))
            if trainer.user not in (-1, said.user):
                advice = "it is another user's: see the next line"
            findings.append(_apart(node, "a trainer", reason, advice))
        if node in joined and (joined[node].device, joined[node].inode) != smp:
            reason, advice = "it has another file there, or none", mount_advice("", _root(folder))
            findings.append(_apart(node, "an encoder", reason, advice))
    if findings or not facts.answered:
        return findings
    who = "SMP, trainer and encoder" if joined else "SMP and trainer"
    return [Finding("same arena", Verdict.OK, f"{who} of each node see one inode")]


def same_processes(facts: Facts) -> list[Finding]:
    """An SMP watches and ends trainers by their numbers, as the user that it is itself."""
    runtime = facts.wishes.container

    def judge(pair: tuple[NodeFacts, TrainerFacts]) -> Judged:
        smp, trainer = pair
        if trainer.user not in (-1, smp.user):
            text = f"trainers are user {trainer.user}, their SMP is user {smp.user}"
            return Verdict.REFUSED, text, f"start the container with `--user {smp.user}`"
        if 0 not in (pids := (smp.pid_namespace, trainer.pid_namespace)) and len(set(pids)) > 1:
            text = "trainers have process numbers of their own, by which no SMP can watch them"
            return Verdict.REFUSED, text, processes_advice(runtime)
        if (shared := _container_of(smp.cgroup)) and shared == _container_of(trainer.cgroup):
            return Verdict.OK, "SMP and trainers are in one container: its end takes the memory", ""
        text = f"trainers are started in {runtime}" if runtime else "no container is seen"
        return Verdict.OK, f"{text}; SMP and trainers know each other by number and user", ""

    trainers = facts.as_trainers
    pairs = {n: (said, trainers[n]) for n, said in facts.answered.items() if n in trainers}
    return by_node("containers", pairs, judge)


def _apart(node: str, who: str, reason: str, advice: str) -> Finding:
    text = f"{who} does not see the SMP's arena folder: {reason}"
    return Finding("same arena", Verdict.REFUSED, text, advice, (node,))


def _root(node_dir: Path) -> Path:
    """What is to be mounted: the folder of all users' jobs where that is the usual one."""
    return Path(*node_dir.parts[:3]) if node_dir.is_relative_to("/dev/shm") else node_dir.parents[1]


def _place(arena: ArenaPlace) -> tuple[int, int]:
    return arena.device, arena.inode


def _container_of(cgroup: str) -> str:
    found = _CONTAINER.search(cgroup)
    return found.group(0) if found else ""


CHECK = "export folder"
_UNTRIED = ExportPlace(error="it was not tried")
_ALONE = "see to it that no other job exports there"


def folders(facts: Facts) -> list[Finding]:
    """Where exports go, one after the other; nothing if there are none."""
    return [finding for here in facts.exports for finding in _folder(facts, here)]


def _folder(facts: Facts, here: ExportFolder) -> list[Finding]:
    name = f"{here.flag} {here.folder}"
    fine = f"{name} is one folder, which can be locked; no other job exports there"
    if here.holder:
        text = f"{name}: {here.holder} exports there"
        advice = "give one of them another folder, or wait until the other has ended"
        return [Finding(CHECK, Verdict.REFUSED, text, advice)]
    places = {n: said.exports.get(here.folder, _UNTRIED) for n, said in facts.answered.items()}
    findings = by_node(CHECK, places, partial(_judge, name), fine)
    bad = [finding for finding in findings if finding.verdict is not Verdict.OK]
    if here.problem and all(finding.verdict is not Verdict.REFUSED for finding in bad):
        text = f"{name} cannot be locked ({here.problem})"
        return [Finding(CHECK, Verdict.WARNING, text, _ALONE)]
    return bad or findings


def _judge(name: str, place: ExportPlace) -> Judged:
    if place.error:
        return Verdict.REFUSED, f"{name}: {place.error}", "make it writable on that node"
    if not place.same:
        text = f"{name} is another folder than here"
        return Verdict.REFUSED, text, "mount the same file system at that path on all nodes"
    if place.problem:
        return Verdict.WARNING, f"{name} cannot be locked there ({place.problem})", _ALONE
    if not place.locked:
        text = f"{name}: a lock that is taken here is not seen there"
        advice = (
            "mount it with locks for all machines (NFS: neither nolock nor local_lock; Lustre: "
        )
        return Verdict.WARNING, text, f"{advice}flock), or {_ALONE}"
    return Verdict.OK, "", ""


FEWEST_DESCRIPTORS = 256
FEWEST_CORES = 2
LAST_SYSTEM_USER = 999
"""systemd counts users up to this number as the system's, and never removes what is theirs."""


def descriptors(facts: Facts) -> list[Finding]:
    """Files and sockets: each rank's arenas, and MPI's connections to every other node."""
    wishes = facts.wishes
    need = FEWEST_DESCRIPTORS + 16 * wishes.ranks_per_node + 4 * len(wishes.nodes)

    def judge(said: NodeFacts) -> Judged:
        if 0 <= said.descriptors < need:
            hard = "unlimited" if said.descriptors_hard < 0 else str(said.descriptors_hard)
            text = f"{said.descriptors} open files allowed, {need} may be needed"
            return Verdict.REFUSED, text, f"`ulimit -n {max(need, 4096)}` (hard limit: {hard})"
        allowed = "unlimited" if said.descriptors < 0 else str(said.descriptors)
        return Verdict.OK, f"{allowed} open files allowed, {need} needed at most", ""

    return by_node("descriptors", facts.answered, judge)


def locked_memory(facts: Facts) -> list[Finding]:
    """MPI over InfiniBand registers its buffers, which counts as locked memory."""
    joined = facts.world.joined.values() if facts.world else ()
    if facts.world and facts.world.tcp:
        return [Finding("locked memory", Verdict.OK, "encoders use TCP, which locks none")]
    if joined and all("tcp" in rank.fabric for rank in joined):
        return [Finding("locked memory", Verdict.OK, "MPI is told to use TCP, which locks none")]
    need = facts.wishes.shard_bytes or 1 << 30

    def judge(said: NodeFacts) -> Judged:
        if 0 <= said.locked_memory < need:
            text = f"{format_bytes(said.locked_memory)} may be locked: too little for RDMA"
            advice = "`ulimit -l unlimited` (limits.conf; LimitMEMLOCK of slurmd); TCP needs none"
            return Verdict.WARNING, text, advice
        return Verdict.OK, "locked memory suffices", ""

    return by_node("locked memory", facts.answered, judge)


def remove_ipc(facts: Facts) -> list[Finding]:
    """logind removes a user's files in /dev/shm when the user's last session ends."""

    def judge(said: NodeFacts) -> Judged:
        if said.remove_ipc is None:
            return Verdict.OK, "no logind that removes files in /dev/shm", ""
        if not said.remove_ipc:
            return Verdict.OK, "RemoveIPC=no", ""
        if said.user <= LAST_SYSTEM_USER:
            return Verdict.OK, f"RemoveIPC spares user {said.user}, a system user", ""
        if said.lingers:
            return Verdict.OK, "RemoveIPC spares this user, who lingers", ""
        text = "RemoveIPC is on: arenas in /dev/shm vanish with your last login session"
        advice = "RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger`"
        return Verdict.WARNING, text, advice

    return by_node("RemoveIPC", facts.answered, judge)


def cores(facts: Facts) -> list[Finding]:
    """Trainers, and beside them a core for SMP and encoder."""
    wishes = facts.wishes
    need = wishes.ranks_per_node + 1

    def judge(said: NodeFacts) -> Judged:
        together = sum(s.machine == said.machine for s in facts.answered.values())
        text = f"{said.cpus} cores for {together} nodes x {wishes.ranks_per_node} ranks and an SMP"
        if said.cpus < max(FEWEST_CORES, together * need):
            advice = "give trainers fewer cores, or leave one a node for SMP and encoder"
            return Verdict.WARNING, text, advice
        return Verdict.OK, text, ""

    return by_node("cores", facts.answered, judge)


def steps(facts: Facts) -> list[Finding]:
    """In Slurm, SMP and trainers must be steps of their own: a step dies as a whole."""
    shared = [
        node
        for node, said in facts.answered.items()
        if node in facts.as_trainers and _step(said.cgroup)
        if _step(said.cgroup) == _step(facts.as_trainers[node].cgroup)
    ]
    if facts.no_kill is None and not shared:
        return []
    if not shared:
        return [Finding("steps", Verdict.OK, "SMP and trainers have cgroups of their own")]
    text = "SMP and trainers share the cgroup of one job step: it dies as a whole"
    advice = "start each by an srun of its own, as --launcher slurm does"
    return [Finding("steps", Verdict.REFUSED, text, advice, tuple(shared))]


def _step(cgroup: str) -> str:
    """The job step in the path of a cgroup, empty if there is none."""
    for line in cgroup.splitlines():
        job, _, rest = line.rpartition("/job_")[2].partition("/step_")
        if "/job_" in line and rest and job.isdigit():
            return f"{job}.{rest.partition('/')[0]}"
    return ""


OLDEST_PYTHON = (3, 10)


def frameworks(facts: Facts) -> list[Finding]:
    """What a trainer's Python has, of what the job uses."""
    wishes = facts.wishes
    wanted = [r for r, used in ((MEGATRON, wishes.megatron), (DEEPSPEED, wishes.deepspeed)) if used]

    def judge(said: TrainerFacts) -> Judged:
        problems = [_python(said), _torch(said), *(_framework(said, r) for r in wanted)]
        found = max(problems, key=lambda judged: list(Verdict).index(judged[0]))
        if found[0] is not Verdict.OK:
            return found
        return Verdict.OK, ", ".join(text for _, text, _ in problems), ""

    findings = by_node("versions", facts.as_trainers, judge)
    if not wishes.command_python:
        text = "no word of the training command is a Python: versions are of this one"
        findings.append(Finding("versions", Verdict.WARNING, text, "write `python SCRIPT` in it"))
    return findings


def same(facts: Facts) -> list[Finding]:
    """All nodes must run the same code of ours, and should run the same of others."""
    codes = {said.code for said in facts.answered.values()}
    if len(codes) > 1:
        shown = _groups({node: said.code for node, said in facts.answered.items()})
        text = f"megatron_ft differs between nodes: {shown}"
        return [Finding("same code", Verdict.REFUSED, text, "install one version everywhere")]
    names = {name for said in facts.as_trainers.values() for name in said.packages}
    trainers = facts.as_trainers.items()
    found = {"Python": {node: said.python for node, said in trainers}}
    for name in sorted(names):
        found[name] = {node: said.packages.get(name, "none") for node, said in trainers}
    differing = [f"{name} ({_groups(by)})" for name, by in found.items() if len({*by.values()}) > 1]
    if differing:
        text = f"versions differ between nodes: {'; '.join(differing)}"
        return [Finding("same code", Verdict.WARNING, text, "install one version everywhere")]
    return [Finding("same code", Verdict.OK, "megatron_ft and packages agree on all nodes")]


def _python(said: TrainerFacts) -> Judged:
    if version_numbers(said.python) < OLDEST_PYTHON:
        text = f"the trainer's Python is {said.python} ({said.executable})"
        return Verdict.REFUSED, text, "take Python 3.10 or newer"
    return Verdict.OK, f"Python {said.python}", ""


def _torch(said: TrainerFacts) -> Judged:
    version = said.packages.get("torch")
    if version is None:
        text = f"no torch in the trainer's Python {said.executable}"
        return Verdict.REFUSED, text, "install the torch build for your hardware"
    return Verdict.OK, f"torch {version}", ""


def _framework(said: TrainerFacts, releases: Releases) -> Judged:
    version = said.packages.get(releases.distribution)
    if version is None:
        text = f"{releases.name} is not installed as {releases.distribution} in {said.executable}"
        if releases is MEGATRON:
            # A checkout on PYTHONPATH has no version that can be read without importing it.
            return Verdict.WARNING, text, f"a checkout must be one of {releases.working}"
        return Verdict.REFUSED, text, f"install {releases.working}"
    text = f"{releases.distribution} {version}"
    if version_numbers(version) < releases.oldest:
        return Verdict.REFUSED, f"{text} is too old", f"install {releases.working}"
    return Verdict.OK, text, ""


def _groups(values: dict[str, str]) -> str:
    """``1.0 on n0, n1; 2.0 on n2``."""
    found: dict[str, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in found.items())
