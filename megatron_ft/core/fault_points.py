"""Named places in our code at which faults can be made to strike; see docs/how-to/chaos.md.

Where no plan is armed a place costs one call and one test.  A plan is armed by an
environment variable that only the supervisor of a chaos job sets, so that all processes of
that job inherit it; fault_plan.py then carries out what strikes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

VARIABLE = "MEGATRON_FT_CHAOS"
"""Names the folder of a chaos job; no process outside of one has it."""
FRAMEWORK_OCCASIONS = ("export", "no spare", "state grown")
"""Occasions that only other jobs meet: they export, can shrink to fewer nodes, or grow."""


@dataclass(frozen=True)
class Point:
    """One place: which process reaches it, on what occasion, what is done by then and what not.

    ``occasion`` is "training" for what every snapshot passes, else what must happen before
    the place is reached: "drain", "export", "capture given up", "trainer lost", "node lost",
    "smp lost", "supervisor lost", "no spare" or "state grown".
    """

    name: str
    role: str
    occasion: str
    text: str


_ALL = (
    Point("capture.permitted", "trainer", "training", "permit read; nothing copied"),
    Point("capture.begun", "trainer", "training", "what may change is copied; the rest is not"),
    Point("capture.piece", "trainer", "training", "a piece copied (GPU: queued), not all"),
    Point("capture.copied", "trainer", "training", "all bytes copied; no digests"),
    Point("capture.digested", "trainer", "training", "digests written; SEALED not told"),
    Point("smp.capturing.stored", "smp", "training", "header CAPTURING stored; nothing written"),
    Point("smp.granted", "smp", "training", "permit word stored; not answered"),
    Point("smp.sealed", "smp", "training", "seal decided; its header not stored"),
    Point("smp.sealed.stored", "smp", "training", "header SEALED stored; coordinator not told"),
    Point("smp.encoding.stored", "smp", "training", "parity marked invalid; no order to encoders"),
    Point("smp.protected", "smp", "training", "parity complete; header PROTECTED not stored"),
    Point("smp.protected.stored", "smp", "training", "header PROTECTED stored; nobody told"),
    Point("smp.committed", "smp", "training", "commit decided; commit word not stored"),
    Point("smp.committed.stored", "smp", "training", "commit word stored; not answered"),
    Point("smp.freed", "smp", "capture given up", "snapshot given up; header FREE not stored"),
    Point("smp.freed.stored", "smp", "capture given up", "header FREE stored; nobody told"),
    Point("encode.ordered", "encoder", "training", "order taken; no byte of parity written"),
    Point("encode.half", "encoder", "training", "half of the parity written"),
    Point("encode.done", "encoder", "training", "parity complete and verified; not told"),
    Point("commit.first", "supervisor", "training", "all protected; commit sent to nobody"),
    Point("commit.between", "supervisor", "training", "commit sent to one node, not to the next"),
    Point("commit.last", "supervisor", "training", "commit answered by all; nobody told"),
    Point("drain.held", "drain", "drain", "snapshot pinned; nothing written"),
    Point("drain.writing", "drain", "drain", "part of a shard written"),
    Point("drain.shard_written", "drain", "drain", "a shard has its name; no manifest"),
    Point("drain.manifest", "drain", "drain", "manifest written; it has not its name"),
    Point("drain.published", "drain", "drain", "checkpoint complete; older ones not removed"),
    Point("export.written", "drain", "export", "all files written; they have not their name"),
    Point("export.renamed", "drain", "export", "the export has its name; not announced"),
    Point("export.announced", "drain", "export", "announced; older exports not removed"),
    Point("smp.admitting", "smp", "trainer lost", "incarnation noted; older writers alive"),
    Point("smp.admitted", "smp", "trainer lost", "older writers dead; inventory not answered"),
    Point("restore.verified", "trainer", "trainer lost", "objects checked; nothing loaded"),
    Point("restore.half", "trainer", "trainer lost", "half verified and loaded"),
    Point("restore.done", "trainer", "trainer lost", "all loaded; not told"),
    Point(
        "recovery.admitting", "supervisor", "trainer lost", "new incarnation; no node knows of it"
    ),
    Point("recovery.between", "supervisor", "trainer lost", "one node admitted, others perhaps"),
    Point("recovery.noted", "supervisor", "trainer lost", "notes written, without their name"),
    Point("recovery.adopted", "supervisor", "trainer lost", "lineage adopted; nothing rebuilt"),
    Point("recovery.committing", "supervisor", "trainer lost", "all complete; not committed again"),
    Point("recovery.ready", "supervisor", "trainer lost", "restored; no trainer started"),
    Point("recovery.trainer_started", "supervisor", "trainer lost", "one trainer started"),
    Point("shrink.chosen", "supervisor", "no spare", "fewer nodes chosen; not noted"),
    Point("shrink.noted", "supervisor", "no spare", "fewer nodes noted; not told, no trainer"),
    Point("reshape.source", "smp", "no spare", "one arena made a source, others perhaps not"),
    Point("reshape.sources", "supervisor", "no spare", "all arenas made sources; no new arena"),
    Point("reshape.ordered", "encoder", "no spare", "order taken; nothing of it written"),
    Point("reshape.half", "encoder", "no spare", "about half of the new shards filled"),
    Point("reshape.filled", "supervisor", "no spare", "all new shards sealed; not committed"),
    Point("renewal.noted", "supervisor", "state grown", "older layout noted; arenas as they were"),
    Point("renewal.aside", "supervisor", "state grown", "all arenas made sources; no larger one"),
    Point("renewal.made", "supervisor", "state grown", "larger arenas made; not noted, not told"),
    Point("renewal.told", "supervisor", "state grown", "trainers told of them; none awaited"),
    Point("rebuild.target", "smp", "node lost", "arena made for a lost shard; it is empty"),
    Point("rebuild.ordered", "encoder", "node lost", "order taken; nothing rebuilt"),
    Point("rebuild.half", "encoder", "node lost", "half of a lost shard solved"),
    Point("rebuild.done", "encoder", "node lost", "lost shard complete and checked; not told"),
    Point("adopt.arena", "smp", "smp lost", "arena adopted; who writes to it is not known"),
    Point("adopt.writers", "smp", "smp lost", "writers known; what was unfinished not dropped"),
    Point("adopt.done", "smp", "smp lost", "all adopted; not served yet"),
    Point("restart.state_read", "supervisor", "supervisor lost", "notes read; nobody asked"),
)

POINTS = {point.name: point for point in _ALL}
"""Every place by its name."""


def reach(name: str) -> None:
    """This process is at a place now.  Returns, unless a fault was planned for here."""
    if _strike is not None:
        _strike(name)


def _first(name: str) -> None:
    """Look for a plan when the first place is reached: a forked process has a new environment."""
    global _strike
    _strike = None
    folder = os.environ.get(VARIABLE)
    if folder:
        _strike = import_module("megatron_ft.core.fault_plan").arm(folder)
    reach(name)


_strike: Callable[[str], None] | None = _first
