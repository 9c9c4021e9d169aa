"""Whether trainers, SMP and encoders can work together where some of them are in containers."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ft.cli.doctor.facts import ArenaPlace, Facts, NodeFacts, TrainerFacts
from megatron_ft.cli.doctor.finding import Finding, Judged, Verdict, by_node
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
