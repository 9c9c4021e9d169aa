"""The command line's dispatch and `megatron-ft clean`, run as users run them."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from megatron_ft import __version__
from megatron_ft.cli import main as cli
from megatron_ft.cli.clean import JobFolder
from megatron_ft.cli.run_place import place_of
from megatron_ft.core import private_files
from megatron_ft.core.environment import JOB, NODE_DIR
from megatron_ft.core.errors import ConfigError, ControlPlaneError
from megatron_ft.core.objects import decode, encode
from megatron_ft.launchers.trainer_host import ROOM
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.rpc.local_query import ask
from megatron_ft.rpc.messages import StatusRequest
from megatron_ft.supervisor.job_state import JobState, state_folder
from tests.support.smp_node import SmpNode


def make_job(root: Path, job: str) -> Path:
    node = root / job / "node-0"
    node.mkdir(parents=True)
    (node / "pp0-tp0-dp0.arena").write_bytes(bytes(8192))
    (node / "smp.lock").touch()
    return node


def clean(root: Path, *options: str) -> int:
    return cli.main(["clean", "--arena-dir", str(root), *options])


def test_version_and_overview(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command.name in shown for command in cli.COMMANDS)


def test_help_of_a_command_documents_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["clean", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "exit codes:\n  0 " in shown
    assert "still runs" in shown


@pytest.mark.parametrize("argv", [[], ["clean"], ["clean", "--bogus"]])
def test_bad_usage_exits_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("stats", "there is no command 'stats'; did you mean status?"),
        ("xyz", "there is no command 'xyz'; see `megatron-ft --help`"),
        (
            "run --protct rs:3+1 -- true",
            "there is no flag --protct; did you mean --protect? See `megatron-ft run --help`",
        ),
        ("run --drain_dir=/x -- true", "no flag --drain_dir; did you mean --drain-dir?"),
        ("run --inmem-protect xor:2 -- true", "no flag --inmem-protect; did you mean --protect?"),
        ("run --node 4 -- true", "there is no flag --node; did you mean --nodes?"),
        ("run --nodes four -- true", "--nodes: 'four' is not a whole number; see"),
        ("drain --to x --bandwidth-mib nan", "--bandwidth-mib: 'nan' is not a number; see"),
        ("clean --all more", "unexpected argument 'more'; see `megatron-ft clean --help`"),
        ("chaos list", "no program 'list'"),
    ],
)
def test_a_wrong_input_is_one_line_that_names_the_right_one(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code: object
    try:
        code = cli.main(argv.split())
    except SystemExit as left:
        code = left.code
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("megatron-ft: error: ") and said in lines[0]


def test_help_shows_what_few_need_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main(["run", flag])
        shown[flag] = capsys.readouterr().out
    assert "  --lease-seconds " not in shown["--help"] and "  --protect " in shown["--help"]
    assert "  --lease-seconds " in shown["--help-all"] and "  --protect " in shown["--help-all"]


def test_completion_knows_commands_flags_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "hosts").touch()

    def offered(*words: str) -> list[str]:
        line = shlex.join(("megatron-ft", *words))
        program = (
            f"source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
            "$(complete -p megatron-ft | grep -o -- '-F [^ ]*' | cut -c4-); "
            "printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30
        )
        assert not done.stderr
        return sorted(done.stdout.split())

    assert offered("e") == ["evacuate", "export"]
    assert offered("run", "--prot") == ["--protect"]
    assert offered("run", "--launcher", "s") == ["slurm"]
    assert offered("run", "--hostfile", "ho") == ["hosts"]
    assert offered("run", "--nodes", "2", "--", "ho") == ["hosts"]
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef megatron-ft")


def test_config_shows_each_setting_and_where_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_FT_LEASE_SECONDS", "20")
    training = ["python", "pretrain_gpt.py", "--inmem-snapshot", "--inmem-snapshot-interval", "7"]
    assert cli.main(["config", "--protect", "xor:2", "--", *training]) == 0
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert shown["protect"][:1] == ["xor:2"] and shown["protect"][-1] == "--protect`"
    assert shown["snapshot_interval"] == ["7", "iterations", "--inmem-snapshot-interval"]
    assert shown["lease_seconds"] == ["20.0", "seconds", "MEGATRON_FT_LEASE_SECONDS"]
    assert shown["drain_dir"] == ["none", "default"]
    assert cli.main(["config", "--json", "--", *training]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slots"] == {"value": "auto", "unit": "snapshots", "from": "default"}


def test_config_says_what_will_be_captured_derived_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = tmp_path / "ds.json"
    section.write_text('{"inmem_snapshot": {"enabled": true}}')
    said = {}
    for client, words in {
        "mapping": ["loop.py"],
        "megatron": ["pretrain_gpt.py", "--inmem-snapshot"],
        "deepspeed": ["train.py", "--deepspeed_config", str(section)],
    }.items():
        assert cli.main(["config", "--", "python", *words]) == 0
        (said[client],) = (
            line for line in capsys.readouterr().out.splitlines() if line.startswith("captured: ")
        )
        assert "; derived in a restore: " in said[client] and "; left out: " in said[client]
    assert "state mapping" in said["mapping"] and "leave_out" in said["mapping"]
    assert "client_state" in said["deepspeed"] and "client_state" not in said["megatron"]


def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "megatron_ft", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"megatron-ft {__version__}\n"


def test_help_of_no_command_needs_torch() -> None:
    names = [command.name for command in cli.COMMANDS]
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_ft.cli.main import main\n"
        f"for name in {names}:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as left: assert left.code == 0, name\n"
        "    print('shown:', name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert re.findall("^shown: (.*)$", done.stdout, re.MULTILINE) == names


def test_errors_are_one_line_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert clean(tmp_path, "--job", "absent") == 2
    assert capsys.readouterr().err.startswith("megatron-ft: error: no job 'absent'")


def test_missing_package_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def need_torch(root: Path) -> None:
        raise ModuleNotFoundError("No module named 'torch.cuda'", name="torch.cuda")

    monkeypatch.setattr("megatron_ft.cli.clean.find_jobs", need_torch)
    assert clean(tmp_path, "--all") == 2
    assert "needs torch" in capsys.readouterr().err


def test_export_imports_first_what_registers_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_phases.py").write_text(
        "import enum\nfrom megatron_ft import register_class\n"
        "class Phase(enum.Enum):\n    WARM = 1\nregister_class(Phase)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    nothing = ["--from", str(tmp_path / "nothing"), "--to", str(tmp_path / "to")]
    assert cli.main(["export", "--import", "my_phases", *nothing]) == 2
    assert "nothing" in capsys.readouterr().err
    assert decode(encode(sys.modules["my_phases"].Phase.WARM)).name == "WARM"
    assert cli.main(["export", "--import", "my_phase", *nothing]) == 2
    assert "--import my_phase cannot be imported" in capsys.readouterr().err


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(root: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_ft.cli.clean.find_jobs", interrupt)
    assert clean(tmp_path, "--all") == 130


@pytest.mark.parametrize(
    "words",
    ["verify {0}", "status --arena-dir {0}", "drain --to /tmp --arena-dir {0}", "clean --all {1}",
     "export --to /tmp --from {0}"],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    folder = tmp_path / ("x" * 300)
    assert cli.main(words.format(folder, f"--arena-dir {folder}").split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"megatron-ft: error: {folder}") and "File name too long" in said
    assert said.count("\n") == 1


def test_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_ft.cli.main", "clean", "--all", "--dry-run"]
    process = subprocess.Popen(
        [*command, "--arena-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (141, b"")


def test_what_the_encoding_lacks_is_shown_as_an_escape(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode("模".encode() + b"\xff")
    command = [sys.executable, "-m", "megatron_ft.cli.main", "clean", "--all", "--arena-dir", root]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = f"nothing to clean under {tmp_path}/\\u6a21\\udcff\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.parametrize("output", ["> /dev/full", "| true", ">&-"])
def test_a_job_whose_output_nobody_takes_goes_on(tmp_path: Path, output: str) -> None:
    """The disk of its log is full, the reader of a pipe is gone, there is no output at all."""
    job, training = f"test-{uuid.uuid4().hex[:8]}", tmp_path / "trained"
    run = [sys.executable, "-m", "megatron_ft.cli.main", "run", "--job", job, "--nodes", "1"]
    run += ["--protect", "none", "--state-dir", str(tmp_path / "state")]
    run += ["--", "sh", "-c", f"echo done > {shlex.quote(str(training))}"]
    shell = f"set -o pipefail; {shlex.join(run)} {output}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["bash", "-c", shell], env=environment, stderr=subprocess.PIPE, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert training.read_text() == "done\n"
    finally:
        VirtualCluster(job, ["node0"]).destroy()


def test_clean_removes_only_the_named_job(tmp_path: Path) -> None:
    make_job(tmp_path, "old")
    make_job(tmp_path, "other")
    assert clean(tmp_path, "--job", "old") == 0
    assert sorted(os.listdir(tmp_path)) == ["other"]


def test_clean_all_removes_every_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path, "a")
    make_job(tmp_path, "b")
    assert clean(tmp_path, "--all") == 0
    assert os.listdir(tmp_path) == []
    assert clean(tmp_path / "absent", "--all") == 0
    assert "nothing to clean" in capsys.readouterr().out


def test_dry_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = make_job(tmp_path, "old")
    (node / "smp.lock").unlink()
    before = sorted(tmp_path.rglob("*"))
    assert clean(tmp_path, "--all", "--dry-run") == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert "would remove" in capsys.readouterr().out


@pytest.mark.parametrize("lock", ["node-0/smp.lock", "supervisor.lock"])
def test_job_whose_lock_is_held_is_left_alone(
    tmp_path: Path, lock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, "alive")
    make_job(tmp_path, "dead")
    with open(tmp_path / "alive" / lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert clean(tmp_path, "--job", "alive") == 1
        assert "alive: still runs" in capsys.readouterr().err
        assert clean(tmp_path, "--all") == 0
    assert os.listdir(tmp_path) == ["alive"]
    assert (tmp_path / "alive/node-0/pp0-tp0-dp0.arena").exists()
    assert clean(tmp_path, "--job", "alive") == 0


@pytest.mark.parametrize("variable", [JOB, NODE_DIR])
def test_job_with_a_living_process_is_left_alone(
    tmp_path: Path, variable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_job(tmp_path, "alive")
    value = "alive" if variable == JOB else str(node)
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, variable: value},
    ) as process:
        assert process.stdout and process.stdout.readline()
        private_files.replace_file(node / "smp.pid", f"{process.pid}\n".encode())
        assert clean(tmp_path, "--job", "alive") == 1
        assert f"still runs (process {process.pid})" in capsys.readouterr().err
    assert clean(tmp_path, "--job", "alive") == 0


def test_a_trainer_host_that_was_left_behind_ends_with_its_job(tmp_path: Path) -> None:
    make_job(tmp_path, "stopped")
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    marked = {**os.environ, JOB: "stopped", ROOM: "x"}
    with subprocess.Popen(
        waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marked
    ) as process:
        assert process.stdout and process.stdout.readline()
        assert clean(tmp_path, "--job", "stopped", "--dry-run") == 0
        assert process.poll() is None
        assert clean(tmp_path, "--job", "stopped") == 0
        assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("remove", ["socket", "folder"])
def test_clean_ends_a_stopped_smp(
    tmp_path: Path, remove: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped; another process of the job keeps it, and so does a supervisor."""
    # By its name alone a process of another test would be one of this job.  A socket's path has
    # at most 107 characters.
    name = f"c{os.getpid()}"
    node = SmpNode(tmp_path / "root" / name, job=name)
    node.environment.node_dir.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "root").chmod(0o700)
    words = ["--job", name, "--state-dir", str(tmp_path / "state")]
    try:
        node.start()
        asyncio.run(node.endpoint())
        assert node.process is not None
        assert clean(tmp_path / "root", "--all") == 0
        assert "SMPs of a stopped job end with" in capsys.readouterr().err
        # One that runs makes them again.
        os.kill(node.process.pid, signal.SIGSTOP)
        if remove == "socket":
            (node.environment.node_dir / "smp.sock").unlink()
        else:
            shutil.rmtree(node.environment.node_dir.parent)
        waits = [sys.executable, "-c", "print(flush=True); input()"]
        marked = {**os.environ, JOB: name}
        with subprocess.Popen(
            waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marked
        ) as trainer:
            assert trainer.stdout is not None and trainer.stdout.readline()
            code = 1 if remove == "socket" else 2
            assert cli.main(["clean", "--arena-dir", str(tmp_path / "root"), *words]) == code
            trainer.communicate(b"\n", 10)
        with JobState(state_folder(name, tmp_path / "state"), name):
            assert cli.main(["clean", "--arena-dir", str(tmp_path / "root"), *words]) == code
        assert node.process.poll() is None
        assert clean(tmp_path / "root", *words) == 0
        assert node.process.wait(10) == -signal.SIGKILL
        assert "ended 1 SMPs" in capsys.readouterr().out
    finally:
        node.kill()
    assert not (tmp_path / "root" / name).exists()


