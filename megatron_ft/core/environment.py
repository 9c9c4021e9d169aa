"""Environment variables of the processes of a job, and names of jobs and nodes.

The supervisor sets the variables for each process that it starts.  Names of jobs and nodes are
names of folders, and part of the path of a Unix socket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_ft.core.errors import ConfigError, NotUnderSupervisorError

JOB = "MEGATRON_FT_JOB"
NODE = "MEGATRON_FT_NODE"
NODE_DIR = "MEGATRON_FT_NODE_DIR"
INCARNATION = "MEGATRON_FT_INCARNATION"

START = "MEGATRON_FT_START"
"""The StartKind of this trainer; without it, cold."""

WHY_COLD = "MEGATRON_FT_WHY_COLD"
"""Reason why a trainer that was to start warm has started cold."""

StartKind = Literal["in process", "warm", "cold"]
"""A trainer restarted in its process, was forked by a trainer host, or was started as a command."""

STARTS: tuple[StartKind, ...] = get_args(StartKind)

TREE = "MEGATRON_FT_TREE"
"""Names all processes of one start, also those with a session of their own or no parent.

A process whose children start others sets it; the launcher ends all of them together.
"""

RESTORE = "MEGATRON_FT_RESTORE"
"""Source of an incarnation's state: "memory", or "disk" for the framework's own checkpoint.

"rewound" is memory, too, even where the framework has a newer checkpoint: that one is of what
was given up.
"""

SOCKET_NAME = "smp.sock"
READY_NAME = "smp.json"
HOST_SOCKET_NAME = "host.sock"
IMPORTS_NAME = "imports.json"
"""File next to the sockets: the modules that the node's first trainer has imported."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of a supervised process: its job, node, the node's folder, the job's incarnation.

    ``node_dir`` holds the SMP's socket and the arenas.
    """

    job: str
    node: str
    node_dir: Path
    incarnation: int

    @property
    def socket(self) -> Path:
        return self.node_dir / SOCKET_NAME

    def variables(self) -> dict[str, str]:
        return {
            JOB: self.job,
            NODE: self.node,
            NODE_DIR: str(self.node_dir),
            INCARNATION: str(self.incarnation),
        }

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> ProcessEnvironment:
        """Read the variables back; NotUnderSupervisorError if one is missing."""
        source = os.environ if environment is None else environment
        missing = [n for n in (JOB, NODE, NODE_DIR, INCARNATION) if n not in source]
        if missing:
            raise NotUnderSupervisorError(
                f"{', '.join(missing)} not set: start the training command with "
                "`megatron-ft run -- <command>`, which starts the SMP that keeps snapshots"
            )
        return cls(source[JOB], source[NODE], Path(source[NODE_DIR]), int(source[INCARNATION]))


def start_kind() -> StartKind:
    given = os.environ.get(START)
    return next((kind for kind in STARTS if kind == given), "cold")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# struct sockaddr_un, unix(7), less the final zero.
_SOCKET_PATH_LIMIT = 107


def check_names(root: Path, job: str, nodes: Sequence[str]) -> None:
    """ConfigError for names that cannot be folders, repeat, or make socket paths too long."""
    for name in (job, *nodes):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a job or node: use letters, digits, dots, _ and -"
            )
    if len(set(nodes)) != len(nodes):
        raise ConfigError(f"node names repeat: {list(nodes)}")
    for name in nodes:
        socket = root / job / name / HOST_SOCKET_NAME
        if len(os.fsencode(socket)) > _SOCKET_PATH_LIMIT:
            raise ConfigError(
                f"{socket} is too long for a Unix socket ({_SOCKET_PATH_LIMIT} bytes); take "
                "a shorter --job (JOB in the batch scripts) or --arena-dir"
            )
