"""Background work keeps away from training: priority, CPUs, NUMA nodes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena import limits
from megatron_ft.arena.limits import home_node, machine_nodes, node_of_process, preferring
from megatron_ft.config import SnapshotConfig
from megatron_ft.core import private_files
from megatron_ft.core.background import (
    BACKGROUND_CPUS,
    bind_to_background_cpus,
    parse_cpus,
    shown,
    started_low,
)
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import ConfigError, DrainError
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Server
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.store import free
from megatron_ft.supervisor.drains import run_step
from megatron_ft.supervisor.spec import JobSpec
from tests.support.smp_node import create, run, service

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
SETS = st.sets(st.integers(0, 40), min_size=1)


@given(SETS)
def test_lists_of_cpus_are_read_as_they_are_shown(cpus: set[int]) -> None:
    assert parse_cpus(shown(cpus)) == cpus
    assert SnapshotConfig(background_cpus=shown(cpus)).background_cpus == shown(cpus)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-9999999", "1.5"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpus(text)
    if text:
        with pytest.raises(ConfigError, match="such as 0-3,8"):
            SnapshotConfig(background_cpus=text)


def test_cpus_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = tmp_path / "online"
    online.write_text("0-1,4\n")
    monkeypatch.setenv(BACKGROUND_CPUS, "1-6")
    with pytest.raises(ConfigError, match=r"no CPU 2-3,5-6: it has 0-1,4; name"):
        bind_to_background_cpus(online)


def test_cpus_that_the_job_may_not_use_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = tmp_path / "online"
    online.write_text("0-65535")
    monkeypatch.setenv(BACKGROUND_CPUS, "65000")
    with pytest.raises(ConfigError, match="may not use CPU 65000 here"):
        bind_to_background_cpus(online)


THREADS = """
import os, sys, threading
from megatron_ft.core.background import bind_to_background_cpus
from megatron_ft.core.background import lower_priority
bind_to_background_cpus()
lower_priority()
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
print(len(os.listdir("/proc/self/task")), flush=True)
sys.stdin.read()
"""


@X86
def test_every_thread_has_the_low_priority_and_its_cpus() -> None:
    cpu = max(os.sched_getaffinity(0))
    child = subprocess.Popen(
        [sys.executable, "-c", THREADS],
        env={**os.environ, BACKGROUND_CPUS: str(cpu)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert int(child.stdout.readline()) >= 2
        tasks = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
        nice = max(os.getpriority(os.PRIO_PROCESS, 0), 10)
        assert len(tasks) >= 2
        assert {nice_of(child.pid, task) for task in tasks} == {nice}
        assert {io_class(task) for task in tasks} == {3}
        assert all(os.sched_getaffinity(task) == {cpu} for task in tasks)
    finally:
        child.communicate(timeout=30)


def test_background_work_has_its_priority_from_its_start() -> None:
    """And calling it low once more does not lower it further."""
    shows = "from os import nice; print(nice(0)); "
    shows += "from megatron_ft.core.background import lower_priority; "
    command = [sys.executable, "-c", shows + "lower_priority(); print(nice(0))"]
    said = subprocess.run(started_low(command), capture_output=True, check=True, timeout=30)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert said.stdout.split() == [str(min(own + 10, 19)).encode()] * 2


@pytest.mark.parametrize("step", ["write", "export", "load"])
def test_only_the_step_that_training_waits_for_has_trainings_priority(
    step: str, tmp_path: Path
) -> None:
    started: list[Sequence[str]] = []

    class Refusing:
        """A launcher, and a plan, that get no further than the command."""

        def start(self, node: str, argv: Sequence[str], *_: object) -> None:
            started.append(argv)
            raise DrainError("enough")

        def to_json(self) -> str:
            return "{}"

    spec = JobSpec(name="low", command=("true",), nodes=4, log_dir=tmp_path)
    with pytest.raises(DrainError, match="enough"):
        plans: Any = {"node0": Refusing()}
        asyncio.run(run_step(cast(Launcher, Refusing()), spec, 1, step, plans))
    assert (started[0][0] == "nice") == (step != "load")


def nice_of(pid: int, task: int) -> int:
    """Field 19 of a thread's stat (proc(5))."""
    text = Path(f"/proc/{pid}/task/{task}/stat").read_text()
    return int(text.rsplit(")", 1)[1].split()[16])


