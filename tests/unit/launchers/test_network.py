"""The network of virtual nodes: what is cut, delayed or limited is, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from megatron_ft.launchers.launcher import UNKNOWN_EXIT
from tests.support import namespaces
from tests.support.networked_cluster import RemoteProcess
from tests.support.networks import arrives, can_connect, connection, needs_network, seconds_for
from tests.support.node_network import HOST, NodeNetwork, remove_leftovers

NODES = ["n0", "n1", "n2"]


@pytest.fixture
def network() -> Iterator[NodeNetwork]:
    with NodeNetwork(f"test-{uuid.uuid4().hex[:8]}", NODES) as made:
        yield made


def reachable(network: NodeNetwork) -> set[tuple[str, str]]:
    places = [*NODES, HOST]
    found = {(a, b) for a, b in permutations(places, 2) if can_connect(network, a, b)}
    stated = {(a, b) for a, b in permutations(places, 2) if network.connected(a, b)}
    assert found == stated
    return found


@needs_network
def test_a_cut_node_is_alone_and_a_healed_one_is_not(network: NodeNetwork) -> None:
    everyone = set(permutations([*NODES, HOST], 2))
    with connection(network, "n0", "n1") as (near, far):
        network.cut("n1")
        assert not arrives(near, far) and not arrives(far, near)
        network.heal()
        far.settimeout(5.0)
        near.settimeout(5.0)
        assert far.recv(1) == b"x", "what was lost is sent again"
        assert near.recv(1) == b"x"
        assert reachable(network) == everyone


@needs_network
def test_groups_are_cut_from_each_other_only(network: NodeNetwork) -> None:
    network.cut(["n0", HOST], ["n1"])
    cut = {("n0", "n1"), ("n1", "n0"), (HOST, "n1"), ("n1", HOST)}
    assert reachable(network) == set(permutations([*NODES, HOST], 2)) - cut
    network.heal("n0", "n1")
    assert can_connect(network, "n0", "n1") and not can_connect(network, HOST, "n1")
    with pytest.raises(ConfigError, match=r"no node n9"):
        network.cut("n9")


@needs_network
def test_one_way_loses_what_one_side_sends(network: NodeNetwork) -> None:
    with connection(network, "n0", "n1") as (near, far):
        network.cut("n0", "n1", one_way=True)
        assert not arrives(near, far)
        assert arrives(far, near)


@needs_network
def test_a_delay_is_paid_each_way_and_by_this_node_only(network: NodeNetwork) -> None:
    def knock(one: str, other: str) -> float:
        return seconds_for(lambda: can_connect(network, one, other))

    network.delay("n1", 60)
    assert knock("n0", "n1") >= 0.12 <= knock("n1", HOST)
    assert knock("n0", "n2") < 0.12
    network.delay("n1", 0)
    assert knock("n0", "n1") < 0.12


@needs_network
def test_a_limit_is_kept_in_both_directions(network: NodeNetwork) -> None:
    megabytes = 2
    network.limit("n1", 80)
    for sender, receiver in (("n0", "n1"), ("n1", "n0")):
        assert seconds_to_send(network, sender, receiver, megabytes) > 0.8 * megabytes * 8 / 80
    network.limit("n1", 0)
    assert seconds_to_send(network, "n0", "n1", megabytes) < 0.5 * megabytes * 8 / 80


def seconds_to_send(network: NodeNetwork, one: str, other: str, megabytes: int) -> float:
    with connection(network, one, other) as (near, far):
        far.settimeout(20.0)
        near.settimeout(20.0)

        content = bytes(megabytes * 1_000_000)
        near.setblocking(False)
        left = memoryview(content)
        received = 0

        def pump() -> None:
            nonlocal left, received
            while received < len(content):
                try:
                    left = left[near.send(left) :]
                except BlockingIOError:
                    pass
                received += len(far.recv(1 << 20))

        return seconds_for(pump)


@needs_network
def test_a_process_keeps_its_number_and_session_in_a_namespace(network: NodeNetwork) -> None:
    program = "import os; print(os.getpid(), os.getsid(0), sorted(os.listdir('/sys/class/net')))"
    child = subprocess.Popen(
        network.entered("n1", [sys.executable, "-c", program]),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said, _ = child.communicate(timeout=20)
    assert said.split()[:2] == [str(child.pid)] * 2


@needs_network
def test_what_a_dead_run_left_is_removed_and_what_is_used_is_not(network: NodeNetwork) -> None:
    dead = NodeNetwork("dead", ["n0", "n1"])
    dead.prefix = f"mft{gone_pid():x}z"
    dead.open().delay("n0", 10)
    sleeper = subprocess.Popen(
        dead.entered("n1", ["sh", "-c", "echo entered; exec sleep 60"]),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert sleeper.stdout and sleeper.stdout.readline() == "entered\n"
        assert dead.prefix not in remove_leftovers(), "somebody is in it"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert remove_leftovers() == [dead.prefix]
    dead.close()
    assert not [d for d in namespaces.links() if d.startswith(dead.prefix)]
    assert not list(namespaces.FOLDER.glob(f"{dead.prefix}*"))
    assert can_connect(network, "n0", "n1"), "one of a run that lives was touched"


def gone_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


async def test_what_was_killed_and_is_cut_off_is_not_waited_for() -> None:
    cut = [True]

    def handle() -> RemoteProcess:
        child = subprocess.Popen(["sleep", "60"])
        made = RemoteProcess("n0", child.pid, child)
        made.near = lambda: not cut[0]
        return made

    unreached, reached, both = handle(), handle(), handle()
    unreached.kill()
    assert await asyncio.wait_for(unreached.wait(), 10) == UNKNOWN_EXIT
    assert not unreached.alive() and Path(f"/proc/{unreached.pid}").exists()
    os.kill(reached.pid, signal.SIGTERM)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(reached.wait(), 0.3)
    assert reached.alive(), "as far as is known here"
    cut[0] = False
    assert await asyncio.wait_for(reached.wait(), 10) == -signal.SIGTERM
    both.kill()
    cut[0] = True
    assert await asyncio.wait_for(both.wait(), 10) in (UNKNOWN_EXIT, -signal.SIGKILL)
    os.kill(unreached.pid, signal.SIGKILL)


@needs_network
def test_two_jobs_never_have_one_subnet(network: NodeNetwork) -> None:
    with NodeNetwork(network.job, NODES) as other:
        assert other.address("n0") != network.address("n0")
        assert max(map(len, namespaces.links())) <= 15
    with pytest.raises(ConfigError, match="'host'"):
        NodeNetwork("job", ["host"])


def test_without_the_rights_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_effective_capabilities", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: f"/sbin/{program}")
    with pytest.raises(MissingEnvironmentError, match="CAP_NET_ADMIN.*run as root or skip"):
        NodeNetwork("job", NODES).open()
