"""Training commands that start a container, and the environment that has to go into it.

Most of them hand their environment on (apptainer, enroot, pyxis, bwrap).  The clients of a
container engine do not, and what they start is not a child of theirs: it would outlive them.
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
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


def python_of(command: Sequence[str]) -> list[str] | None:
    """The training command up to and with its Python: what wraps a trainer.  Pure.

    None if it names no Python.
    """
    for index, word in enumerate(command):
        if _PYTHON.fullmatch(Path(word).name):
            return list(command[: index + 1])
    return None


def pass_environment(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], str]:
    """The command with the variables that its container needs, and the mark that ends it.

    Names only, so that no value is seen in a list of processes: those of ``environment`` that
    this process does not have itself, and of what a launcher adds.  The mark is empty where the
    command is not an engine's client.  Else it is to be the value of TREE in the environment of the
    command, which keeps it from the client: its helpers have to clean up when all is over.
    """
    words = list(command)
    at = next((at for at, word in enumerate(words) if at and word in _VERBS), 0)
    if not at or Path(words[0]).name not in _CLIENTS:
        return words, ""
    own, mark = base_environment(), environment.get(TREE) or uuid.uuid4().hex
    names = {n for n, value in environment.items() if own.get(n) != value or n.startswith(_OURS)}
    names = (names | {JOB, NODE, NODE_DIR, INCARNATION}) - {TREE}
    flags = [word for name in sorted(names) for word in ("--env", name)]
    inside = ["--env", f"{TREE}={mark}", *flags]
    return ["env", "-u", TREE, *words[: at + 1], *inside, *words[at + 1 :]], mark


_OURS = "MEGATRON_FT_"
