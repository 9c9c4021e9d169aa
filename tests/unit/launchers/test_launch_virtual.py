"""The virtual cluster: losing a node loses all of it and nothing else."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from megatron_ft.launchers.launcher import NodeUnreachable
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.virtual import VirtualCluster

TIMEOUT = 20.0
SLEEP = ["sleep", "60"]
NODES = ["n0", "n1", "n10"]


@pytest.fixture
def cluster() -> Iterator[VirtualCluster]:
    # Not under tmp_path, whose length depends on the test's name: socket paths are short.
    with tempfile.TemporaryDirectory(prefix="mft-") as folder:
        made = VirtualCluster(uuid.uuid4().hex[:12], NODES, Path(folder) / "root")
        yield made
        made.destroy()


def start(cluster: VirtualCluster, node: str, argv: list[str] | None = None) -> LocalProcess:
    return cluster.start(node, argv or SLEEP, os.environ, cluster.root / "log")


def test_kill_node_kills_all_of_it_and_nothing_else(cluster: VirtualCluster) -> None:
    # The grandchild leaves session and group: only its environment tells whose it is.
    victim = start(cluster, "n1", ["sh", "-c", "setsid sleep 60 & exec sleep 60"])
    others = [start(cluster, "n0"), start(cluster, "n10")]
    namesake = VirtualCluster(cluster.job + "x", NODES, cluster.root)
    others.append(start(namesake, "n1"))
    await_processes(cluster, "n1", 2)
    (cluster.node_dir("n1") / "a.arena").write_bytes(b"state")

    killed = cluster.kill_node("n1")

    try:
        assert victim.pid in killed and len(killed) >= 2
        assert victim.join(TIMEOUT) == -9
        assert cluster.processes_of("n1") == []
        assert not cluster.node_dir("n1").exists()
        assert all(process.alive() for process in others)
        assert cluster.node_dir("n0").exists()
    finally:
        namesake.destroy()
    assert not others[-1].alive()


def await_processes(cluster: VirtualCluster, node: str, count: int) -> None:
    event = threading.Event()
    for _ in range(int(TIMEOUT * 100)):
        if len(cluster.processes_of(node)) >= count:
            return
        event.wait(0.01)
    raise AssertionError(f"{node} has no {count} processes")


def test_a_node_may_return_with_its_memory(cluster: VirtualCluster) -> None:
    start(cluster, "n0")
    (cluster.node_dir("n0") / "a.arena").write_bytes(b"state")
    cluster.kill_node("n0", keep_folder=True)
    assert not VirtualCluster(cluster.job, NODES, cluster.root).reachable("n0")
    cluster.revive("n0")
    assert start(cluster, "n0").alive()
    assert (cluster.node_dir("n0") / "a.arena").read_bytes() == b"state"


def test_a_node_lost_while_a_process_starts_takes_it_along(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[LocalProcess] = []
    real = LocalProcess.spawn

    def spawn_and_lose(*arguments: object, **named: object) -> LocalProcess:
        # The search of kill_node runs before the process exists.
        cluster.kill_node("n0")
        spawned.append(real(*arguments, **named))  # type: ignore[arg-type]
        return spawned[0]

    monkeypatch.setattr(LocalProcess, "spawn", spawn_and_lose)
    with pytest.raises(NodeUnreachable):
        start(cluster, "n0")
    assert not spawned[0].alive()


def test_processes_that_fork_while_being_killed_do_not_escape(cluster: VirtualCluster) -> None:
    start(cluster, "n0", ["sh", "-c", "while :; do setsid sleep 60 & sleep 0.001; done"])
    await_processes(cluster, "n0", 10)
    cluster.kill_node("n0")
    assert cluster.processes_of("n0") == []


def test_destroy_spares_a_process_that_only_names_the_job(cluster: VirtualCluster) -> None:
    env = {**os.environ, JOB: cluster.job}
    env.pop(NODE, None)
    with subprocess.Popen(SLEEP, env=env) as supervisor:
        process = start(cluster, "n0")
        cluster.destroy()
        assert process.join(TIMEOUT) == -9
        assert supervisor.poll() is None
        supervisor.kill()
    assert not cluster.node_dir("n0").exists()


@pytest.mark.parametrize("names", [["../x"], [""], [".dead"], ["a/b"], ["a", "a"], ["x" * 120]])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ConfigError):
        VirtualCluster("job", names, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_node_is_named(cluster: VirtualCluster) -> None:
    for call in (cluster.node_dir, cluster.kill_node, cluster.processes_of, cluster.revive):
        with pytest.raises(ConfigError, match="n7"):
            call("n7")


def test_a_root_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(MissingEnvironmentError, match="others may write"):
        VirtualCluster("job", NODES, shared)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(MissingEnvironmentError, match="link"):
        VirtualCluster("job", NODES, link)


def test_a_process_is_found_as_soon_as_start_returns(cluster: VirtualCluster) -> None:
    # exec shows no environment for an instant after Popen has returned.
    for _ in range(40):
        process = start(cluster, "n0")
        assert procfs.read_environment(process.pid)[NODE] == "n0"
        process.kill()
        process.join(TIMEOUT)


@pytest.mark.parametrize(
    ("visible", "ranks", "seen"),
    [
        ("0,1,2,3", 1, ["0", "1", "2"]),
        ("2,3,4,5,6,7", 2, ["2,3", "4,5", "6,7"]),
        ("0,1", 1, ["0", "1", "0"]),
        ("0", 1, ["0", "0", "0"]),
    ],
)
def test_virtual_nodes_divide_the_gpus_of_their_machine(
    tmp_path: Path, visible: str, ranks: int, seen: list[str]
) -> None:
    cluster = VirtualCluster("devices", ["a", "b", "c"], tmp_path)
    given = {"CUDA_VISIBLE_DEVICES": visible}
    found = [cluster.devices(index, ranks, given)["CUDA_VISIBLE_DEVICES"] for index in range(3)]
    assert found == seen


@pytest.mark.parametrize("visible", ["", "0"])
def test_a_node_with_fewer_gpus_than_ranks_is_shown_what_there_is(
    tmp_path: Path, visible: str
) -> None:
    cluster = VirtualCluster("devices", ["a"], tmp_path)
    assert cluster.devices(0, 2, {"CUDA_VISIBLE_DEVICES": visible}) == {}
