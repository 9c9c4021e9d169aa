"""torchrun as the training command: once per node, with ranks, ends and restarts as ours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest

from megatron_ft.cli import main as cli
from megatron_ft.cli.training_command import check_torchrun, is_torchrun, ranks_of
from megatron_ft.core import procfs
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.process import LocalProcess
from tests.support.fates import in_incarnation
from tests.support.jobs import FAULTY, TORCHRUN, Job, Result, Uninterrupted, difference
from tests.support.warm_host import WarmHost, is_client, warm

MODULE = ["python3", "-u", "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("command", "known"),
    [
        (["/opt/bin/torchrun", "train.py"], True),
        ([*MODULE, "train.py"], True),
        (["python", "train.py", "-m", "torch.distributed.run"], False),
        (["bash", "torchrun"], False),
        (["python", "-m", "pretrain"], False),
        ([], False),
    ],
)
def test_torchrun_is_known_by_the_words_that_start_it(command: list[str], known: bool) -> None:
    assert is_torchrun(command) == known


@pytest.mark.parametrize("flags", [["--nproc-per-node", "8"], ["--nproc_per_node=8"]])
def test_ranks_per_node_are_taken_from_torchrun_and_not_from_the_script(flags: list[str]) -> None:
    script = ["train.py", "--nproc-per-node", "2"]
    assert ranks_of(["torchrun", "--no-python", *flags, *script]) == 8
    assert ranks_of([*MODULE, *script]) is None
    assert ranks_of(["torchrun", "--nproc-per-node", "gpu", *script]) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-restarts", "3"], "drop the flag, megatron-ft run restarts"),
        (["--max_restarts=3"], "drop the flag, megatron-ft run restarts"),
        (["--rdzv-backend", "c10d"], "drop the flag, megatron-ft run.* says where"),
        (["--standalone"], "drop the flag, megatron-ft run.* says where"),
        (["--tee", "3", "--master_addr=h0"], "drop the flag, megatron-ft run.* says where"),
        (["--nnodes", "4"], "how many nodes train .--nodes, 2 here"),
        (["--nnodes=1:4"], "drop the flag"),
        (["--nproc-per-node=4"], "--ranks-per-node 2 differ"),
    ],
)
def test_flags_that_work_against_us_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_torchrun(["torchrun", *flags, "train.py"], nodes=2, ranks_per_node=2)


def test_flags_that_agree_with_us_and_the_scripts_own_are_not() -> None:
    flags = ["--nnodes=2", "--nproc-per-node", "2", "--max-restarts", "0", "-m", "--log-dir", "/x"]
    check_torchrun(["torchrun", *flags, "train", "--max-restarts", "3"], nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["torchrun", "--max-restarts=1", "x.py"], "drop the flag"),
        (["deepspeed", "x.py"], "around `megatron-ft run --launcher nodes`"),
    ],
)
def test_they_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: str
) -> None:
    flags = ["run", "--state-dir", str(tmp_path), "--job", f"refused-{os.getpid()}"]
    assert cli.main([*flags, "--", *command]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def four(uninterrupted: Uninterrupted) -> Result:
    return uninterrupted(4, 40)


def workers(job: Job, node: str) -> list[int]:
    """Ranks that torchrun has started on a node."""
    ranks = [
        p for p in job.cluster.processes_of(node) if "LOCAL_RANK" in procfs.read_environment(p)
    ]
    return [pid for pid in ranks if not is_client(pid)]


def kill_a_rank(job: Job) -> None:
    os.kill(workers(job, "n1")[0], signal.SIGKILL)


def kill_torchrun(job: Job) -> None:
    """Its ranks have sessions of their own and do not notice."""
    orphans = workers(job, "n0")
    assert len(orphans) == 2
    for pid in orphans:
        # Else they would train on until they are ended.
        os.kill(pid, signal.SIGSTOP)
    os.kill(job.supervisor.trainers.pids()[0], signal.SIGKILL)


@pytest.mark.mpi
@pytest.mark.usefixtures("warm_trainers")
def test_a_rank_torchrun_and_a_node_are_lost_and_nothing_changes(
    made: list[Job], tmp_path: Path, four: Result, warm_host: WarmHost
) -> None:
    place = {"nodes": 2, "spares": 1, "ranks_per_node": 2, "trainer_per_node": True}
    job = Job(tmp_path, **place, script=FAULTY)
    made.append(job)
    script = warm(warm_host.path, job.training_command()[1:])
    flags = ("--nproc-per-node", "2", "--no-python")
    job.command = (sys.executable, "-m", TORCHRUN, *flags, *script)
    lose_a_node = in_incarnation(3, lambda job: job.cluster.kill_node("n1") and None)
    job.run((6, kill_a_rank), (12, in_incarnation(2, kill_torchrun)), (20, lose_a_node))
    assert not difference(job.result(), four), job.story()
    assert [source for _, source in job.restores()] == ["own memory"] * 2 + ["parity"], job.story()
    assert any("ranks 2-3 on n1 exited" in e.text for e in job.events), job.story()
    logs = sorted(path.name for path in (tmp_path / "logs").glob("rank*"))
    assert logs == ["ranks0-1.log", "ranks2-3.log"]


@pytest.mark.parametrize("victim", ["all of it", "torchrun alone"])
def test_what_a_process_has_started_ends_with_it_also_in_sessions_of_its_own(
    tmp_path: Path, victim: str
) -> None:
    script = "setsid sleep 60 & echo $! >pid; mv pid child; exec sleep 60"
    environment = {**os.environ, TREE: uuid.uuid4().hex}
    command = ["sh", "-c", f"cd {tmp_path}; {script}"]
    process = LocalProcess.spawn("n0", command, environment, tmp_path / "log")
    other = LocalProcess.spawn("n0", ["sleep", "60"], dict(os.environ), tmp_path / "log")
    deadline = time.monotonic() + 20
    while not (tmp_path / "child").exists():
        assert process.alive() and time.monotonic() < deadline, "sh has not started its child"
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    if victim == "torchrun alone":
        os.kill(process.pid, signal.SIGKILL)
    else:
        process.kill()
    assert asyncio.run(asyncio.wait_for(process.wait(), 20)) == -signal.SIGKILL
    stat = procfs.read_stat(child)
    assert stat is None or stat.ended
    assert other.alive()
    other.kill()
    other.join(20)