def test_a_finished_job_leaves_no_file_of_a_daemon_that_died(tmp_path: Path) -> None:
    flags = {"launcher": "virtual", "nodes": 1, "spares": 0, "job": "job"}
    arguments = argparse.Namespace(**flags, srun_flags="", sbatch_flags="")
    place = place_of(arguments, tmp_path / "root", tmp_path / "state", tmp_path / "meeting")
    node = place.launcher.node_dir("node0")
    node.mkdir(parents=True, exist_ok=True)
    (node / "smp.pid").touch()
    (node.parent / ".worlds").mkdir()
    place.clean()
    assert not (tmp_path / "root" / "job").exists()


def test_reused_process_id_does_not_keep_a_job(tmp_path: Path) -> None:
    node = make_job(tmp_path, "old")
    private_files.replace_file(node / "smp.pid", f"{os.getppid()}\n".encode())
    assert clean(tmp_path, "--job", "old") == 0


def test_nobody_waits_for_an_smp_that_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "smp.sock"
    with pytest.raises(ControlPlaneError, match="dead"):
        ask(path, StatusRequest(), timeout_seconds=10_000)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))  # a file that stays, as after SIGKILL
    path.chmod(0o600)
    with pytest.raises(ControlPlaneError, match="dead"):
        ask(path, StatusRequest(), timeout_seconds=10_000)


