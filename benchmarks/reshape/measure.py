"""A state that is brought to fewer ranks: reshaped in memory, or saved, started anew and loaded.

Both ways have the same DTensors, four ranks that save and three, in new processes, that load, and
a memory file system.  Just before each load the memory that it needs is used once and freed, so
that neither way waits for a host to give it to a virtual machine.  What each figure has in it:

- ours, the reshape: from when the last rank asks for the state until the last has it in its
  tensors: arenas are made and filled, digests taken and compared, tensors loaded.
- ours, from the loss of a node: all that follows a kill, the rebuild from parity, the start of
  encoders and of trainers from warm hosts among it, without the time of that use of memory.
- DCP: a second save, as the first one warms up; the start of processes until the last rank has
  built its state; the load.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.jobs import LOG, NODES, Jobs, alone, supervised
from benchmarks.reshape.rank import Plan, Said
from benchmarks.table import Row
from megatron_ft.launchers.virtual import VirtualCluster

OLD, NEW = 4, 3
HOT = 2.5
"""Memory that is used before a load, as a multiple of the whole state."""

LEAST = 10.0
"""Times that a reshape in memory is to be faster than save, restart and load."""

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Checkpointed:
    """Seconds of one round of DCP."""

    save: float
    restart: float
    load: float


@dataclass(frozen=True)
class Reshaped:
    """Seconds of one round of ours; ``filled`` is a part of ``reshape``, and that of ``all``."""

    filled: float
    reshape: float
    all: float


def rows(mib: int, jobs: Jobs) -> Iterator[Row]:
    """All rows, each round with both ways."""
    rounds = [(_checkpointed(mib, jobs), _reshaped(mib, jobs)) for _ in range(jobs.rounds)]
    theirs, ours = zip(*rounds, strict=True)
    yield from report(theirs, ours, f"{OLD} shards of {mib} MiB to {NEW}")


def report(theirs: Sequence[Checkpointed], ours: Sequence[Reshaped], what: str) -> Iterator[Row]:
    """Rows of rounds that were measured."""
    yield _seconds(f"reshape in memory, {what}", [one.reshape for one in ours])
    yield _seconds("of it: filled, sealed and committed", [one.filled for one in ours])
    rest = [one.reshape - one.filled for one in ours]
    yield _seconds("of it: memory of arenas made, tensors loaded", rest)
    yield _seconds("all from the loss of a node", [one.all for one in ours])
    yield _seconds(f"DCP: save by {OLD} ranks", [one.save for one in theirs])
    yield _seconds(f"DCP: start of {NEW} processes", [one.restart for one in theirs])
    yield _seconds(f"DCP: load by {NEW} ranks", [one.load for one in theirs])

    pairs = list(zip(theirs, ours, strict=True))
    whole = tuple((one.save + one.restart + one.load) / other.reshape for one, other in pairs)
    yield Row("DCP's save, start and load over the reshape", whole, limit=LEAST)
    alike = tuple((one.save + one.load) / other.reshape for one, other in pairs)
    yield Row("DCP's save and load over the reshape", alike, note="no start on either side")
    long = tuple((one.save + one.restart + one.load) / other.all for one, other in pairs)
    note = "starts on both sides; ours finds and rebuilds what was lost, too"
    yield Row("DCP's save, start and load over all from the loss", long, note=note)


def _seconds(name: str, samples: Sequence[float]) -> Row:
    return Row(name, tuple(samples), "s", more=False)


def _checkpointed(mib: int, jobs: Jobs) -> Checkpointed:
    with jobs.folder() as folder:
        plan = Plan("dcp", str(folder), mib, OLD, hot_mib=int(HOT * OLD * mib))
        alone(_program(plan), OLD, jobs.limit_seconds)
        saved, started = _said(folder, "save", OLD), time.monotonic()
        alone(_program(plan), NEW, jobs.limit_seconds)
        loaded = _said(folder, "load", NEW)
    built = max(one.built for one in loaded)
    return Checkpointed(_span(saved), built - started, _span(loaded))


def _reshaped(mib: int, jobs: Jobs) -> Reshaped:
    """The last node is lost once a snapshot has its parity."""
    with jobs.folder() as folder:
        plan = Plan("memory", str(folder), mib, OLD, hot_mib=int(HOT * OLD * mib))
        struck: list[float] = []

        def strike(cluster: VirtualCluster) -> None:
            deadline = time.monotonic() + jobs.limit_seconds
            while len(list(folder.glob("save-*.json"))) < OLD:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no snapshot within {jobs.limit_seconds:g} s")
                time.sleep(POLL_SECONDS)
            struck.append(time.monotonic())
            cluster.kill_node(NODES[OLD - 1])

        flags = ("--protect", f"rs:{OLD - 1}+1", "--on-no-spare", "shrink")
        given = (_program(plan), OLD, folder, jobs.limit_seconds)
        supervised(*given, more_flags=flags, meanwhile=strike)
        loaded = _said(folder, "load", NEW)
        found = re.search(
            rf"{OLD} shards reshaped to {NEW} in ([\d.]+) s", (folder / LOG).read_text()
        )
    if found is None:
        raise RuntimeError("the job did not reshape")
    reshape, built = _span(loaded), max(one.built for one in loaded)
    return Reshaped(float(found[1]), reshape, built - struck[0] + reshape)


def _program(plan: Plan) -> list[str]:
    return [sys.executable, "-m", "benchmarks.reshape.rank", msgspec.json.encode(plan).decode()]


def _said(folder: Path, what: str, ranks: int) -> list[Said]:
    files = [folder / f"{what}-{rank}.json" for rank in range(ranks)]
    return [msgspec.json.decode(file.read_bytes(), type=Said) for file in files]


def _span(said: Sequence[Said]) -> float:
    """From when the last rank began until the last was done."""
    return max(one.done for one in said) - max(one.begun for one in said)
