"""Checks of what each node and its trainers have: versions, memory, limits, habits of the site.

Pure, as checks.py, whose table names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ft.arena.limits import format_bytes, memory_shortfall, node_bytes
from megatron_ft.cli.doctor.facts import Facts, NodeFacts, TrainerFacts
from megatron_ft.cli.doctor.report import Finding, Severity, by_node, ok, refuse, warn
from megatron_ft.core.cores import MOST_DIGEST_THREADS, MOST_THREADS, share_of
from megatron_ft.core.frameworks import DEEPSPEED, MEGATRON, Releases, version_numbers
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, members_of, stripe_sets
from megatron_ft.launchers import container
from megatron_ft.supervisor.health import Vote
from megatron_ft.supervisor.slot_choice import BESIDE_DRAINS, USUAL

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
OLDEST_PYTHON = (3, 10)


def frameworks(facts: Facts) -> list[Finding]:
    """A trainer's Python, torch and the frameworks that the job uses."""
    job = facts.job
    wanted = [r for r, used in ((MEGATRON, job.megatron), (DEEPSPEED, job.deepspeed)) if used]

    def judge(said: TrainerFacts) -> Finding:
        found = [_python(said), _torch(said), *(_framework(said, releases) for releases in wanted)]
        worst = max(found, key=lambda finding: finding.verdict.rank)
        if worst.verdict is not Severity.OK:
            return worst
        return ok(", ".join(finding.text for finding in found))

    findings = by_node(facts.as_trainers, judge)
    if container.python_of(job.spec.command) is None:
        text = "no word of the training command is a Python: versions are of this one"
        findings.append(warn(text, "write `python SCRIPT` in it"))
    return findings


def _python(said: TrainerFacts) -> Finding:
    if version_numbers(said.python) < OLDEST_PYTHON:
        text = f"the trainer's Python is {said.python} ({said.executable})"
        return refuse(text, "take Python 3.10 or newer")
    return ok(f"Python {said.python}")


def _torch(said: TrainerFacts) -> Finding:
    version = said.packages.get("torch")
    if version is None:
        text = f"no torch in the trainer's Python {said.executable}"
        return refuse(text, "install the torch build for your hardware")
    return ok(f"torch {version}")


def _framework(said: TrainerFacts, releases: Releases) -> Finding:
    version = said.packages.get(releases.distribution)
    if version is None:
        text = f"{releases.name} is not installed as {releases.distribution} in {said.executable}"
        if releases is MEGATRON:
            # A checkout on PYTHONPATH has no version that can be read without importing it.
            return warn(text, f"a checkout must be one of {releases.working}")
        return refuse(text, f"install {releases.working}")
    text = f"{releases.distribution} {version}"
    if version_numbers(version) < releases.oldest:
        return refuse(f"{text} is too old", f"install {releases.working}")
    return ok(text)


def arena_folder(facts: Facts) -> list[Finding]:
    """The arena folder: usable, and in memory."""

    def judge(said: NodeFacts) -> Finding:
        arena = said.arena
        if arena.error:
            text = f"arena folder {arena.folder}: {arena.error}"
            return refuse(text, "choose another --arena-dir, or mend its permissions")
        kind = f"{arena.filesystem} of {format_bytes(arena.total_bytes)}"
        if arena.filesystem not in MEMORY_FILESYSTEMS:
            text = f"arenas would be on {kind}: every snapshot is written to a disk"
            return warn(text, "give an --arena-dir on a tmpfs such as /dev/shm")
        return ok(f"arenas are on {kind}")

    return by_node(facts.answered, judge)


THIRD = "a third slot is made beside them, so that snapshots continue while a drain runs"
NO_THIRD = (
    "a third slot, with as much memory left free, does not fit: no snapshot is taken while a "
    "drain runs, and a failure then loses the iterations since it began"
)


