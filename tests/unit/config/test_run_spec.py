"""What is asked for on the command line of ``megatron-ft run`` reaches the job."""

from __future__ import annotations

import argparse
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from megatron_ft.cli import main as cli
from megatron_ft.cli import run, run_place
from megatron_ft.cli.training_command import command_of, settle
from megatron_ft.config import SETTINGS, SnapshotConfig
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.spec import JobSpec

JOB_SETTINGS = {name for name, setting in SETTINGS.items() if setting.job} - {"arena_dir"}
GIVEN = {
    "--drain-dir": "/data/drains",
    "--drain-interval": "7",
    "--drain-minutes": "8.5",
    "--keep-minutes": "2.5",
    "--drain-keep": "5",
    "--drain-bandwidth-mib": "12.0",
    "--drain-export-dir": "/data/exports",
    "--drain-stop-seconds": "33.0",
    "--time-limit-seconds": "4000.0",
    "--scrub-percent": "2.5",
    "--transport": "tcp",
    "--quarantine-iterations": "21",
    "--compare-replicas": "3",
    "--compare-except": "model/ema.*",
    "--checkpoint-dir": "/data/exports",
    "--slots": "3",
    "--copy-threads": "6",
    "--protect": "rs:2+1",
    "--lease-seconds": "17.0",
    "--register-timeout-seconds": "99.0",
    "--overhead-percent": "2.5",
    "--p99-budget-percent": "5.0",
    "--expected-mtbf-hours": "7.5",
    "--encode-bandwidth-mib": "640.0",
    "--hang-seconds": "44.0",
    "--restart": "new-process",
    "--on-no-spare": "shrink",
    "--host-seconds": "90.0",
    "--queue-seconds": "45.0",
    "--grow": "off",
    "--exposed-iterations": "9",
}


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"2": ["--flag", "1"], "1": null}')
    words = [word for pair in GIVEN.items() for word in pair] + ["--shapes", str(shapes)]
    arguments = parser.parse_args(["--job", "job", *words, "--", "python", "train.py"])
    command = command_of(arguments)
    settings = settle(vars(arguments), command, {})
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory() as root:
        place = run_place.place_of(arguments, Path(root), tmp_path / "notes", tmp_path / "meeting")
    nodes = place.launcher.nodes()
    return run.spec_from(arguments, command, settings, place.nodes, nodes, place.seconds_left)


@pytest.mark.parametrize("name", sorted(JOB_SETTINGS))
def test_a_setting_has_the_value_of_its_flag(spec: JobSpec, name: str) -> None:
    value, flag = getattr(spec.settings, name), "--" + name.replace("_", "-")
    assert flag in GIVEN, f"give {flag} a value here that is not its default"
    assert value == type(value)(GIVEN[flag]) and value != getattr(SnapshotConfig(), name)


def test_what_follows_from_settings(spec: JobSpec) -> None:
    assert spec.command == ("python", "train.py")
    assert [spec.arguments_for(n) for n in (1, 2, 3, spec.nodes)] == [(), ("--flag", "1"), (), ()]
    assert str(spec.scheme) == "rs:2+1"
    assert (spec.timing.lease, spec.timing.node_timeout) == (17.0, 25.5)
    assert spec.checkpoint_dir == Path("/data/exports")
    assert spec.trainer_environment["MEGATRON_FT_DRAIN_KEEP"] == "5"


def test_a_job_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory() as root:
        words = ["--nodes", "2", "--protect", "rs:3+1", "--arena-dir", root]
        words += ["--state-dir", str(tmp_path), "--", "python", "train.py"]
        assert cli.main(["run", *words]) == 2
        assert os.listdir(root) == []


# Not even root makes folders there.
NOWHERE = "/proc/nowhere"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--nodes", "0"], "--nodes is 0"),
        (["--state-dir", NOWHERE], "give a --state-dir"),
        (["--log-dir", NOWHERE], f"--log-dir {NOWHERE} cannot be made"),
        (["--drain-dir", NOWHERE, "--drain-interval", "1"], "--drain-dir"),
        (["--log-dir", "/dev/null"], "is not a folder"),
        (["--arena-dir", NOWHERE], "give an --arena-dir"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    with tempfile.TemporaryDirectory() as root:
        words = ["--nodes", "1", "--protect", "none", "--arena-dir", root]
        words += ["--state-dir", str(tmp_path), *given, "--", "true"]
        assert cli.main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-ft: error: ") and said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--host-seconds", "-1"), ("--queue-seconds", "soon"), ("--hold-seconds", "nan")],
)
def test_an_estimate_that_makes_no_sense_is_refused_by_the_name_of_its_flag(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    try:
        code = cli.main(["run", flag, value, "--", "true"])
    except SystemExit as end:
        code = end.code
    assert code == 2 and flag in capsys.readouterr().err


def test_a_job_refused_after_its_smps_started_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with tempfile.TemporaryDirectory() as root:
        words = ["--nodes", "1", "--protect", "none", "--arena-dir", root, "--job", "refused"]
        words += ["--state-dir", str(tmp_path), "--", str(program)]
        try:
            assert cli.main(["run", *words]) == 2
            assert not list(Path(root).iterdir())
        finally:
            VirtualCluster("refused", ["node0"], Path(root)).destroy()
    said = capfd.readouterr()
    assert f"cannot start '{program}'" in said.err
    assert "megatron-ft clean" not in said.out


def test_a_user_without_a_home_folder_is_told_of_state_dir(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of a container whose number nobody has in a password file."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert cli.main(["run", "--", "true"]) == 2
    assert "no home folder for the job's notes: give --state-dir" in capsys.readouterr().err
