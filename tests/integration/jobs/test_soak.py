"""The soak: what is judged flat, and a short one whose processes do not grow."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.cli.chaos.job import JobFile
from tests.support.soak import plan as p
from tests.support.soak.flatness import BOUNDS, Bound, common_slope, judge, rise
from tests.support.soak.inject import in_use, roles
from tests.support.soak.measure import ROLES, Sample, sample
from tests.support.soak.plan import plan
from tests.support.soak.report import is_good, render
from tests.support.soak.run import Soak, run
from tests.support.warm_host import WarmHost

MIB = 1 << 20
FLAT = Sample("smp", 1, 0, 30 * MIB, MIB, 20 * MIB, 25, 5)


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


@given(
    seed=st.integers(0, 99), snapshots=st.integers(1, 2000), faults=st.integers(0, 40),
    nodes=st.integers(1, 9), ranks=st.integers(1, 3),
)  # fmt: skip
def test_the_plan_is_a_function_of_the_seed(
    seed: int, snapshots: int, faults: int, nodes: int, ranks: int
) -> None:
    planned = plan(seed, snapshots, faults, nodes, ranks)
    assert planned == plan(seed, snapshots, faults, nodes, ranks)
    assert len(planned) == faults
    assert [fault.at for fault in planned] == sorted(fault.at for fault in planned)
    assert all(0 <= f.position < nodes and 0 <= f.local < ranks for f in planned)
    assert all(0 <= fault.at <= snapshots for fault in planned)
    kinds = [fault.kind for fault in planned]
    counts = [kinds.count(kind) for kind in p.KINDS]
    assert max(counts) - min(counts) <= 1


SMPS = 5
"""Nodes of the short soak, its spare included."""

SHORT = 20.0
"""How much more a short soak allows: start-up is a large part of it."""


@pytest.fixture
def server() -> Iterator[str]:
    warm = WarmHost()
    yield warm.path
    warm.close()


class Ports:
    """Looks at what the processes of a running job listen on, and knocks there."""

    def __init__(self) -> None:
        self.open: dict[str, set[int]] = {}
        self.answers: list[bytes] = []

    def look(self, text: str) -> None:
        # Just after its own fault there is no encoder, and an SMP is being replaced.
        if "encoder" in self.open or "after" not in text or "SMP" in text:
            return
        self.open.clear()
        try:
            self._note_ports()
        except psutil.NoSuchProcess:  # it ended meanwhile: the next line finds the one after it
            self.open.clear()
        if len(self.open.get("smp", ())) != SMPS:  # one is starting, or open where none should be
            self.open.clear()

    def _note_ports(self) -> None:
        for role, pid in self._processes():
            if role == "trainer":
                continue  # the framework's own connections
            ports = self.open.setdefault(role, set())
            for one in psutil.Process(pid).net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    ports.add(one.laddr.port)
                    self._knock(one.laddr.port)

    def _processes(self) -> Iterator[tuple[str, int]]:
        for child in psutil.Process().children():
            try:
                command = child.cmdline()
            except psutil.NoSuchProcess:  # a zombie of another test counts as one
                continue
            if "megatron_ft.cli.chaos.job" in command:
                yield "supervisor", child.pid
                job = msgspec.json.decode(Path(command[-1]).read_bytes(), type=JobFile)
                yield from roles(job.name)

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


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets have short names; those in a folder of pytest may be too long."""
    with tempfile.TemporaryDirectory(prefix="mft-soak-") as folder:
        yield Path(folder)


@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.slow
def test_a_short_soak(short_path: Path, server: str) -> None:
    """Three faults in forty snapshots: nothing grows, and only SMPs are on the network."""
    ports = Ports()
    soak = Soak(
        short_path,
        snapshots=40,
        nodes=4,
        ranks_per_node=1,
        spares=1,
        faults=3,
        seed=SEED,
        minutes=4.0,
        every=2,
        iteration_seconds=0.03,
        warm=server,
        tell=ports.look,
    )
    assert [fault.kind for fault in soak.plan()] == [p.ENCODER, p.SMP, p.TRAINER]
    result = run(soak)
    bounds = [replace(b, slope=SHORT * b.slope) for b in BOUNDS]
    lines = judge(result.samples, bounds=bounds, warm_up=1)
    assert is_good(result, lines), render(result, lines)
    assert result.protected >= 40 and sum(result.faults.values()) == 3
    assert ports.open, "never did each of the SMPs, and nothing else of theirs, listen"
    assert ports.open["supervisor"] == set() == ports.open["encoder"]
    assert len(ports.open["smp"]) == SMPS, "one control plane for each SMP"
    # A greeting has 64 bytes; an error of the handshake may follow, data never.
    assert all(len(answer) <= 100 for answer in ports.answers), ports.answers


SEED = 1943