def memory(facts: Facts) -> list[Finding]:
    """Every limit of memory against what the arenas will need.

    Nodes that share a machine share its memory, and there spares are not counted.
    """
    job = facts.job
    actual = shortest_scheme(job.active, job.spec.domains, job.scheme)
    sizes, slots = (job.shard_bytes, job.spec.ranks_per_node), job.settings.fixed_slots
    third = not slots and job.settings.drain_dir is not None
    each = node_bytes(*sizes, slots or USUAL, actual)
    machines = [said.machine for said in facts.answered.values()]
    arithmetic = (
        f"{format_bytes(job.shard_bytes)} a shard x {job.spec.ranks_per_node} ranks x "
        f"{slots or USUAL} slots x (1 + {actual.parity_members}/{actual.data_members})"
    )

    def judge(said: NodeFacts) -> Finding:
        together = min(machines.count(said.machine), len(job.active))
        need = together * each
        short = memory_shortfall(need, said.arena.limits)
        shared = f" for {together} nodes on one machine" if together > 1 else ""
        text = f"needs {format_bytes(need)}{shared} = {arithmetic}"
        if short is None:
            more = together * node_bytes(*sizes, BESIDE_DRAINS + 1, actual)
            if third and memory_shortfall(more, said.arena.limits) is not None:
                return warn(f"{text}; {NO_THIRD}", f"leave {format_bytes(more)} free")
            return ok(f"{text}; {THIRD}" if third else text)
        left = format_bytes(max(short.available_bytes, 0))
        advice = (
            "raise that limit (a tmpfs: `mount -o remount,size=...`; a container: its shared "
            "memory size and memory limit), remove what dead jobs keep (`megatron-ft clean`), or "
            "use fewer slots, less parity, or another --arena-dir"
        )
        return refuse(f"{text}, but {short.limit} leaves {left}", advice)

    if job.shard_bytes:
        return by_node(facts.answered, judge)
    limits = [limit for said in facts.answered.values() for limit in said.arena.limits]
    if not limits:
        return []
    tight = min(limits, key=lambda limit: limit.available_bytes)
    text = f"{format_bytes(tight.available_bytes)} left by {tight.limit}; need not known"
    return [warn(text, "give --shard-gib, or --parameters, to have it compared")]


