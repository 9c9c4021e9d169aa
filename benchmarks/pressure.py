"""Iterations under hogs, with a budget of the 99th percentile and without one.

python -m benchmarks.pressure                  # the table, some 12 minutes
python -m benchmarks.pressure --hog processor  # one row

Two ranks train on nodes of their own.  In the middle of a job each rank starts a hog, and ends it
later.  An iteration is compared with those of the same job, under the same hog, beside which no
snapshot is under way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.jobs import Jobs, supervised
from megatron_ft import SnapshotConfig, SnapshotManager
from tests.programs.governed_training import DearCopier

SLOW = "slow copies"
HOGS = ("none", "processor", "memory", "network", "storage", SLOW)
SLOW_SECONDS = 0.5
"""Time for which a snapshot holds training under the hog SLOW, as a busy link to a GPU does."""
INTERVAL = 20
BUDGET_PERCENT = 10
BEGIN, LENGTH, AFTER = 150, 800, 500
"""Iterations before the hog, under it and after it."""
MIB = 32
HOG_SECONDS = 600
"""A hog ends by itself, should its rank have died."""
PRODUCTS = 5


RUNGS = {
    "as ever": (),
    "encode at 16 MiB/s": ("--encode-bandwidth-mib", "16"),
    "local only": ("--protect", "none"),
}


class Line(NamedTuple):
    """One iteration; ``phase``: "" without a snapshot, else "copy" or "parity"."""

    iteration: int
    seconds: float
    phase: str
    captured: bool


def hog(kind: str) -> None:
    """Disturb until killed."""
    signal.alarm(HOG_SECONDS)
    if kind == "processor":
        while True:
            sum(range(10_000))
    if kind == "memory":
        source, target = np.ones(16 << 20), np.ones(16 << 20)
        while True:
            np.copyto(target, source)
    if kind == "network":
        ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
        theirs.connect(ours.getsockname())
        receiver, piece = ours.accept()[0], bytes(1 << 20)
        threading.Thread(target=lambda: [receiver.recv(1 << 20) for _ in iter(int, 1)]).start()
        while True:
            theirs.sendall(piece)
    with tempfile.TemporaryFile() as file:
        while True:
            file.seek(0)
            file.write(bytes(16 << 20))
            os.fsync(file.fileno())


class Plan(msgspec.Struct, frozen=True):
    """The work of a rank: its state, its iterations, the hog beside them, and whether it drains."""

    out: str
    hog: str = "none"
    mib: int = MIB
    iterations: int = BEGIN + LENGTH + AFTER
    drains: str = ""


def rank(plan: Plan) -> None:
    """Train; rank 0 writes one line an iteration.  Half of the state is alike on both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alike = {f"w{i}": dist.group.WORLD for i in range(4)}
    copier = DearCopier(1 << 20) if plan.hog == SLOW else None
    snapshots = SnapshotManager(SnapshotConfig.from_env(), replicated=alike, copier=copier)
    state = {f"w{i}": torch.zeros(plan.mib << 15) for i in range(8)}
    snapshots.load(into=state)
    left, lines, ticket = torch.rand(192, 192), list[Line](), None
    started, disturber = time.monotonic(), None
    for iteration in range(1, plan.iterations + 1):
        if copier is not None:
            copier.seconds = SLOW_SECONDS if BEGIN <= iteration < BEGIN + LENGTH else 0.0
        elif iteration == BEGIN and plan.hog != "none":
            words = [sys.executable, "-m", "benchmarks.pressure", "--disturb", plan.hog]
            disturber = subprocess.Popen(words)
        if iteration == BEGIN + LENGTH and disturber is not None:
            disturber.kill()
            disturber.wait()
        phase = "drain" if plan.drains and any(Path(plan.drains).glob("*/.*.tmp")) else ""
        if ticket is not None and not ticket.committed.done():
            phase = "parity" if ticket.captured.done() else "copy"
        for _ in range(PRODUCTS):
            left @ left
        dist.all_reduce(torch.zeros(1))
        with snapshots.fence():
            torch._foreach_add_(list(state.values()), 1.0)
        now, before = time.monotonic(), started
        started = now
        latest = snapshots.save(iteration, state)
        ticket = ticket if latest.skipped else latest
        lines.append(Line(iteration, now - before, phase, not latest.skipped))
    if dist.get_rank() == 0:
        Path(plan.out).write_text(json.dumps(lines))
    snapshots.close()
    dist.destroy_process_group()


