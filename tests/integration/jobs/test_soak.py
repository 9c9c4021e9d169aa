"""The soak: what is judged flat, and a short one whose processes do not grow."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.cli.chaos.runner import ChaosSettings
from tests.support.campaign import plan as p
from tests.support.campaign.growth import (
    BOUNDS,
    ROLES,
    Bound,
    Growth,
    Sample,
    common_slope,
    growth_table,
    in_use,
    judge,
    rise,
    roles,
    sample,
)
from tests.support.campaign.run import EpisodeResult, Limits, run_campaign
from tests.support.chaos_cluster import forked_trainers
from tests.support.warm_host import WarmHost

MIB = 1 << 20
FLAT = Sample("smp", 1, 0, 30 * MIB, MIB, 25, 5)


def incarnation(role: str = "smp", pid: int = 1, count: int = 20, **growth: float) -> list[Sample]:
    """Samples of one process, every 5 snapshots, with something growing by so much a snapshot."""
    found = []
    for number in range(count):
        at = 5 * number
        grown = {name: int(getattr(FLAT, name) + slope * at) for name, slope in growth.items()}
        found.append(replace(FLAT, role=role, pid=pid, snapshots=at, **grown))
    return found


def everybody(**growth: float) -> list[Sample]:
    """Two incarnations of every role; SMPs grow."""
    return [
        one
        for role in ROLES
        for pid in (1, 2)
        for one in incarnation(role, pid, **(growth if role == "smp" else {}))
    ]


def test_what_does_not_grow_is_flat() -> None:
    assert all(line.flat for line in judge(everybody()))


@pytest.mark.parametrize("bound", BOUNDS, ids=[bound.quantity for bound in BOUNDS])
def test_what_grows_is_named(bound: Bound) -> None:
    lines = judge(everybody(**{bound.quantity: 3 * bound.slope + 0.05}))
    assert [(line.role, line.bound.quantity) for line in lines if not line.flat] == [
        ("smp", bound.quantity)
    ]


@pytest.mark.parametrize("bound", BOUNDS, ids=[bound.quantity for bound in BOUNDS])
def test_one_jump_is_no_slope_but_a_rise(bound: Bound) -> None:
    samples = everybody()
    at = next(i for i, one in enumerate(samples) if one.role == "encoder" and one.snapshots == 60)
    jumped = getattr(FLAT, bound.quantity) + int(bound.rise) + 1
    samples[at] = replace(samples[at], **{bound.quantity: jumped})
    grown = [line for line in judge(samples) if not line.flat]
    assert [(line.role, line.bound.quantity) for line in grown] == [("encoder", bound.quantity)]


def test_a_role_that_was_not_looked_at_is_not_flat() -> None:
    samples = [one for one in everybody() if one.role != "encoder"]
    samples += incarnation("encoder", count=5)
    assert {line.role for line in judge(samples) if not line.flat} == {"encoder"}


def test_restarts_do_not_hide_growth_nor_look_like_it() -> None:
    """Each process starts higher than the one before, or lower."""
    rising = [replace(one, anonymous=one.anonymous + 9 * MIB * one.pid) for one in everybody()]
    assert all(line.flat for line in judge(rising))
    hidden = [
        replace(one, anonymous=one.anonymous - 9 * MIB * one.pid)
        for one in everybody(anonymous=100_000.0)
    ]
    assert not all(line.flat for line in judge(hidden))


def test_a_spare_that_is_needed_takes_up_more_and_is_flat() -> None:
    """From then on it is judged as any other."""
    idle = [replace(one, shared=0, descriptors=10, pid=3) for one in incarnation()]
    needed = [replace(one, snapshots=one.snapshots + 100, pid=3) for one in incarnation()]
    assert all(line.flat for line in judge([*everybody(), *idle, *needed]))
    leaking = [
        replace(one, snapshots=one.snapshots + 100, pid=3) for one in incarnation(descriptors=0.5)
    ]
    assert not all(line.flat for line in judge([*everybody(), *idle, *leaking]))


points = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 10**6)), min_size=2, max_size=20, unique=True
)


@settings(deadline=None, max_examples=60)
@given(series=st.lists(points, min_size=1, max_size=4), shift=st.integers(-1000, 1000))
def test_the_slope_knows_no_levels(series: list[list[tuple[int, int]]], shift: int) -> None:
    moved = [[(x, y + shift * i) for x, y in one] for i, one in enumerate(series)]
    assert common_slope(moved) == pytest.approx(common_slope(series), rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(slope=st.floats(-100, 100), xs=st.lists(st.integers(0, 999), min_size=2, unique=True))
def test_the_slope_of_a_line_is_its_own(slope: float, xs: list[int]) -> None:
    line = [(float(x), slope * x) for x in sorted(xs)]
    assert common_slope([line, line]) == pytest.approx(slope, abs=1e-6)
    assert rise(line) <= max(0.0, slope * (max(xs) - min(xs))) + 1e-6


def test_a_sample_sees_each_kind_of_growth() -> None:
    before = sample("smp", os.getpid(), 0)
    assert before is not None
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    # Not from the heap, which may still have what others have freed.
    kept = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(bytes(32 * MIB))
    with open(os.devnull) as _, tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.truncate(file.fileno(), 16 * MIB)
        with mmap.mmap(file.fileno(), 16 * MIB) as memory:
            memory.write(bytes(16 * MIB))
            after = sample("smp", os.getpid(), 1)
    stop.set()
    thread.join(10)
    assert after is not None and len(kept) == 32 * MIB
    assert after.anonymous >= before.anonymous + 30 * MIB
    assert after.shared >= before.shared + 15 * MIB
    assert after.descriptors >= before.descriptors + 2
    assert after.threads >= before.threads + 1


def test_a_host_is_looked_at_once_it_has_a_trainer() -> None:
    host, child = os.getppid(), os.getpid()
    assert in_use([("host", host), ("smp", 1)]) == [("smp", 1)]
    both = [("host", host), ("trainer", child)]
    assert in_use(both) == both
    assert in_use([("host", child), ("trainer", child)]) == [("trainer", child)]


def test_a_process_that_is_gone_is_no_sample() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sample("smp", pid, 0) is None, "a zombie has no memory"
    os.waitpid(pid, 0)
    assert sample("smp", pid, 0) is None


SHAPE = p.JobPlan(0, "rs:3+1", "auto", spares=1, slots=2, drains=False, episodes=())


@given(st.integers(0, 99), st.integers(1, 2000), st.integers(0, 40))
def test_a_soak_is_a_function_of_its_seed(seed: int, snapshots: int, faults: int) -> None:
    planned = p.soak(seed, SHAPE, snapshots=snapshots, faults=faults)
    assert planned == p.soak(seed, SHAPE, snapshots=snapshots, faults=faults)
    assert len(planned.episodes) == faults and planned.gap * faults <= max(snapshots, 2 * faults)
    kinds = [episode.kind for episode in planned.episodes]
    counts = [kinds.count(kind) for kind in p.SOAK]
    assert max(counts) - min(counts) <= 1
    restarts = p.soak(seed, SHAPE, restarts=14)
    assert [e.kind for e in restarts.episodes].count("kill-trainer") == 6


SMPS = 5
"""Nodes of the short soak, its spare included."""

SHORT = 20.0
"""How much more a short soak allows: start-up is a large part of it."""


class Ports:
    """Looks at what the processes of a settled job listen on, and knocks there."""

    def __init__(self) -> None:
        self.open: dict[str, set[int]] = {}
        self.answers: list[bytes] = []
        self.results: list[EpisodeResult] = []

    def look(self, result: EpisodeResult) -> None:
        self.results.append(result)
        if "encoder" not in self.open:
            self._note_ports()

    def _note_ports(self) -> None:
        supervisors = [("supervisor", one.pid) for one in psutil.Process().children()]
        for role, pid in [*roles(self.results[-1].folder.name), *supervisors]:
            if role == "trainer":
                continue  # the framework's own connections
            ports = self.open.setdefault(role, set())
            for one in psutil.Process(pid).net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    ports.add(one.laddr.port)
                    self._knock(one.laddr.port)

    def _knock(self, port: int) -> None:
        null = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        for words in (b"GET / HTTP/1.0\r\n\r\n", null + ready + b"\x00\x03abc"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                peer.settimeout(0.3)
                answer = b""
                try:
                    peer.sendall(words)
                    while more := peer.recv(4096):
                        answer += more
                except OSError:
                    pass
                self.answers.append(answer)


@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.slow
def test_a_short_soak() -> None:
    """Three faults in forty snapshots: nothing grows, and only SMPs are on the network."""
    ports, growth, warm = Ports(), Growth(every=2), WarmHost()
    plan = p.soak(SEED, SHAPE, snapshots=40, faults=3)
    assert {e.kind for e in plan.episodes} == {"kill-encoder", "kill-smp", "kill-trainer"}
    # In a folder of pytest names of sockets may be too long.
    with tempfile.TemporaryDirectory(prefix="mft-soak-") as folder:
        given = ChaosSettings(Path(folder), limit=240.0, **forked_trainers(warm))
        limits = Limits(sys.maxsize, time.monotonic() + 240)
        try:
            run_campaign(iter([plan]), given, limits, 1, ports.look, growth)
        finally:
            warm.close()
    assert len(ports.results) == 4, "the start and each fault"
    assert all(r.ruling.good for r in ports.results), ports.results
    bounds = [replace(b, slope=SHORT * b.slope) for b in BOUNDS]
    lines = judge(growth.samples, bounds=bounds, warm_up=1)
    assert all(line.flat for line in lines), "\n".join(growth_table(lines))
    assert ports.open["supervisor"] == set() == ports.open["encoder"]
    assert len(ports.open["smp"]) == SMPS, "one control plane for each SMP"
    # A greeting has 64 bytes; an error of the handshake may follow, data never.
    assert all(len(answer) <= 100 for answer in ports.answers), ports.answers


SEED = 1
