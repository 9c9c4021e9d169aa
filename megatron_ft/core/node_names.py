"""What jobs and nodes may be called: they name folders and the way to a Unix socket."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.core.environment import SOCKET_NAME
from megatron_ft.core.errors import ConfigError

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
    check_sockets(root, job, nodes)


def check_sockets(root: Path, job: str, nodes: Sequence[str]) -> None:
    """ConfigError for names that make socket paths too long."""
    for name in nodes:
        socket = root / job / name / SOCKET_NAME
        if len(os.fsencode(socket)) > _SOCKET_PATH_LIMIT:
            raise ConfigError(
                f"{socket} is too long for a Unix socket ({_SOCKET_PATH_LIMIT} bytes); take "
                "a shorter --job (JOB in the batch scripts) or --arena-dir"
            )
