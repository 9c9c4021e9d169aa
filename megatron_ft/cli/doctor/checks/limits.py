"""Limits of processes and habits of the site that end them."""

from __future__ import annotations

from megatron_ft.arena.limits import format_bytes
from megatron_ft.cli.doctor.facts import Facts, NodeFacts
from megatron_ft.cli.doctor.finding import Finding, Judged, Verdict, by_node

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
