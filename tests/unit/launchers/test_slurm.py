"""What is decided about Slurm without one: commands, environments, exit statuses, times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.launcher_env import outside_of_steps
from megatron_ft.launchers.mpirun import MpiKind, MpiLauncher, world_environment
from megatron_ft.launchers.slurm import allocation, launcher
from megatron_ft.launchers.slurm.allocation import (
    Allocation,
    draining_nodes,
    host_command,
    job_reference,
    node_addresses,
    parse_duration,
)
from megatron_ft.launchers.slurm.launcher import reach_by_steps, step_command, task_status
from tests.support.jobs import ROOT

OPEN_MPI = MpiLauncher(Path("/bin/mpirun"), MpiKind.OPEN_MPI, "5.0.1", "python")
SITE = ("pretrain_gpt_inmem.sbatch", "deepspeed_inmem.sbatch")


@given(st.integers(1, 64), st.booleans())
def test_a_signal_that_srun_reports_is_that_signal(number: int, left: bool) -> None:
    assert task_status(128 + number, left) == -number


@pytest.mark.parametrize(
    ("status", "left", "meant"),
    [(0, True, 0), (0, False, -signal.SIGKILL), (3, False, 3), (-9, True, -9), (255, True, 255)],
)
def test_a_task_whose_node_failed_did_not_end_well(status: int, left: bool, meant: int) -> None:
    assert task_status(status, left) == meant


@given(st.integers(0, 40), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_times_of_slurm_are_seconds(days: int, hours: int, minutes: int, seconds: int) -> None:
    clock = f"{hours:02}:{minutes:02}:{seconds:02}"
    expected = hours * 3600 + minutes * 60 + seconds
    assert parse_duration(clock) == expected
    assert parse_duration(f"{days}-{clock}") == expected + days * 86400
    assert parse_duration(f"{minutes}:{seconds:02}") == minutes * 60 + seconds


@pytest.mark.parametrize("word", ["UNLIMITED", "NOT_SET", "INVALID", "", "1-", "-5"])
def test_no_time_limit_is_zero(word: str) -> None:
    assert parse_duration(word) == 0


def test_addresses_are_read_from_what_scontrol_prints() -> None:
    text = (
        "NodeName=n0 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.0.0.1 NodeHostName=vm State=IDLE\n"
        "NodeName=n1 Arch=x86_64 CoresPerSocket=1 NodeAddr=host1 NodeHostName=vm State=IDLE\n"
    )
    assert node_addresses(text) == {"n0": "10.0.0.1", "n1": "host1"}


def test_nodes_that_drain_have_the_reason_of_their_administrator() -> None:
    lines = [
        "NodeName=n0 Arch=x86_64 NodeAddr=a State=MIXED ThreadsPerCore=1",
        "NodeName=n1 Arch=x86_64 State=ALLOCATED+DRAIN TmpDisk=0 Reason=bad fan, see log"
        " [root@2026-11-25T10:00:00] Comment=x",
        "NodeName=n2 State=DOWN+NOT_RESPONDING Reason=Not responding [slurm@2026-11-25T10:00:00]",
        "NodeName=n3 State=MIXED+DRAIN+RESERVED",
        "NodeName=n4 State=ALLOCATED+FAIL Reason=soon [root@now]",
        "nothing of the kind",
    ]
    assert draining_nodes("\n".join(lines)) == {
        "n1": "bad fan, see log [root@2026-11-25T10:00:00]",
        "n3": "",
        "n4": "soon [root@now]",
    }


def test_a_step_takes_no_options_from_the_job_around_it() -> None:
    given_ = {"SLURM_NTASKS": "5", "SLURM_CONF": "/c", "PMI_RANK": "0", "SRUN_X": "", "HOME": "/h"}
    kept = outside_of_steps(given_ | {"SLURM_JOB_ID": "7", "PMIX_RANK": "1", "SBATCH_X": ""})
    assert kept == {"SLURM_CONF": "/c", "HOME": "/h", "SLURM_JOB_ID": "7"}


def test_the_task_of_a_step_logs_by_itself_and_is_told_no_rank(tmp_path: Path) -> None:
    log = tmp_path / "a log"
    command = step_command("7", "n1", ["sh", "-c", "echo $0:$SLURM_PROCID:$X", "me"], log, ["-v"])
    srun, task = command[: command.index("/bin/sh")], command[command.index("/bin/sh") :]
    assert {"--jobid=7", "--nodelist=n1", "--overlap", "--no-kill", "-v"} <= set(srun)
    environment = {**os.environ, "SLURM_PROCID": "3", "X": "kept"}
    done = subprocess.run(task, env=environment, capture_output=True, check=True)
    assert (done.stdout, log.read_text()) == (b"", "me::kept\n")
    assert log.stat().st_mode & 0o777 == 0o600


def test_mpirun_reaches_a_node_by_a_step_of_its_own(tmp_path: Path) -> None:
    settings = reach_by_steps(OPEN_MPI, {"n0": "7", "n5": "8"}, tmp_path, ["-v"], tmp_path)
    words = launcher.remote_command("n0", ["echo", "$TMPDIR;", "pwd"], settings)
    assert {"srun", "--jobid=7", "--nodelist=n0", "-v"} <= set(words)
    script = words[words.index("/bin/sh") :]
    done = subprocess.run(script, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "n0" / "mpi"), "/"]
    modes = [(tmp_path / path).stat().st_mode & 0o777 for path in ("n0", "n0/mpi")]
    assert modes == [0o700, 0o700], "an SMP refuses a folder that others may read"


def test_mpirun_reaches_a_replacement_host_in_the_job_that_brought_it(tmp_path: Path) -> None:
    settings = reach_by_steps(OPEN_MPI, {"n0": "7", "n5": "8"}, tmp_path, [], tmp_path)
    words = {n: launcher.remote_command(n, ["true"], settings) for n in ("n0", "n5")}
    jobs = {node: [w for w in found if w.startswith("--jobid")] for node, found in words.items()}
    assert jobs == {"n0": ["--jobid=7"], "n5": ["--jobid=8"]}


def test_a_task_of_an_array_is_not_called_by_its_number() -> None:
    assert job_reference({"SLURM_JOB_ID": "7"}) == "7"
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"}
    assert job_reference({"SLURM_JOB_ID": "7", **array}) == "7_4"


def test_a_host_is_asked_for_like_those_that_the_job_has(tmp_path: Path) -> None:
    job = {"SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_ACCOUNT": "us"}
    allocation = Allocation("7", ["n0", "n1"], {}, "7_2")
    words = host_command(allocation, tmp_path, 150.0, ["--partition=spare"], job)
    assert {"--exclusive", "--nodes=1", "--exclude=n0,n1", "--time=2", "--account=us"} <= set(words)
    partitions = [word for word in words if word.startswith("--partition")]
    assert partitions == ["--partition=gpu", "--partition=spare"], "the last one counts"
    assert not [w for w in host_command(allocation, tmp_path, 0.0, [], {}) if "--time" in w]
    script = words[-1].removeprefix("--wrap=")
    assert "--jobs=7_2 " in script
    subprocess.run(["sh", "-n", "-c", script], check=True)


@pytest.mark.parametrize(("state", "ends"), [("RUNNING", False), ("PENDING", True), ("", True)])
def test_a_host_is_given_back_when_its_job_runs_no_more(
    tmp_path: Path, state: str, ends: bool
) -> None:
    """Its memory is freed then, and at scancel too."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho {state}\n")
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.1\n")
    for name in ("squeue", "sleep"):
        (tmp_path / name).chmod(0o700)
    (tmp_path / "job" / "n5").mkdir(parents=True)
    command = host_command(Allocation("7", ["n0"], {}), tmp_path / "job", 0.0, [], {})
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "n5"}
    script = ["sh", "-c", command[-1].removeprefix("--wrap=")]
    with subprocess.Popen(script, env=environment) as host:
        try:
            if ends:
                host.wait(10)
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    host.wait(0.5)
                host.terminate()
                host.wait(10)
        finally:
            # Else a host that does not end would be waited for without a limit.
            host.kill()
    assert not (tmp_path / "job" / "n5").exists()