def shortest_scheme(nodes: Sequence[str], domains: Domains, scheme: Scheme) -> Scheme:
    """The scheme of the shortest stripe over these nodes: it costs the most memory.

    The wanted one if stripes cannot be made at all.
    """
    largest = max(map(len, members_of(nodes, domains).values()), default=1)
    sets = stripe_sets(len(nodes), largest, scheme)
    if not scheme.parity_members or not sets:
        return scheme
    return scheme.shortened(min(len(nodes) // sets, scheme.members))


def same_arena(facts: Facts) -> list[Finding]:
    """SMP, trainer and encoder of a node must see one file system: one inode of the marker."""
    ranks, trainers = facts.world.ranks if facts.world else {}, facts.as_trainers
    findings = []
    for node, said in facts.answered.items():
        smp, folder = (said.arena.device, said.arena.inode), Path(said.arena.folder)
        if isinstance(facts.trainers.get(node), str):
            text = f"a process started as a trainer: {facts.trainers[node]}"
            advice = "run the training command's Python on that node by hand"
            findings.append(refuse(text, advice, node))
        elif said.arena.error:
            continue
        trainer = trainers.get(node)
        if trainer is not None and (trainer.device, trainer.inode) != smp:
            reason = trainer.error or "it has another file there"
            advice = _mount(folder)
            if trainer.user not in (-1, said.user):
                advice = "it is another user's: see the next line"
            text = f"a trainer does not see the SMP's arena folder: {reason}"
            findings.append(refuse(text, advice, node))
        if node in ranks and (ranks[node].device, ranks[node].inode) != smp:
            text = "an encoder does not see the SMP's arena folder: it has another file there, or "
            findings.append(refuse(f"{text}none", _mount(folder), node))
    if findings or not facts.answered:
        return findings
    who = "SMP, trainer and encoder" if ranks else "SMP and trainer"
    return [ok(f"{who} of each node see one inode")]


def _mount(node_dir: Path) -> str:
    """Advice to mount the folder of all users' jobs, which is the usual one, or of this user's."""
    shared = node_dir.is_relative_to("/dev/shm")
    folder = Path(*node_dir.parts[:3]) if shared else node_dir.parents[1]
    return (
        f"show the container the host's {folder} at the same path: `--volume` of docker, "
        "`--bind` of apptainer, `--container-mounts` of pyxis; for /dev/shm also `--ipc host`"
    )


def containers(facts: Facts) -> list[Finding]:
    """An SMP watches and ends trainers by their numbers, as the user that it is itself."""
    trainers = facts.as_trainers

    def judge(pair: tuple[NodeFacts, TrainerFacts]) -> Finding:
        smp, trainer = pair
        if trainer.user not in (-1, smp.user):
            text = f"trainers are user {trainer.user}, their SMP is user {smp.user}"
            return refuse(text, f"start the container with `--user {smp.user}`")
        if 0 not in (pids := (smp.pid_namespace, trainer.pid_namespace)) and len(set(pids)) > 1:
            text = "trainers have process numbers of their own, by which no SMP can watch them"
            return refuse(text, "give the container `--pid host`")
        return ok("SMP and trainers know each other by number and user")

    both = {n: (said, trainers[n]) for n, said in facts.answered.items() if n in trainers}
    return by_node(both, judge)


def copies(facts: Facts) -> list[Finding]:
    """Reports whether bytes are copied and digested in one pass on the CPU."""

    def judge(said: NodeFacts) -> Finding:
        return warn(said.copies, said.copies_advice) if said.copies_advice else ok(said.copies)

    return by_node(facts.answered, judge)


def threads(facts: Facts) -> list[Finding]:
    """Threads with which each rank restores, and digests what a GPU's copy brings."""
    trainers, ranks = facts.as_trainers, facts.job.spec.ranks_per_node
    given = facts.job.settings.fixed_copy_threads
    both = {n: (said, trainers[n]) for n, said in facts.answered.items() if n in trainers}

    def judge(pair: tuple[NodeFacts, TrainerFacts]) -> Finding:
        node, trainer = pair
        share = share_of(trainer.cores, node.cores, ranks)
        text = f"ranks restore with {given or min(share, MOST_THREADS)} threads and digest with "
        text += f"{given or min(share, MOST_DIGEST_THREADS)} (--copy-threads {given or 'auto'}): "
        text += f"{node.cores} cores for {ranks} ranks, of which a rank may run on {trainer.cores}"
        if trainer.cores == 1 < node.cores // ranks:
            return warn(text, "bind ranks to more cores (srun --cpus-per-task), or not at all")
        return ok(text)

    return by_node(both, judge)


def remove_ipc(facts: Facts) -> list[Finding]:
    """logind removes a user's files in /dev/shm when the user's last session ends."""

    def judge(said: NodeFacts) -> Finding:
        if not said.removes_ipc:
            return ok("no logind removes this user's files in /dev/shm")
        text = "RemoveIPC is on: arenas in /dev/shm vanish with your last login session"
        return warn(text, "RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger`")

    return by_node(facts.answered, judge)


def health(facts: Facts) -> list[Finding]:
    """The health command, run once on each node as before a start."""
    votes = facts.votes

    def judge(vote: Vote) -> Finding:
        if vote.verdict == "healthy":
            return ok("the health command succeeds")
        text = f"the health command: {vote.reason}"
        if all(other.unrunnable for other in votes.values()):
            return refuse(text, "give its path on the nodes, and make it executable")
        return warn(text, "repair it: a node that fails is used only without a spare")

    return by_node(votes, judge)
