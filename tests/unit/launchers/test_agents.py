"""Agents and the supervisor's end of them, with real processes; no job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.agents import remote_shell
from megatron_ft.launchers.agents.hub import AgentProcess
from megatron_ft.launchers.agents.launcher import AgentLauncher
from megatron_ft.launchers.agents.rendezvous import Meeting, node_rank, parse_hostfile
from megatron_ft.launchers.launcher import UNKNOWN_EXIT, NodeUnreachable, ProcessHandle
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import SECRET_BYTES
from tests.support.launcher_sites import AgentSite

TIMEOUT = 30.0


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentSite]:
    """A hub and the agents that a test is parametrised with, n0 otherwise."""
    made = AgentSite(tmp_path, getattr(request, "param", ["n0"]))
    yield made
    made.close()


def start(site: AgentSite, node: str, *words: str) -> AgentProcess:
    assert isinstance(site.launcher, AgentLauncher)
    return site.launcher.start(node, words, os.environ, site.folder / f"{node}.log")


def status(process: ProcessHandle) -> int:
    async def wait() -> int:
        return await asyncio.wait_for(process.wait(), TIMEOUT)

    return asyncio.run(wait())


@pytest.mark.parametrize("site", [[]], indirect=True)
def test_programs_start_in_the_folder_of_the_command(
    site: AgentSite, capfd: pytest.CaptureFixture[str]
) -> None:
    """A remote shell begins elsewhere; where there is no such folder, that is said."""
    there, missing = site.folder / "with blank", site.folder / "missing"
    there.mkdir()
    for rank, folder in enumerate((there, missing)):
        site.agent(f"n{rank}", rank, "env", "-C", "/", folder=str(folder))
    site.until(lambda: len(site.hubs[0].seats) == 2)
    ends = [status(start(site, name, "pwd")) for name in ("n0", "n1")]
    found = [(site.folder / f"{name}.log").read_text().strip() for name in ("n0", "n1")]
    assert ends == [0, 0] and found == [str(there), "/"]
    assert f"the folder {missing}, where" in capfd.readouterr().err


def test_processes_outlive_their_agent_and_the_next_one_finds_them(site: AgentSite) -> None:
    sleeping = start(site, "n0", "sleep", "60")
    site.fronts["n0", 0].leave()
    assert status(sleeping) == UNKNOWN_EXIT, "nobody knows what becomes of it now"
    assert not site.launcher.reachable("n0")
    with pytest.raises(NodeUnreachable, match="n0 has no agent"):
        start(site, "n0", "true")
    site.agent("n0")
    site.until(lambda: site.launcher.reachable("n0"))
    found = site.launcher.attach("n0", sleeping.pid, sleeping.start_time)
    assert found.alive()
    found.kill()
    assert status(found) == UNKNOWN_EXIT, "only its parent learns the status"


def test_agents_know_how_a_process_ended_that_they_started_for_the_last_supervisor(
    site: AgentSite,
) -> None:
    sleeping = start(site, "n0", "sleep", "60")
    found = site.make().attach("n0", sleeping.pid, sleeping.start_time)
    found.kill()
    assert status(found) == -signal.SIGKILL


@pytest.mark.parametrize("site", [["n0", "n1"]], indirect=True)
def test_all_agents_end_with_the_jobs_exit_code(site: AgentSite) -> None:
    site.hubs[0].close(13)
    assert [front.wait(TIMEOUT) for front in site.fronts.values()] == [13, 13]


def test_agents_are_in_no_process_tree_of_ours(site: AgentSite) -> None:
    child = start(site, "n0", "sleep", "60")
    pid, ancestors = child.pid, set()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ancestors.add(pid)
    assert os.getpid() not in ancestors


def test_two_nodes_of_one_name_are_refused(site: AgentSite) -> None:
    other = site.agent("n0", rank=1)
    with pytest.raises(ConfigError, match=r"once on each node.*--node-name"):
        site.until(lambda: len(site.hubs[0].seats) == 2)
    assert other.wait(TIMEOUT) == 2
    assert site.launcher.reachable("n0")


@pytest.mark.parametrize("site", [[]], indirect=True)
def test_a_stranger_without_the_secret_gets_no_answer(site: AgentSite) -> None:
    (hub,) = site.hubs
    stranger = Meeting(hub.meeting.endpoint, bytes(SECRET_BYTES))
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger = 0
        stranger.keys.connect(other, stranger.endpoint)
        other.send(m.encode(m.AgentHello("n0", "t", 0, "127.0.0.1")))
        assert not other.poll(500)
    assert not hub.seats
    assert site.file.stat().st_mode & 0o777 == 0o600
    assert repr(hub.meeting.secret) not in repr(hub.meeting)


def test_noise_from_a_peer_with_the_secret_ends_nothing(site: AgentSite) -> None:
    meeting, noise = site.hubs[0].meeting, [b"", b"\xff" * 9, m.encode(m.AgentHeard())]
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger = 500
        meeting.keys.connect(other, meeting.endpoint)
        for frame in (*noise, m.encode(m.ProcessEnded("no such", 0))):
            other.send(frame)
        other.send_multipart([b"a", b"b", b"c"])
    assert status(start(site, "n0", "true")) == 0


LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    "srun": {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
}


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_the_place_among_the_nodes_is_what_the_inner_launcher_says(name: str) -> None:
    assert node_rank(LAUNCHERS[name], size=3) == (1, 4)
    assert node_rank(LAUNCHERS[name], rank=2, size=3) == (2, 3)


@pytest.mark.parametrize(
    ("environment", "rank", "words"),
    [
        ({}, None, "give --node-rank and --nodes"),
        ({"RANK": "1"}, None, "give --node-rank and --nodes"),
        ({}, 3, "not below the number of nodes, 3"),
        ({"TORCHELASTIC_MAX_RESTARTS": "100"}, 0, "--max-restarts 0.*enable_elastic_training"),
    ],
)
def test_a_place_that_nobody_knows_is_refused(
    environment: dict[str, str], rank: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        node_rank(environment, rank, 3)


def test_hostfiles_of_open_mpi_and_deepspeed_are_read() -> None:
    lines = ["# a comment", "", "n0 slots=4", "n1:8  # two", "user@n2 slots = 2 max-slots=4", "n3"]
    assert parse_hostfile(lines, "F") == ["n0", "n1", "user@n2", "n3"]


@given(st.lists(st.integers(0, 99).map("gpu-{}.cluster".format), unique=True, min_size=1))
def test_hosts_are_in_the_order_of_the_file(hosts: list[str]) -> None:
    assert parse_hostfile([f" {host} slots=8 " for host in hosts], "F") == hosts


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["n0", "n0 slots=2"], "line 2: n0 is there twice"),
        (["n0 cores=4"], "line 1: 'n0 cores=4' is no"),
        (["# nobody"], "names no host"),
    ],
)
def test_what_is_no_hostfile_is_refused(lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_hostfile(lines, "F")


@pytest.mark.parametrize("flags", [[], ["-x"]])
def test_the_stand_in_for_ssh_takes_what_both_mpis_give_it(flags: list[str]) -> None:
    environment = {
        remote_shell.NODES: "10.0.0.1=n0 10.0.0.2=n1",
        remote_shell.MEETING: "/shared/supervisor.json",
        remote_shell.FOLDER: "/dev/shm/root/job",
    }
    order = remote_shell.order_of([*flags, "10.0.0.2", "prted", "-x", '"$A"'], environment)
    assert (order.node, order.words) == ("n1", 'prted -x "$A"')
    assert (order.folder, order.log) == ("/dev/shm/root/job/n1/mpi", "/shared/mpi-n1.log")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--launcher", "hostfile"], "needs --hostfile FILE"),
        (["--hostfile", "F"], "--hostfile needs --launcher hostfile"),
        (["--launcher", "hostfile", "--hostfile", "/no/such"], "cannot be read"),
        (["--node-rank", "1"], "--node-rank needs --launcher nodes"),
        (["--launcher", "nodes"], "start it once on each node"),
    ],
)
def test_flags_of_other_launchers_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], words: str
) -> None:
    assert cli.main(["run", "--state-dir", str(tmp_path), *flags, "--", "true"]) == 2
    assert words in capsys.readouterr().err


def test_a_host_that_cannot_be_reached_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\nnowhere\n")
    shell = "sh -c 'test $0 = localhost && exec \"$@\"'"
    flags = ["--launcher", "hostfile", "--hostfile", str(hosts), "--remote-shell", shell]
    begun = time.monotonic()
    assert cli.main(["run", "--state-dir", str(tmp_path / "s"), *flags, "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "1 nodes are there and 2 are needed" in said and "nowhere" in said, said
    assert time.monotonic() - begun < TIMEOUT, "its remote shell has ended: nothing to wait for"


SHELL = """#!/bin/sh
host=$1; shift
[ "$host" = gone ] && exit 255
exec sh -c "$*"
"""


def test_a_host_that_is_missed_does_not_spoil_the_doctors_json(tmp_path: Path) -> None:
    shell, hosts = tmp_path / "shell", tmp_path / "hosts"
    shell.write_text(SHELL)
    shell.chmod(0o700)
    hosts.write_text("here\ngone\n")
    words = [sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--json", "--nodes", "1"]
    words += ["--launcher", "hostfile", "--hostfile", str(hosts), "--remote-shell", str(shell)]
    words += ["--protect", "none", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(
        [*words, "--", sys.executable, "train.py"], capture_output=True, timeout=4 * TIMEOUT
    )
    assert b"nothing is heard of gone; continuing without" in done.stderr
    assert {"verdict", "findings"} == json.loads(done.stdout).keys(), done.stderr
