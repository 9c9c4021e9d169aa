"""One reshape on two nodes, or larger arenas made there: real SMPs on real files.

Each step can be the last.

An SMP is started anew for each step, from the files alone.  The choice between layouts, requests
and the reaction to them are the real ones.  Modelled are the order of requests, and encoders: they
write a word that says whose bytes a slot holds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.decide import NOTHING_REJECTED, Decision, StripeState
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.identity import Ancestor, SnapshotId, extend
from megatron_ft.rpc import messages as m
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.service import SmpService
from megatron_ft.smp.store import SOURCE_SUFFIX, SUFFIX
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.orders import create_requests
from megatron_ft.supervisor.recovery import Recovery, RestorePlan
from megatron_ft.supervisor.slot_choice import SlotChoice
from megatron_ft.supervisor.standing import Standing
from tests.protocol.model.judge import Violation
from tests.protocol.model.memory import root_of
from tests.support.arena_samples import make_record
from tests.support.smp_node import service

HOMES = {"dp0": "n0", "dp1": "n1"}
OLDER, NEWER = (StripeState("replica", 1, 1, size, tuple(HOMES), 4096) for size in (4096, 8192))
OLD, AT = SnapshotId(1, 4), 40
Step = tuple[str, str]
"""A step of the reshape, and its node."""


class Died(BaseException):
    """An SMP is killed in the middle of a request."""


@dataclass(frozen=True)
class Job:
    """Files, the supervisor's notes, and the steps that are still to be taken.

    ``sources`` and ``present`` say whether the notes name shards of the older and of the newer
    layout, ``bearable`` that the loss of a node is.
    """

    folder: Path
    todo: tuple[Step, ...] = (("decide", ""),)
    incarnation: int = 1
    lineage: tuple[Ancestor, ...] = (Ancestor(1, None),)
    plan: RestorePlan | None = None
    sources: bool = True
    present: bool = False
    bearable: bool = True
    faults: int = 0
    renews: bool = False

    @property
    def made(self) -> SnapshotId:
        """The snapshot of the newer layout: reshaped, or captured in larger arenas."""
        return SnapshotId(self.incarnation, 9 if self.renews else 0)


@contextmanager
def smp(job: Job, node: str) -> Iterator[SmpService]:
    """The SMP of a node, and no snapshot that is only promised."""
    host = service(ProcessEnvironment("job", node, job.folder / node, job.incarnation))
    try:
        host.store.adopt(host.machine)
        host.machine.highest_incarnation, host.machine.world = job.incarnation, "w"
        yield host
    finally:
        for arena in [*host.store.arenas.values(), *host.store.sources.values()]:
            arena.close()


def obey(host: SmpService, request: m.Message | None = None) -> None:
    """Carry a request out, or what was done to slots directly."""

    async def carry_out() -> None:
        server: Any = None
        if request is not None:
            answer = await ControlServer(host, server, lambda: None).decide(b"", request)
            if answer != m.Ok():
                raise Violation(f"{request} was answered by {answer}")
        host.machine._collect_changes()
        await host.carry_out()

    asyncio.run(carry_out())


def write(host: SmpService, shard: str, snapshot: SnapshotId, *, parity: bool) -> None:
    """The encoders' part: store a shard, and what is needed to rebuild the other one from it."""
    slots, arena = host.machine.shards[shard], host.store.arenas[shard]
    index = slots.begin_rebuild(snapshot, AT)
    arena.data(index, writable=True)[:64] = word(snapshot, shard)
    slots.loaded(record(shard, snapshot))
    if parity:
        protect(host, shard, snapshot)
    obey(host)


def protect(host: SmpService, shard: str, snapshot: SnapshotId) -> None:
    slots = host.machine.shards[shard]
    slots.begin_encode(snapshot)
    slots.protect(snapshot, bytes(32), tuple(record(one, snapshot) for one in HOMES))
    obey(host)


def record(shard: str, snapshot: SnapshotId) -> Any:
    root = root_of((snapshot, shard))
    return make_record(shard_id=shard, snapshot=snapshot, iteration=AT, digest_root=root)


def word(snapshot: SnapshotId | None, shard: str) -> Any:
    return np.frombuffer(f"{snapshot} {shard}".encode().ljust(64), np.uint8)


def begin(folder: Path) -> Job:
    """A job with a protected snapshot, which is to be reshaped at its next start."""
    job = Job(folder)
    for shard, node in HOMES.items():
        (folder / node).mkdir(mode=0o700, parents=True)
        with smp(job, node) as host:
            obey(host, create_requests([OLDER], 1, job.lineage, 2)[shard])
            write(host, shard, OLD, parity=True)
            obey(host, m.Commit(1, OLD, "protected"))
    return job


