"""Jobs whose command fails: how often it is started, on which nodes, and what is said then."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_ft.cli.main import main
from megatron_ft.cli.training_command import check_command
from megatron_ft.core.errors import RestartBudgetError
from tests.support.jobs import Job

REGISTERED = """
import os, sys
from megatron_ft.trainer import manager
from megatron_ft.core.identity import shard_id
rank, incarnation = int(os.environ["RANK"]), int(os.environ["MEGATRON_FT_INCARNATION"])
client = manager.connect(rank)
client.hello(shard_id(dp=rank), ())
if {condition}:
    client.close()
    sys.exit(f"this is rank {{rank}}")
"""
"""A command whose ranks register and then fail."""


def job_of(folder: Path, made: list[Job], script: str, **given: object) -> Job:
    program = folder / "train.py"
    program.write_text(script)
    command = (sys.executable, str(program))
    job = Job(folder, nodes=2, protect="none", command=command, **given)  # type: ignore[arg-type]
    made.append(job)
    return job


@pytest.mark.usefixtures("warm_trainers")
def test_one_error_is_one_failure_whichever_rank_meets_it_first(
    made: list[Job], tmp_path: Path
) -> None:
    job = job_of(tmp_path, made, REGISTERED.format(condition="rank == incarnation % 2"))
    with pytest.raises(
        RestartBudgetError, match="3 failures without progress .*rank 1 exited with 1"
    ):
        job.run()
    assert job.kinds().count("trainers_started") == 3, job.story()
    waits = [e.text for e in job.events if e.kind == "backoff"]
    assert waits == [f"waiting {delay} s before the next start" for delay in ("0.1", "0.2")]


def test_the_end_of_a_failed_ranks_log_is_told(made: list[Job], tmp_path: Path) -> None:
    job = job_of(tmp_path, made, "import sys; print('no such file'); sys.exit(3)")
    with pytest.raises(RestartBudgetError, match="3 failures .* rank . exited with 3"):
        job.run()
    assert any("no such file" in e.text for e in job.events if e.kind == "log"), job.story()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["no-such-program", "--flag"], "there is no program 'no-such-program'"),
        ([sys.executable, "-u", "no_such.py"], "there is no script 'no_such.py'"),
    ],
)
def test_a_command_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], problem: str
) -> None:
    words = ["run", "--job", "no-command", "--nodes", "1", "--protect", "none"]
    words += ["--state-dir", str(tmp_path / "state"), "--arena-dir", str(tmp_path)]
    assert main([*words, "--", *command]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "state" / "no-command" / "job.json").exists()


def test_what_python_runs_itself_is_no_missing_script() -> None:
    for words in (["-m", "no_such"], ["-c", "pass"], ["-X", "dev", "no_such.py"], []):
        check_command([sys.executable, *words])
