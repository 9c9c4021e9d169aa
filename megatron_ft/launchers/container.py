"""Training commands that start a container, and the environment that has to go into it.

Most of them hand their environment on (apptainer, enroot, pyxis, bwrap).  The clients of a
container engine do not, and what they start is no child of theirs: it would outlive them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR, TREE
from megatron_ft.launchers.launcher_env import base_environment

_CLIENTS = ("docker", "podman", "nerdctl")
_VERBS = ("run", "exec")
PYXIS = "pyxis"
_MOUNTS = {
    **dict.fromkeys(_CLIENTS, "`--volume {folder}:{folder}`"),
    "apptainer": "`--bind {folder}`",
    "singularity": "`--bind {folder}`",
    "enroot": "`--mount {folder}:{folder}`",
    "bwrap": "`--bind {folder} {folder}`",
    PYXIS: "`--container-mounts={folder}:{folder}` within --srun-flags",
}
SHARED_MEMORY = Path("/dev/shm")
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


def runtime_of(command: Sequence[str], srun_flags: str = "") -> str:
    """The program that puts trainers into a container; empty if none is seen."""
    name = Path(command[0]).name if command else ""
    if name in _MOUNTS:
        return name
    return PYXIS if "--container-" in srun_flags else ""


def python_of(command: Sequence[str]) -> list[str] | None:
    """The training command up to and with its Python: what wraps a trainer.  Pure.

    None if no word of it is a Python.
    """
    for index, word in enumerate(command):
        if _PYTHON.fullmatch(Path(word).name):
            return list(command[: index + 1])
    return None


def mount_advice(runtime: str, folder: Path) -> str:
    """The argument of ``runtime`` that shows the host's ``folder`` to what is inside."""
    text = _MOUNTS.get(runtime, "the host's {folder} mounted at the same path")
    advice = "give the container " + text.format(folder=folder)
    if runtime in _CLIENTS and folder.is_relative_to(SHARED_MEMORY):
        advice += ", or `--ipc host`"
    return advice


def processes_advice(runtime: str) -> str:
    """The argument that gives a container the host's process numbers."""
    return f"give {runtime or 'the container'} {_PROCESSES.get(runtime, '`--pid host`')}"


_PROCESSES = {"bwrap": "no `--unshare-pid`", "apptainer": "no `--pid`", "singularity": "no `--pid`"}


def pass_environment(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], str]:
    """The command with the variables that its container needs, and the mark that ends it.

    Names only, so that no value is seen in a list of processes: those of ``environment`` that
    this process does not have itself, and of what a launcher adds.  The mark is empty where the
    command is no engine's client.  Else it is to be the value of TREE in the environment of the
    command, which keeps it from the client: its helpers have to clean up when all is over.
    """
    words = list(command)
    if runtime_of(words) not in _CLIENTS or not (at := _verb(words)):
        return words, ""
    own, mark = base_environment(), environment.get(TREE) or uuid.uuid4().hex
    names = {n for n, value in environment.items() if own.get(n) != value or n.startswith(_OURS)}
    names = (names | {JOB, NODE, NODE_DIR, INCARNATION}) - {TREE}
    flags = [word for name in sorted(names) for word in ("--env", name)]
    inside = ["--env", f"{TREE}={mark}", *flags]
    return ["env", "-u", TREE, *words[: at + 1], *inside, *words[at + 1 :]], mark


_OURS = "MEGATRON_FT_"


def _verb(words: Sequence[str]) -> int:
    """Position of ``run`` or ``exec``; 0 if there is none."""
    return next((at for at, word in enumerate(words) if at and word in _VERBS), 0)
