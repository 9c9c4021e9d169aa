"""Hostfiles of Open MPI and DeepSpeed: ``name slots=8`` a line, ``#`` begins a comment.

Formats are those of prterun's and DeepSpeed's documentation.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ft.core.errors import ConfigError

_LINE = re.compile(r"(\S+?)(?::\d+)?((?:\s+(?:slots|max[_-]slots)\s*=\s*\d+)*)")


def read_hostfile(file: Path) -> list[str]:
    """Names of the hosts, in order; slots are what other launchers go by.

    ConfigError, which names the line, for what is no hostfile.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {file} cannot be read: {error}") from error
    return parse_hostfile(lines, str(file))


def parse_hostfile(lines: list[str], where: str) -> list[str]:
    """As ``read_hostfile``.  Pure."""
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and match is None:
            raise ConfigError(f"{where}, line {number}: {line!r} is no `name slots=8`")
        if match is not None:
            if match.group(1) in hosts:
                raise ConfigError(f"{where}, line {number}: {match.group(1)} is there twice")
            hosts.append(match.group(1))
    if not hosts:
        raise ConfigError(f"{where} names no host; write a line `name slots=8` for each")
    return hosts
