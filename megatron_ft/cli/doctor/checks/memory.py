"""Memory for arenas."""

from __future__ import annotations

from megatron_ft.arena.limits import MemoryReading, format_bytes, memory_shortfall
from megatron_ft.cli.doctor.facts import ArenaPlace, Facts, NodeFacts
from megatron_ft.cli.doctor.finding import Finding, Judged, Verdict, by_node
from megatron_ft.cli.doctor.needs import node_bytes, shortest_scheme

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