RENEWAL = "older aside larger present capture local encode protected sources"


def renewing(job: Job) -> Job:
    """The same job, whose trainers train and have outgrown their arenas."""
    return replace(job, todo=_steps(RENEWAL.split()), sources=False, present=True, renews=True)


NOTES = ("bearable", "older", "present", "returned", "sources")


def _steps(names: list[str]) -> tuple[Step, ...]:
    steps = [[("note", n)] if n in NOTES else [(n, x) for x in HOMES.values()] for n in names]
    return tuple(step for some in steps for step in some)


def perform(job: Job) -> Job:
    """Take the next step."""
    (name, node), job = job.todo[0], replace(job, todo=job.todo[1:])
    if name == "decide":
        return decide(job)
    if name == "note":
        if node in ("older", "returned"):
            return replace(job, sources=node == "older", present=node == "returned")
        return replace(job, **{node: node != "sources"})
    with smp(job, node) as host:
        _on_node(job, host, name, next(s for s, home in HOMES.items() if home == node))
    return job


def decide(job: Job) -> Job:
    """Admit all nodes, and say what this incarnation does."""
    job = replace(job, incarnation=job.incarnation + 1)
    decision, fate = choose(job, look(job, stores=True).inventories)
    assert decision.snapshot is not None, "this is judged after each step"
    newest = max((h.arena for h in decision.holdings.values()), key=lambda a: a.incarnation)
    lineage = extend(newest.lineage, job.incarnation, decision.snapshot)
    back = fate == "return" and not job.renews
    given = (decision, HOMES, tuple(HOMES.values()), job.incarnation, lineage, SlotChoice(2))
    plan = RestorePlan(*given, sources=fate, reshaped=back)
    names = ["adopt", *["returned"] * (fate == "return" and job.renews), "rebuild", "restored"]
    names += ["bearable"] * decision.protected
    names += ["source", "arena", "reshape", "fill", "local", "present"] if back else []
    held = job.sources and (fate != "return" or back)
    names += ["encode", "protected", "bearable", "sources"] if held else []
    todo, present = _steps(names), job.present if job.renews else not back
    return replace(job, todo=todo, lineage=lineage, plan=plan, present=present)


def _on_node(job: Job, host: SmpService, name: str, shard: str) -> None:
    plan, new = job.plan, create_requests([NEWER], job.incarnation, job.lineage, 2)
    if plan is None:
        return _renew(job, host, name, shard)
    assert plan.decision.snapshot is not None
    restored, level = plan.decision.snapshot, "protected" if plan.decision.protected else "local"
    newest = job.made if plan.reshaped else restored
    if name == "rebuild" and shard in plan.lost():
        stripes = plan.decision.stripes
        obey(host, create_requests(stripes, job.incarnation, job.lineage, 2)[shard])
        write(host, shard, restored, parity=True)
    elif name == "fill":
        if any((SOURCE_SUFFIX, one, restored) not in look(job).right for one in HOMES):
            raise Violation(f"{shard} is filled from what is not {restored}")
        write(host, shard, job.made, parity=False)
    elif name == "encode" and not host.machine.shards[shard].slots[0].parity_valid:
        protect(host, shard, newest)
    requests: dict[str, m.Message] = {
        "adopt": plan.adoption(HOMES[shard]),
        "restored": m.Commit(job.incarnation, restored, level),
        "source": m.MakeSources(job.incarnation, restored),
        "arena": new[shard],
        "reshape": m.Reshape(job.incarnation, job.made, AT, "w", restored, {}),
        "local": m.Commit(job.incarnation, job.made, "local"),
        "protected": m.Commit(job.incarnation, newest, "protected"),
    }
    if name in requests:
        obey(host, requests[name])


def _renew(job: Job, host: SmpService, name: str, shard: str) -> None:
    larger = create_requests([NEWER], job.incarnation, job.lineage, 2)[shard]
    if name == "capture":
        write(host, shard, job.made, parity=False)
    elif name == "encode":
        protect(host, shard, job.made)
    requests: dict[str, m.Message] = {
        "aside": m.SetAside(job.incarnation, (OLD,)),
        "larger": larger,
        "local": m.Commit(job.incarnation, job.made, "local"),
        "protected": m.Commit(job.incarnation, job.made, "protected"),
    }
    if name in requests:
        obey(host, requests[name])


class Seen(NamedTuple):
    """The inventories of nodes, and the files that are whole: (suffix, shard, snapshot)."""

    inventories: dict[str, m.Inventory]
    right: set[tuple[str, str, SnapshotId | None]]


