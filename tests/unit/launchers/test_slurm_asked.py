"""Questions to Slurm while its controller is away: commands of its names that fail at first."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.core.errors import MissingEnvironmentError, SchedulerAwayError
from megatron_ft.launchers.slurm import allocation
from megatron_ft.launchers.slurm.allocation import Allocation, asks_no_kill, is_away, is_over

CONTACT = "slurm_load_node error: Unable to contact slurm controller (connect failure)"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0"}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("scontrol", "squeue", "srun"):
        script = (
            f'#!/bin/sh\necho x >>{tmp_path}/asked\n[ "$(wc -l <{tmp_path}/asked)" -gt '
            f"$(cat {tmp_path}/fails) ] || {{ cat {tmp_path}/says >&2; exit 1; }}\n"
            'case "$2" in hostnames) echo n0 ;; node) echo NodeName=n0 NodeAddr=127.0.0.1 ;; esac\n'
        )
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(allocation.time, "sleep", lambda seconds: None)
    return tmp_path


def fails(commands: Path, times: int, says: str) -> None:
    (commands / "fails").write_text(str(times))
    (commands / "says").write_text(says)


def test_a_controller_that_is_away_is_asked_again(commands: Path) -> None:
    fails(commands, 4, CONTACT)
    assert Allocation.from_environment(JOB).names == ("n0",)


def test_one_that_stays_away_is_the_schedulers_fault(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "DEMAND_SECONDS", 0.0)
    fails(commands, 10**6, CONTACT)
    with pytest.raises(SchedulerAwayError, match="Unable to contact"):
        Allocation.from_environment(JOB)


def test_what_slurm_refuses_is_not_asked_again(commands: Path) -> None:
    fails(commands, 1, "Invalid job id specified")
    with pytest.raises(MissingEnvironmentError, match="Invalid job id"):
        Allocation.from_environment(JOB)


@pytest.mark.parametrize(
    ("text", "away"),
    [
        (CONTACT, True),
        ("srun: error: Unable to confirm allocation for job 7: Unable to contact slurm", True),
        ("Open MPI gives no world: srun: error: Unable to confirm allocation for job 7", True),
        ("srun: error: Unable to create step for job 7: Job/step already completing", True),
        ("log says: srun: error: Task launch for StepId=7.3 failed on node n1: Prolog", True),
        ("srun: error: Invalid job id specified", False),
        ("RuntimeError: [gloo] Connection refused", False),
        ("python: can't open file 'train.py'", False),
        ("", False),
    ],
)
def test_only_messages_of_slurm_say_that_it_is_away(text: str, away: bool) -> None:
    assert is_away(text) is away


@pytest.mark.parametrize(
    ("text", "over"),
    [
        ("clear on n0 ended with 1: srun: error: Slurm job 11 has expired", True),
        ("srun: error: Unable to create step for job 7: Invalid job id specified", True),
        ("srun: error: Unable to contact slurm controller", False),
        ("the token has expired", False),
    ],
)
def test_only_messages_of_slurm_say_that_the_job_is_over(text: str, over: bool) -> None:
    assert is_over(text) is over


def test_a_salloc_above_says_how_it_was_called(tmp_path: Path) -> None:
    """The shell below it has no batch script, and this Slurm shows no line of salloc."""
    script = "from megatron_ft.core.procfs import command_above as f; print(f('salloc'), f('no'))"
    salloc = tmp_path / "salloc"
    salloc.write_text(f'#!/bin/sh\n{sys.executable} -c "{script}"\n:\n')
    shell = ["/bin/sh", str(salloc)]
    assert subprocess.check_output(shell, text=True).strip() == "[] []", "a shell is none"
    named = ["salloc", str(salloc), "--no-kill", "a b"]
    said = subprocess.check_output(named, executable="/bin/sh", text=True).strip()
    assert said == f"{named} []"
    line = shlex.join(named)
    assert asks_no_kill("", line, {}) and not asks_no_kill("", shlex.join(named[:2]), {})