def test_links_are_never_followed(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    make_job(treasure, "precious")
    root = tmp_path / "root"
    make_job(root, "old")
    (root / "link").symlink_to(treasure)
    (root / "old" / "link").symlink_to(treasure)
    assert clean(root, "--all") == 0
    assert (treasure / "precious/node-0/pp0-tp0-dp0.arena").exists()
    (tmp_path / "linked-root").symlink_to(treasure)
    assert clean(tmp_path / "linked-root", "--all") == 2
    assert (treasure / "precious").exists()


def test_foreign_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ft.cli.clean import find_jobs

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        find_jobs(tmp_path)


def test_pause_is_told_to_one_job_and_to_all_of_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them is dead; an empty name, as of a variable that is not set, is none."""
    dead, alive = SmpNode(tmp_path / "job1", "n0"), SmpNode(tmp_path / "job1", "n1")
    other = SmpNode(tmp_path / "job2", "n0")
    nodes = (dead, alive, other)
    try:
        for node in nodes:
            node.log.parent.mkdir(exist_ok=True)
            node.start()
        for node in nodes:
            asyncio.run(node.endpoint())
        dead.kill()
        for name in ("", "*", "job?"):
            assert pause(tmp_path, "pause", name) == 2, capsys.readouterr()
        assert [is_paused(node) for node in (alive, other)] == [False, False]
        assert pause(tmp_path, "pause", "job1") == 0
        assert "paused on 1 nodes\nn0 was not reached: no SMP listens" in capsys.readouterr().out
        assert [is_paused(node) for node in (alive, other)] == [True, False]
        assert pause(tmp_path, "resume", "job1") == 0
        assert not is_paused(alive)
    finally:
        for node in nodes:
            node.kill()


def pause(root: Path, command: str, job: str) -> int:
    return cli.main([command, "--arena-dir", str(root), "--job", job])


def is_paused(node: SmpNode) -> bool:
    paused: bool = ask(node.environment.socket, StatusRequest()).paused
    return paused


def test_files_that_a_running_job_replaces_are_counted_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was listed, then the file's writer renamed it."""
    make_job(tmp_path, "job")
    walked = list(os.walk(tmp_path / "job"))
    (tmp_path / "job" / "node-0" / "smp.lock").unlink()
    monkeypatch.setattr("megatron_ft.cli.clean.os.walk", lambda path: walked)
    assert JobFolder(tmp_path / "job").allocated_bytes() == 8192


def test_jobs_are_looked_for_where_run_was_told_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("named", "told"):
        make_job(tmp_path / folder, f"job-{folder}")
    monkeypatch.setenv("MEGATRON_FT_ARENA_DIR", str(tmp_path / "told"))
    assert cli.main(["clean", "--all", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "job-told" in said and "job-named" not in said
    assert cli.main(["clean", "--all", "--dry-run", "--arena-dir", str(tmp_path / "named")]) == 0
    said = capsys.readouterr().out
    assert "job-named" in said and "job-told" not in said