def look(job: Job, *, stores: bool = False) -> Seen:
    """The inventories if all writers died now; ``stores`` are handled as nodes handle them."""
    seen = Seen({}, set())
    for node in HOMES.values():
        with smp(job, node) as host:
            machine, store = host.machine, host.store
            machine.world = ""
            machine.admit(1 << 30)
            reports = store.reports(machine), store.source_reports()
            seen.inventories[node] = m.Inventory(node, 0, reports[0], sources=reports[1])
            for arena in [*store.arenas.values(), *store.sources.values()]:
                for index, slot in enumerate(map(arena.slot, range(2))):
                    here = (arena.path.suffix, arena.header.shard_id, slot.snapshot)
                    if (arena.data(index)[:64] == word(slot.snapshot, here[1])).all():
                        seen.right.add(here)
            if stores:
                obey(host)
    return seen


def choose(job: Job, inventories: dict[str, m.Inventory]) -> tuple[Decision, m.Sources]:
    """The real recovery's decision on these inventories."""
    seats = HOMES if job.present else {}
    sources = HOMES if job.sources else {}
    record = SimpleNamespace(shards=seats, sources=sources, scheme="", lineage=job.lineage)
    choices = SimpleNamespace(scheme="xor:2", holders=set)
    members: Any = SimpleNamespace(_state=SimpleNamespace(record=record), seats=choices)
    members.places = lambda: seats
    members.owned = partial(Membership.owned, members)
    members.owned_sources = partial(Membership.owned_sources, members)
    spec = SimpleNamespace(name="job", settings=SimpleNamespace(fixed_slots=2))
    doubts = SimpleNamespace(quarantine=NOTHING_REJECTED)
    me: Any = SimpleNamespace(_state=members._state, _members=members, _spec=spec)
    me._quarantine = doubts
    me._standing = Standing(DamagedShards(Observers()))
    me.memory = partial(Recovery.memory, me)
    me.memory_of_sources = partial(Recovery.memory_of_sources, me)
    return Recovery._from_memory(me, inventories)


def judge(job: Job, seen: Seen) -> None:
    """Violation unless the state can be served, also without a node."""
    for gone in (None, *HOMES.values()) if job.bearable else (None,):
        decision, fate = choose(job, {n: x for n, x in seen.inventories.items() if n != gone})
        if decision.snapshot is None:
            raise Violation(f"without {gone} nothing is served: {decision.explanation}")
        for shard in set(HOMES) - {s for some in decision.lost.values() for s in some}:
            if not any(
                (x, shard, decision.snapshot) in seen.right for x in (SUFFIX, SOURCE_SUFFIX)
            ):
                raise Violation(f"{shard} is served as {decision.snapshot}, and is not that")


STRUCK = [(os, "rename"), (os, "replace"), (os, "unlink")]
STRUCK += [(Arena, name) for name in ("write_slot", "write_header", "release")]


def attempt(job: Job, strike: int) -> Job | None:
    """Take the next step, unless an SMP dies before it has changed files so many times."""
    done = count()

    def dying(keep: Any) -> Any:
        def change(*given: Any, **more: Any) -> Any:
            if next(done) == strike:
                raise Died
            return keep(*given, **more)

        return change

    with ExitStack() as stack:
        for owner, name in STRUCK:
            stack.enter_context(patch.object(owner, name, dying(getattr(owner, name))))
        try:
            return perform(job)
        except Died:
            return None


def explore(folder: Path, faults: int, *, renews: bool = False) -> int:
    """Take every run with at most so many faults; the number of states that were found."""
    seen, numbers = set[str](), count()

    def copied(job: Job, lost: str = "") -> Job:
        new = folder / str(next(numbers))
        shutil.copytree(job.folder, new)
        if lost:
            shutil.rmtree(new / lost)
            (new / lost).mkdir(mode=0o700)
        return replace(job, folder=new, bearable=job.bearable and not lost)

    first = begin(folder / "first")
    stack = [renewing(first) if renews else first]
    while stack:
        job = stack.pop()
        now = look(job)
        known = (now.inventories, sorted(map(str, now.right)), job.plan and job.plan.decision)
        view = str((*known, replace(job, folder=folder, plan=None)))
        if view not in seen and job.todo:
            judge(job, now)
            again = replace(job, faults=job.faults + 1, todo=(("decide", ""),))
            if job.faults < faults:
                stack += [copied(again, x) for x in ("", *HOMES.values()) if not x or job.bearable]
            for strike in count() if job.faults < faults else (-1,):
                copy = copied(job)
                after = attempt(copy, strike)
                stack.append(after or replace(again, folder=copy.folder))
                if after is not None:
                    break
        seen.add(view)
        shutil.rmtree(job.folder)
    return len(seen)