def measured(plan: Plan, folder: Path, *flags: str, interval: int = INTERVAL) -> list[Line]:
    """One job."""
    text = msgspec.json.encode(plan).decode()
    program = [sys.executable, "-m", "benchmarks.pressure", "--rank", text]
    supervised(program, 2, folder, 900, interval, more_flags=flags)
    return [Line(*line) for line in json.loads(Path(plan.out).read_text())]


def under_hog(kind: str, *flags: str) -> list[Line]:
    """One job under one hog."""
    with Jobs(1, "cpu", Path("/dev/shm"), 0).folder() as folder:
        return measured(Plan(str(folder / "lines.json"), kind), folder, *flags)


def p99(lines: list[Line]) -> float:
    """The 99th percentile in milliseconds."""
    return 1000 * float(np.quantile([line.seconds for line in lines], 0.99, method="higher"))


def figures(lines: list[Line]) -> dict[str, Any]:
    """Figures of one job: its iterations under the hog, and its end."""
    under = [line for line in lines if BEGIN <= line.iteration < BEGIN + LENGTH]
    quiet = p99([line for line in under if not line.phase])
    late = [line for line in under if line.phase and 1000 * line.seconds > 1.1 * quiet]
    taken = [line.iteration for line in lines if line.captured]
    after = [iteration for iteration in taken if iteration >= BEGIN + LENGTH]
    gaps = [b - a for a, b in zip(after, after[1:], strict=False)]
    # Full protection: from there on every snapshot follows the last one at the interval.
    back = next((a for i, a in enumerate(after) if all(g <= 2 * INTERVAL for g in gaps[i:])), None)
    snapshots = sum(line.captured for line in under)
    return {
        "quiet": quiet,
        "ratio": p99(under) / quiet,
        "snapshots": snapshots,
        "late_copy": sum(line.phase == "copy" for line in late) / max(1, snapshots),
        "late_parity": sum(line.phase == "parity" for line in late) / max(1, snapshots),
        "back": None if back is None else back - BEGIN - LENGTH,
    }


def row(kind: str) -> str:
    """One line of the table."""
    budget = ("--p99-budget-percent", str(BUDGET_PERCENT))
    free, bound = figures(under_hog(kind)), figures(under_hog(kind, *budget))
    late = f"{free['late_copy']:.2f} / {free['late_parity']:.2f}"
    return (
        f"| {kind} | {free['quiet']:.1f} | {free['ratio']:.2f} | {free['snapshots']} | {late} | "
        f"{bound['quiet']:.1f} | {bound['ratio']:.2f} | {bound['snapshots']} | {bound['back']} |"
    )


def rung(kind: str, name: str) -> str:
    """One line of the table of other ways to do less, without a budget."""
    found = figures(under_hog(kind, *RUNGS[name]))
    late = f"{found['late_copy']:.2f} | {found['late_parity']:.2f}"
    return f"| {kind} | {name} | {found['ratio']:.2f} | {found['snapshots']} | {late} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hog", action="append", choices=HOGS)
    parser.add_argument("--rungs", action="store_true", help="other ways to do less")
    parser.add_argument("--disturb", help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.disturb:
        hog(options.disturb)
    if options.rank:
        rank(msgspec.json.decode(options.rank, type=Plan))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"{date.today()}, {os.cpu_count()} cores, budget {BUDGET_PERCENT} %, every {INTERVAL}\n")
    if options.rungs:
        print("| hog | way | p99 / quiet | snapshots | late in the copy | late in parity |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for kind in options.hog or ("processor", "memory"):
            for name in RUNGS:
                print(rung(kind, name), flush=True)
        return
    columns = ["hog", "p99 quiet, ms", "p99 / quiet", "snapshots", "late a snapshot: copy / parity"]
    columns += ["p99 quiet, budget", "p99 / quiet, budget", "snapshots, budget", "back after"]
    print("| " + " | ".join(columns) + " |")
    print("| --- " + "| ---: " * (len(columns) - 1) + "|")
    for kind in options.hog or HOGS:
        print(row(kind), flush=True)


if __name__ == "__main__":
    main()