def io_class(task: int) -> int:
    """ioprio_get(2); 252 is its number."""
    return int(ctypes.CDLL(None).syscall(252, 1, task)) >> 13


@given(st.lists(SETS, min_size=1, max_size=4), SETS)
def test_a_home_node_has_all_cpus_of_the_process(groups: list[set[int]], cpus: set[int]) -> None:
    nodes, seen = {}, set[int]()
    for number, group in enumerate(groups):
        nodes[number] = group - seen
        seen |= group
    home = home_node(cpus, nodes)
    fits = [number for number, group in nodes.items() if cpus <= group]
    assert home == (fits[0] if fits and len(nodes) > 1 else None)


def test_one_node_leaves_nothing_to_choose() -> None:
    assert home_node({0}, {0: {0, 1}}) is None
    assert home_node({0}, {0: {0, 1}, 1: set()}) == 0, "the other has memory alone"
    assert home_node({0, 2}, {0: {0, 1}, 1: {2, 3}}) is None, "it runs on both"
    assert node_of_process(1 << 22) is None


def test_the_machine_s_nodes_are_read(tmp_path: Path) -> None:
    for number, cpus in ((0, "0-1,4\n"), (1, "2-3\n"), (2, "\n")):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(cpus)
    (tmp_path / "power").mkdir()
    assert machine_nodes(tmp_path) == {0: {0, 1, 4}, 1: {2, 3}, 2: set()}


@X86
@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_the_kernel_takes_the_wish_and_forgets_it_afterwards() -> None:
    node = min(machine_nodes() or {0: frozenset()})
    with preferring(node) as agreed:
        assert agreed and policy() == 1
    assert policy() == 0
    with preferring(None) as agreed:
        assert not agreed and policy() == 0
    with preferring(1023) as agreed:
        assert not agreed, "there is no such node"


@X86
@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_an_arena_is_made_on_the_node_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks one keeps to the CPUs of a node; the other has not come yet."""
    cpu, asked, allocate = min(os.sched_getaffinity(0)), list[int](), os.posix_fallocate
    monkeypatch.setattr(limits, "machine_nodes", lambda: {0: {cpu}, 1: {cpu + 1}})

    def noted(descriptor: int, offset: int, length: int) -> None:
        if length > private_files.SPARE_BYTES:  # an arena, not the node's notes
            asked.append(policy())
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    host = service(ProcessEnvironment("job", "node0", tmp_path, 1))
    host.machine.highest_incarnation = 1
    rank = subprocess.Popen(["sleep", "60"])
    os.sched_setaffinity(rank.pid, {cpu})

    async def make() -> None:
        context = zmq.asyncio.Context()
        socket = Server(context, numbered=True)
        server = ControlServer(host, socket)
        host.writers.add("trainer", "dp0", rank.pid, b"")
        for shard in ("dp0", "dp1"):
            assert await server.decide(b"", create(shard)) == m.Ok()
        socket.socket.close(0)
        context.term()

    try:
        run(make())
        assert asked == [1, 0], "preferred by the first, nothing asked for by the second"
    finally:
        rank.kill()
        rank.wait(30)
        free(host.store.give_up(), [])


def policy() -> int:
    """This thread's mode by get_mempolicy(2); 239 is its number."""
    mode = ctypes.c_int(-1)
    assert ctypes.CDLL(None).syscall(239, ctypes.byref(mode), None, 0, None, 0) == 0
    return mode.value