def test_slurms_configuration_reaches_srun_and_not_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    settings = reach_by_steps(OPEN_MPI, {"n0": "7", "n5": "8"}, tmp_path, [], tmp_path)
    assert json.loads(settings[launcher.SRUN])[:2] == ["env", "SLURM_CONF=/etc/other.conf"]
    assert "SLURM_CONF" not in world_environment(OPEN_MPI, os.environ, tmp_path, settings)


def test_across_nodes_mpi_chooses_its_networks_or_the_user_does(tmp_path: Path) -> None:
    settings = reach_by_steps(OPEN_MPI, {"n0": "7", "n5": "8"}, tmp_path, [], tmp_path)
    chosen = {"OMPI_MCA_btl_tcp_if_include": "ib0"}
    assert "OMPI_MCA_btl" not in world_environment(OPEN_MPI, {}, tmp_path, settings)
    assert world_environment(OPEN_MPI, chosen, tmp_path, settings).items() >= chosen.items()


def test_mpich_reaches_a_node_by_a_program_that_is_called_like_ssh(tmp_path: Path) -> None:
    mpich = MpiLauncher(Path("/bin/mpirun"), MpiKind.MPICH, "5.0.1", "python")
    settings = reach_by_steps(mpich, {"n0": "7", "n1": "7"}, tmp_path, [], tmp_path)
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    environment = {**os.environ, **settings, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert environment["HYDRA_LAUNCHER"] == "ssh"
    command = [settings["HYDRA_LAUNCHER_EXEC"], "-x", "n1", "hydra_pmi_proxy", "--proxy-id", "1"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "--nodelist=n1" in said.stdout and "hydra_pmi_proxy --proxy-id 1" in said.stdout


def test_outside_of_a_job_it_says_where_to_run() -> None:
    with pytest.raises(ConfigError, match=r"sbatch.*salloc"):
        Allocation.from_environment({"SLURM_JOB_ID": "7"})


def test_flags_for_srun_need_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--srun-flags=-v", "--", "true"]) == 2
    assert "--srun-flags needs --launcher slurm" in capsys.readouterr().err
    assert cli.main(["run", "--on-no-spare", "hold", "--", "true"]) == 2
    assert "--on-no-spare hold needs --launcher slurm" in capsys.readouterr().err


def test_a_controller_that_does_not_answer_loses_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is not left counts as failed, and would be replaced, or end the job."""
    answers: dict[str, str | None] = {"squeue": "n[0-1]\n", "scontrol": "n0\nn1\n"}
    monkeypatch.setattr(allocation, "ask", lambda *command: answers[command[0]])
    monkeypatch.setattr(allocation, "FRESH_SECONDS", -1.0)
    job = Allocation("7", ["n0", "n1", "n2"], {})
    assert job.left() == {"n0", "n1"}
    for silent in ("scontrol", "squeue"):
        answers[silent] = None
        assert job.left() == {"n0", "n1"}, f"{silent} says nothing"
    answers.update({"squeue": "n1\n", "scontrol": "n1\n"})
    assert job.left() == {"n1"}


def test_a_job_name_too_long_for_a_socket_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm takes long names, and the batch script's job is called as Slurm's is."""
    there = Allocation("7", ["n0", "n1"], {})
    monkeypatch.setattr(Allocation, "from_environment", lambda: there)
    words = ["--launcher", "slurm", "--protect", "none", "--state-dir", str(tmp_path)]
    assert cli.main(["run", *words, "--job", "long-" * 20, "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "too long for a Unix socket" in said and "JOB in the batch scripts" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SITE)
def test_batch_scripts_ask_for_what_recovery_needs(name: str) -> None:
    text = (ROOT / "scripts" / "slurm" / name).read_text()
    for option in ("--no-kill", "--requeue", "--signal=B:TERM@300", "--open-mode=append"):
        assert f"\n#SBATCH {option}\n" in text
    assert ': "${DRAIN_STOP_SECONDS:=${MEGATRON_FT_DRAIN_STOP_SECONDS:-240}}" ' in text, (
        "less than --signal leaves, by a minute"
    )
    subprocess.run(["bash", "-n", ROOT / "scripts" / "slurm" / name], check=True)


@pytest.mark.parametrize("name", ["supervise.sh", "deputy.sh", "epilog.sh"])
def test_shell_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts" / "slurm" / name], check=True)


@pytest.mark.parametrize(("number", "freed"), [("7", True), ("8", False)])
def test_the_epilog_frees_what_its_job_left_and_nobody_holds(number: str, freed: bool) -> None:
    root = Path(f"/dev/shm/megatron-ft-{os.getpid() + 2**22}")
    folder = root / "job" / "n0"
    folder.mkdir(parents=True)
    (root / "job" / ".worlds" / "w1").mkdir(parents=True)
    empty, starting = root / "emptied", root / "starting"
    for one in (empty, starting):
        one.mkdir()
    os.utime(empty, (0.0, time.time() - 600))
    try:
        for name, content in (("slurm-job", "7"), ("smp.lock", ""), ("a.arena", "x")):
            (folder / name).write_text(content)
        variables = {"SLURM_JOB_UID": root.name.rpartition("-")[2], "SLURM_JOB_ID": number}
        script = ROOT / "scripts" / "slurm" / "epilog.sh"
        with subprocess.Popen(
            ["flock", folder / "smp.lock", "sh", "-c", "echo; read x"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            subprocess.run([script], env={**os.environ, **variables}, check=True)
            assert (folder / "a.arena").exists(), "it was held"
        subprocess.run([script], env={**os.environ, **variables}, check=True)
        assert folder.exists() != freed and folder.parent.exists() != freed
        assert starting.exists() and not empty.exists()
    finally:
        subprocess.run(["rm", "-rf", root], check=True)
