"""What Launcher and ProcessHandle promise, asked of every launcher alike, on real nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.core.errors import ConfigError, ControlPlaneError, MissingEnvironmentError
from megatron_ft.launchers.launcher import (
    UNKNOWN_EXIT,
    NodeUnreachable,
    Placement,
    ProcessGoneError,
    ProcessHandle,
)
from megatron_ft.launchers.world import WORLD, WorldProcess
from tests.programs import world_rank
from tests.support.launcher_sites import NODES, AgentSite, Site, SlurmSite, VirtualSite
from tests.support.slurm_jobs import NEEDS_SLURM

SECONDS = 30.0
SLEEP = ["sleep", "60"]
KINDS = ["virtual", "agents", pytest.param("slurm", marks=NEEDS_SLURM)]


@pytest.fixture(scope="module", params=KINDS)
def site(request: pytest.FixtureRequest, no_process_left: None) -> Iterator[Site]:
    # Not under tmp_path, whose length depends on the test's name: socket paths are short.
    with tempfile.TemporaryDirectory(prefix="mft-") as name:
        folder = Path(name)
        if request.param == "slurm":
            made: Site = SlurmSite(folder, request.getfixturevalue("slurm"))
        else:
            made = (VirtualSite if request.param == "virtual" else AgentSite)(folder)
        yield made
        made.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "log"


Start = Callable[..., ProcessHandle]


@pytest.fixture
def start(site: Site, log: Path) -> Iterator[Start]:
    """Starts a process whose output is in ``log``; all of them are ended after the test."""
    handles: list[ProcessHandle] = []

    def begin(*words: str, node: str = "n1", stdin: bytes | None = None) -> ProcessHandle:
        handles.append(site.launcher.start(node, words, site.environment, log, stdin))
        return handles[-1]

    yield begin
    for handle in handles:
        handle.kill()
        status(handle)


def status(handle: ProcessHandle) -> int:
    async def wait() -> int:
        return await asyncio.wait_for(handle.wait(), SECONDS)

    return asyncio.run(wait())


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def printed(log: Path, lines: int = 1) -> list[str]:
    """The words in a log, once it has so many lines."""
    until(lambda: log.exists() and log.read_text().count("\n") >= lines, f"{lines} lines in {log}")
    return log.read_text().split()


def test_nodes_are_known_by_name_and_address(site: Site, tmp_path: Path) -> None:
    launcher = site.launcher
    assert launcher.nodes() == NODES and all(map(launcher.reachable, NODES))
    assert {launcher.address(node) for node in NODES} == {"127.0.0.1"}
    assert len({launcher.ready_file(node) for node in NODES}) == len(NODES)
    assert launcher.node_dir("n1") == site.root / site.job / "n1"
    assert not launcher.gone("n1") and launcher.leaving() == {}
    with pytest.raises(ConfigError, match="n9"):
        launcher.node_dir("n9")
    with pytest.raises((ConfigError, NodeUnreachable), match="n9"):
        launcher.start("n9", SLEEP, site.environment, tmp_path / "log")


def test_a_process_has_the_environment_given_and_its_place(
    site: Site, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCESS_TOKEN", "of the supervisor alone")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    argv = [sys.executable, "-c", program]
    handle = site.launcher.start("n1", argv, {**site.environment, "X": "kept"}, log)
    assert status(handle) == 0 and not handle.alive() and handle.node == "n1"
    seen = json.loads(log.read_text())
    place = {JOB: site.job, NODE: "n1", NODE_DIR: str(site.launcher.node_dir("n1"))}
    assert seen.items() >= {**site.environment, **place, INCARNATION: "0", "X": "kept"}.items()
    assert "ACCESS_TOKEN" not in seen and "SLURM_PROCID" not in seen
    assert log.stat().st_mode & 0o777 == 0o600
    folder = site.launcher.node_dir("n1")
    made = filter(Path.exists, (folder, *list(folder.parents)[:2]))
    assert {one.stat().st_mode & 0o077 for one in made} <= {0}


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9)])
def test_wait_has_the_exit_status(start: Start, script: str, code: int) -> None:
    handle = start("sh", "-c", script)
    assert status(handle) == code and status(handle) == code and not handle.alive()


def test_output_is_appended_and_stdin_is_read_to_its_end(start: Start, log: Path) -> None:
    assert status(start("cat", stdin=b"bytes\0of a secret")) == 0
    assert status(start("sh", "-c", "echo; cat; echo error >&2")) == 0, "stdin ends at once"
    assert log.read_bytes() == b"bytes\0of a secret\nerror\n"


def test_stdin_is_in_neither_argv_nor_environment(site: Site, start: Start, log: Path) -> None:
    secret = uuid.uuid4().hex.encode()
    start("sh", "-c", "read -r line; echo ready; exec sleep 60", stdin=secret + b"\n")
    assert printed(log) == ["ready"]
    found = [pid for pid in procfs.own_processes() if site.is_of(pid, "n1")]
    assert found
    for name in (f"/proc/{pid}/{file}" for pid in found for file in ("cmdline", "environ")):
        assert secret not in Path(name).read_bytes()


def test_arguments_and_variables_may_be_any_bytes(site: Site, tmp_path: Path) -> None:
    raw = os.fsdecode(b"gr\xf6\xdfe \xc3\xb1")
    log = tmp_path / f"{raw}.log"
    words = ["sh", "-c", 'echo "$0 $RAW"', raw]
    assert status(site.launcher.start("n1", words, {**site.environment, "RAW": raw}, log)) == 0
    assert log.read_bytes() == b" ".join(2 * [os.fsencode(raw)]) + b"\n"


def test_a_program_that_does_not_exist_is_named(site: Site, log: Path) -> None:
    """By the error, or by the log where only the node finds out."""
    try:
        handle = site.launcher.start("n1", ["no-such-program"], site.environment, log)
    except MissingEnvironmentError as error:
        said = str(error)
        assert "n1" in said
    else:
        assert status(handle) > 0
        said = log.read_text()
    assert "no-such-program" in said


def test_a_log_that_cannot_be_written_is_no_fault_of_the_program(site: Site, log: Path) -> None:
    """A caller that starts processes again and again, as encoders, tries it once more."""
    log.mkdir(parents=True)
    with pytest.raises(ControlPlaneError, match="just now") as caught:
        site.launcher.start("n1", SLEEP, site.environment, log)
    assert not isinstance(caught.value, MissingEnvironmentError)


def test_kill_ends_a_process_and_all_that_it_started_and_no_other(start: Start, log: Path) -> None:
    bystander = start(*SLEEP)
    victim = start("sh", "-c", "sleep 60 & echo $!; wait")
    (child,) = printed(log)
    pidfd = os.pidfd_open(int(child))

    async def kill_with_waiters() -> list[int]:
        waiters = [asyncio.create_task(victim.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters.pop().cancel()
        victim.kill()
        return await asyncio.wait_for(asyncio.gather(*waiters), SECONDS)

    assert asyncio.run(kill_with_waiters()) == [-signal.SIGKILL] * 2
    assert procfs.ended(pidfd, SECONDS) and bystander.alive()
    os.close(pidfd)
    victim.kill()  # harmless


def test_a_process_that_is_killed_as_it_starts_does_not_run(site: Site, start: Start) -> None:
    handle = start("sleep", "61")
    handle.kill()
    assert status(handle) != 0
    until(
        lambda: not [pid for pid in procfs.own_processes() if site.is_of(pid, "n1")],
        "end of what it started",
    )


def test_the_next_supervisor_takes_a_process_over(site: Site, log: Path) -> None:
    argv = ["sh", "-c", "echo ready; exec sleep 60"]
    handle = site.launcher.start("n1", argv, site.environment, log)
    assert printed(log) and os.getsid(handle.pid) == handle.pid, "it outlives who started it"
    later = site.launcher = site.make()
    found = later.attach("n1", handle.pid, handle.start_time)
    assert found.alive() and (found.pid, found.start_time) == (handle.pid, handle.start_time)
    for node, pid, begun in (
        ("n1", handle.pid, handle.start_time - 1),
        ("n0", handle.pid, None),
        ("n1", os.getpid(), None),
    ):
        with pytest.raises(ProcessGoneError):
            later.attach(node, pid, begun)
    found.kill()
    assert status(found) in (-signal.SIGKILL, UNKNOWN_EXIT) and not found.alive()
    with pytest.raises(ProcessGoneError):
        later.attach("n1", handle.pid, handle.start_time)


def test_a_failure_is_the_schedulers_only_in_its_own_words(site: Site) -> None:
    launcher, slurms = site.launcher, isinstance(site, SlurmSite)
    assert launcher.is_away("srun: error: Unable to contact slurm controller") == slurms
    assert launcher.is_over("srun: error: Slurm job 11 has expired") == slurms
    assert bool(launcher.drain_command("n1", "a fan")) == slurms
    for text in ("", "RuntimeError: [gloo] Connection refused", "the token has expired"):
        assert not launcher.is_away(text) and not launcher.is_over(text)


def test_a_lost_node_takes_its_processes_along_and_refuses_others(
    site: Site, start: Start, log: Path
) -> None:
    lost, other = start("sh", "-c", "echo ready; exec sleep 60", node="n3"), start(*SLEEP)
    printed(log)
    site.lose("n3")
    assert status(lost) in (-signal.SIGKILL, UNKNOWN_EXIT) and not lost.alive()
    until(lambda: not site.launcher.reachable("n3"), "loss of n3")
    assert site.launcher.nodes() == NODES and site.launcher.reachable("n1") and other.alive()
    with pytest.raises(NodeUnreachable, match="n3"):
        start(*SLEEP, node="n3")
    with pytest.raises(NodeUnreachable, match="n3"):
        site.launcher.attach("n3", lost.pid)
    with pytest.raises(NodeUnreachable, match="n3"):
        site.launcher.start_world(
            [Placement(n, SLEEP, site.environment) for n in ("n0", "n3")], log
        )


RANKS = ["n0", "n1", "n2"]


def begin_world(site: Site, folder: Path, *words: str, token: str = "") -> WorldProcess:
    def place(node: str) -> Placement:
        odd = f'{node} has "quotes", $x : and blanks'
        argv = [sys.executable, world_rank.__file__, str(folder), *words]
        return Placement(node, argv, {**os.environ, "ODD": odd, "ACCESS_TOKEN": token})

    return site.launcher.start_world([place(node) for node in RANKS], folder / "log")


def complete(world: WorldProcess, folder: Path) -> WorldProcess:
    """A world once every rank is in it."""

    def there() -> bool:
        assert world.alive(), (folder / "log").read_text()
        return len(list(folder.glob("rank*"))) == len(RANKS)

    until(there, f"world: {(folder / 'log').read_text()}")
    return world


def members(world: WorldProcess) -> list[int]:
    found = procfs.own_processes()
    return [p for p in found if procfs.read_environment(p).get(WORLD) == world.world]


@pytest.mark.mpi
def test_a_world_has_its_ranks_in_order_each_with_its_own_environment(
    site: Site, tmp_path: Path
) -> None:
    site.launcher.check_world(2)
    world = begin_world(site, tmp_path)
    assert world.join(SECONDS) == 0, (tmp_path / "log").read_text()
    for rank, node in enumerate(RANKS):
        seen = json.loads((tmp_path / f"rank{rank}").read_text())
        assert (seen["size"], seen["node"]) == (len(RANKS), node)
        assert seen["odd"] == f'{node} has "quotes", $x : and blanks'
    assert not list((site.launcher.job_dir / ".worlds").glob("*"))


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["handle", "mpirun", "rank", "node"])
def test_a_world_ends_as_a_whole(site: Site, start: Start, tmp_path: Path, how: str) -> None:
    token = uuid.uuid4().hex
    world = complete(begin_world(site, tmp_path, "wait", token=token), tmp_path)
    ranks = [p for p in members(world) if procfs.read_environment(p).get(NODE) == "n2"]
    assert ranks and len(members(world)) > len(RANKS)
    bystander = start(*SLEEP)
    for pid in members(world):
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    if how == "handle":
        world.kill()
    elif how == "node":
        site.lose("n2")
        until(lambda: not site.launcher.reachable("n2"), "loss of n2")
    else:
        os.kill(world.pid if how == "mpirun" else max(ranks), signal.SIGKILL)
    # Of a lost node Open MPI may say 0, where its daemon there was a step of Slurm's.
    assert status(world) != 0 or how == "node"
    assert not members(world) and bystander.alive()
    assert not list((site.launcher.job_dir / ".worlds").glob("*"))


def test_a_job_that_is_over_leaves_no_folder(site: Site) -> None:
    assert site.launcher.job_dir.exists()
    site.clean()
    assert not site.launcher.job_dir.exists()
