"""Agents and the supervisor's end of them, with real processes; no job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from megatron_ft.launchers.agents import remote_shell
from megatron_ft.launchers.agents.agent import AgentFront
from megatron_ft.launchers.agents.hub import AgentHub, AgentProcess
from megatron_ft.launchers.agents.launcher import AgentLauncher
from megatron_ft.launchers.agents.rendezvous import (
    FILE_NAME,
    AgentOrders,
    Meeting,
    node_rank,
    parse_hostfile,
)
from megatron_ft.launchers.launcher import UNKNOWN_EXIT, Launcher, NodeUnreachable, ProcessGoneError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import SECRET_BYTES

TIMEOUT = 30.0


class Site:
    """A hub and agents that it finds by its file, as with ``--launcher nodes``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / FILE_NAME
        self.folder.chmod(0o700)
        self.job = f"agents-{uuid.uuid4().hex[:8]}"
        self.fronts: list[AgentFront] = []
        self.hubs: list[AgentHub] = []

    def hub(self) -> AgentHub:
        self.hubs.append(AgentHub("127.0.0.1"))
        self.hubs[-1].meeting.write(self.file)
        return self.hubs[-1]

    def agent(self, name: str, rank: int = 0) -> AgentFront:
        return self.remote(AgentOrders(name, rank, file=str(self.file)))

    def remote(self, orders: AgentOrders, *through: str) -> AgentFront:
        self.fronts.append(AgentFront(orders, through))
        return self.fronts[-1]

    def launcher(self, *names: str) -> AgentLauncher:
        hub = self.hubs[-1] if self.hubs else self.hub()
        for rank, name in enumerate(names):
            self.agent(name, rank)
        assert hub.await_agents(lambda: len(hub.seats) >= len(names), TIMEOUT)
        return AgentLauncher(self.job, hub, self.folder / "root", self.file)

    def start(self, launcher: AgentLauncher, node: str, *words: str) -> AgentProcess:
        return launcher.start(node, words, os.environ, self.folder / f"{node}.log")

    def close(self) -> None:
        for hub in self.hubs:
            hub.close(0)
        for front in self.fronts:
            front.leave()
        procfs.kill_matching(
            lambda pid: procfs.read_environment(pid).get(JOB) == self.job, self.job
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def status(process: AgentProcess) -> int:
    async def wait() -> int:
        return await asyncio.wait_for(process.wait(), TIMEOUT)

    return asyncio.run(wait())


def test_processes_run_where_they_were_started_and_end_as_they_do(site: Site) -> None:
    launcher = site.launcher("n0", "n1")
    checked: Launcher = launcher
    assert checked.nodes() == ["n0", "n1"] and checked.address("n1") == "127.0.0.1"
    shown = site.start(launcher, "n1", "sh", "-c", f"echo ${NODE}; exit 3")
    assert status(shown) == 3 and not shown.alive()
    assert (site.folder / "n1.log").read_text() == "n1\n"
    folder = launcher.node_dir("n1")
    assert {f.stat().st_mode & 0o777 for f in (folder, *list(folder.parents)[:2])} == {0o700}
    sleeping = site.start(launcher, "n0", "sleep", "60")
    assert sleeping.alive() and os.getsid(sleeping.pid) == sleeping.pid
    sleeping.kill()
    assert status(sleeping) == -signal.SIGKILL
    with pytest.raises(MissingEnvironmentError, match="no-such-program"):
        site.start(launcher, "n0", "no-such-program")


def test_programs_start_in_the_folder_of_the_command(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """A remote shell begins elsewhere; where there is no such folder, that is said."""
    hub, there = site.hub(), site.folder / "with blank"
    there.mkdir()
    folders = {"n0": there, "n1": site.folder / "missing"}
    for rank, (name, folder) in enumerate(folders.items()):
        orders = AgentOrders(name, rank, file=str(site.file), folder=str(folder))
        site.remote(orders, "env", "-C", "/")
    assert hub.await_agents(lambda: len(hub.seats) == 2, TIMEOUT)
    launcher = AgentLauncher(site.job, hub, site.folder / "root", site.file)
    ends = [status(site.start(launcher, name, "pwd")) for name in folders]
    found = [(site.folder / f"{name}.log").read_text().strip() for name in folders]
    assert ends == [0, 0] and found == [str(there), "/"]
    assert f"the folder {folders['n1']}, where" in capfd.readouterr().err


def test_arguments_and_variables_may_be_any_bytes(site: Site) -> None:
    """A message holds text only, and a path in another encoding is none."""
    launcher, raw = site.launcher("n0"), os.fsdecode(b"gr\xf6\xdfe \xc3\xb1")
    log = site.folder / f"{raw}.log"
    environment = {"PATH": os.environ["PATH"], "RAW": raw}
    shown = launcher.start("n0", ["sh", "-c", 'echo "$0 $RAW"', raw], environment, log)
    assert status(shown) == 0
    assert log.read_bytes() == b" ".join(2 * [os.fsencode(raw)]) + b"\n"


def test_stdin_reaches_a_process_and_is_not_shown(site: Site) -> None:
    launcher = site.launcher("n0")
    log = site.folder / "log"
    reader = launcher.start("n0", ["cat"], {"PATH": os.environ["PATH"]}, log, b"a secret")
    assert status(reader) == 0 and log.read_text() == "a secret"


def test_processes_outlive_their_agent_and_the_next_one_finds_them(site: Site) -> None:
    launcher = site.launcher("n0")
    sleeping = site.start(launcher, "n0", "sleep", "60")
    site.fronts[0].leave()
    assert status(sleeping) == UNKNOWN_EXIT, "nobody knows what becomes of it now"
    assert not launcher.reachable("n0")
    with pytest.raises(NodeUnreachable, match="n0 has no agent"):
        site.start(launcher, "n0", "true")
    site.agent("n0")
    assert launcher.hub.await_agents(lambda: launcher.reachable("n0"), TIMEOUT)
    found = launcher.attach("n0", sleeping.pid, sleeping.start_time)
    assert found.alive()
    found.kill()
    assert status(found) == UNKNOWN_EXIT, "only its parent learns the status"
    with pytest.raises(ProcessGoneError):
        launcher.attach("n0", sleeping.pid, sleeping.start_time)
    with pytest.raises(ProcessGoneError, match="not one of job"):
        launcher.attach("n0", os.getpid())


def test_agents_serve_the_next_supervisor_and_know_how_its_processes_ended(site: Site) -> None:
    first = site.launcher("n0")
    sleeping = site.start(first, "n0", "sleep", "60")
    second_hub = site.hub()
    assert second_hub.await_agents(lambda: second_hub.there("n0"), TIMEOUT)
    second = AgentLauncher(site.job, second_hub, site.folder / "root", site.file)
    found = second.attach("n0", sleeping.pid, sleeping.start_time)
    found.kill()
    assert status(found) == -signal.SIGKILL


def test_all_agents_end_with_the_jobs_exit_code(site: Site) -> None:
    launcher = site.launcher("n0", "n1")
    launcher.hub.close(13)
    assert [front.wait(TIMEOUT) for front in site.fronts] == [13, 13]


def test_agents_are_in_no_process_tree_of_ours(site: Site) -> None:
    launcher = site.launcher("n0")
    child = site.start(launcher, "n0", "sleep", "60")
    pid, ancestors = child.pid, set()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ancestors.add(pid)
    assert os.getpid() not in ancestors


def test_two_nodes_of_one_name_are_refused(site: Site) -> None:
    launcher = site.launcher("n0")
    site.agent("n0", rank=1)
    with pytest.raises(ConfigError, match=r"once on each node.*--node-name"):
        launcher.hub.await_agents(lambda: len(launcher.hub.seats) == 2, TIMEOUT)
    assert site.fronts[1].wait(TIMEOUT) == 2
    assert launcher.reachable("n0")


def test_who_does_not_know_the_secret_is_not_heard(site: Site) -> None:
    hub = site.hub()
    stranger = Meeting(hub.meeting.endpoint, bytes(SECRET_BYTES))
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger = 0
        stranger.keys.connect(other, stranger.endpoint)
        other.send(m.encode(m.AgentHello("n0", "t", 0, "127.0.0.1")))
        assert not other.poll(500)
    assert not hub.seats
    assert site.file.stat().st_mode & 0o777 == 0o600
    assert repr(hub.meeting.secret) not in repr(hub.meeting)


def test_noise_from_who_knows_the_secret_ends_nothing(site: Site) -> None:
    launcher = site.launcher("n0")
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger = 500
        launcher.hub.meeting.keys.connect(other, launcher.hub.meeting.endpoint)
        for frame in (
            b"",
            b"\xff" * 9,
            m.encode(m.AgentHeard()),
            m.encode(m.ProcessEnded("no such", 0)),
        ):
            other.send(frame)
        other.send_multipart([b"a", b"b", b"c"])
    assert status(site.start(launcher, "n0", "true")) == 0


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
