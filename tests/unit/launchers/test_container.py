"""What goes into a trainer's container, and how a wrong one is recognised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from megatron_ft.cli.doctor.facts import Facts
from megatron_ft.cli.doctor.node_checks import containers
from megatron_ft.cli.doctor.report import Severity
from megatron_ft.core.environment import TREE
from megatron_ft.launchers.container import pass_environment
from megatron_ft.launchers.slurm.launcher import step_command
from tests.support import doctor_facts

PODMAN = ["podman", "--log-level", "error", "run", "--rm", "image", "python", "train.py"]


def test_an_engine_is_told_names_and_its_client_not_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDITOR", "ed")
    monkeypatch.setenv("RANK", "3")
    given = {"EDITOR": "ed", "RANK": "3", "MEGATRON_FT_PROTECT": "xor:2", "PYTHONPATH": "/new"}
    words, mark = pass_environment(PODMAN, given)
    assert words[:7] == ["env", "-u", TREE, *PODMAN[:4]]
    assert words[7:9] == ["--env", f"{TREE}={mark}"] and words[-4:] == PODMAN[-4:]
    names = words[10:-4:2]
    assert set(words[9:-4:2]) == {"--env"} and "EDITOR" not in names
    assert {"RANK", "PYTHONPATH", "MEGATRON_FT_PROTECT", "MEGATRON_FT_NODE_DIR"} <= set(names)
    assert pass_environment(PODMAN, given)[1] != mark
    assert pass_environment(PODMAN, {TREE: "given"})[1] == "given"


@pytest.mark.parametrize(
    "command", [["python", "run"], ["apptainer", "run", "x.sif"], ["docker", "ps"], []]
)
def test_other_commands_stay_as_they_are(command: list[str]) -> None:
    assert pass_environment(command, {"RANK": "0"}) == (command, "")


def facts(**changes: object) -> Facts:
    said = doctor_facts.facts()
    nodes = {n: msgspec.structs.replace(f, pid_namespace=7) for n, f in said.answered.items()}
    trainers = dict(said.as_trainers)
    trainers["n1"] = msgspec.structs.replace(trainers["n1"], **changes)
    return msgspec.structs.replace(said, nodes=nodes, trainers=trainers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pid_namespace": 8, "user": 1000}, "give the container `--pid host`"),
        ({"user": 0}, "start the container with `--user 1000`"),
    ],
)
def test_trainers_that_their_smp_cannot_end_are_refused(
    changes: dict[str, object], words: str
) -> None:
    bad, good = containers(facts(**changes))
    assert (bad.verdict, bad.nodes, bad.advice) == (Severity.REFUSED, ("n1",), words)
    assert good.verdict is Severity.OK
    (all_good,) = containers(facts(pid_namespace=7, user=1000))
    assert all_good.verdict is Severity.OK


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_doctor_looks_into_a_container(tmp_path: Path) -> None:
    """A mount namespace with a /dev/shm of its own, and one with numbers of its own besides."""
    mount = 'mount -t tmpfs none /dev/shm && exec "$@"'
    hidden = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", mount, "sh"]
    words = [sys.executable, "-m", "megatron_ft.cli.main", "doctor", "--json", "--nodes", "1"]
    words += ["--protect", "none", "--state-dir", str(tmp_path)]
    done = subprocess.run(
        [*words, "--", *hidden, sys.executable, "train.py"],
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    arena, numbers = found["same arena"], found["containers"]
    assert done.returncode == 1
    assert "No such file" in arena["text"] and "the host's /dev/shm" in arena["advice"]
    assert "process numbers of their own" in numbers["text"] and "pid host" in numbers["advice"]


def test_flags_of_a_container_reach_every_step(tmp_path: Path) -> None:
    """As a user gives them to pyxis; see tests of Slurm for what they become."""
    flags = ["--container-image=x.sqsh", "--container-mounts=/dev/shm:/dev/shm"]
    command = step_command("7", "n0", ["python", "x.py"], tmp_path / "log", flags)
    at = command.index("--container-image=x.sqsh")
    assert command[at : at + 2] == flags and command.index("/bin/sh") > at
