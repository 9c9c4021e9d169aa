"""Failure domains of nodes, from a file of lines ``rack1: node[0-3],node7``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_ft.core.errors import ConfigError

_ENTRY = re.compile(r"([^\s:=]+)\s*:\s*(\S.*)")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_MOST_NAMES = 1 << 16


def read_domains(source: str, nodes: Sequence[str]) -> dict[str, str]:
    """Failure domain of each of ``nodes``, from a file.

    ConfigError for a file that cannot be read or understood, or that does not name a node.
    """
    try:
        found = parse_domains(Path(source).read_text(), source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--failure-domains {source} cannot be read: {error}") from error
    missing = [node for node in nodes if node not in found]
    if missing:
        raise ConfigError(
            f"{source} puts {', '.join(missing)} in no failure domain; it names "
            f"{', '.join(sorted(found)[:8]) or 'no node'}. Add them, each in a domain of its own "
            "if it shares nothing with another"
        )
    return {node: found[node] for node in nodes}


def parse_domains(text: str, where: str) -> dict[str, str]:
    """Failure domain by node.  Pure; ConfigError, which names the line, for what is no such file.

    ``#`` begins a comment.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line, place = raw.partition("#")[0].strip(), f"{where}, line {number}"
        if not line:
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise ConfigError(
                f"{place}: {line!r} is not a valid failure domain; write `rack1: node[0-3],node7`"
            )
        name, nodes = entry.groups()
        for node in expand_hostlist(re.sub(r"\s*,\s*", ",", nodes), place):
            if found.setdefault(node, name) != name:
                raise ConfigError(
                    f"{place}: {node} is in failure domain {name} and in {found[node]}; "
                    "a node is in one"
                )
    return found


def expand_hostlist(expression: str, place: str = "hostlist") -> list[str]:
    """Host names of ``n[0-3,07],m1``: ranges keep their leading zeros.  Pure.

    ConfigError, which begins with ``place``, for brackets or ranges that make no sense.
    """
    return [name for part in _split(expression, place) for name in _expand(part, place)]


def _split(expression: str, place: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", expression)
    if ",".join(parts) != expression or not parts:
        raise ConfigError(
            f"{place}: {expression!r} is not a valid list of nodes; write node[0-3],node7"
        )
    return parts


def _expand(part: str, place: str) -> Iterable[str]:
    pieces = _BRACKET.split(part)
    # Odd pieces were in brackets.
    choices = [_range(p, place) if i % 2 else [p] for i, p in enumerate(pieces)]
    names = ["".join(names) for names in itertools.islice(itertools.product(*choices), _MOST_NAMES)]
    return [name.strip() for name in names]


def _range(text: str, place: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        first, last = (match.group(1), match.group(2) or match.group(1)) if match else ("", "")
        if not first or not 0 <= int(last) - int(first) < _MOST_NAMES:
            raise ConfigError(f"{place}: [{text}] is not a valid range of numbers; write [0-3,7]")
        found += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return found
