"""Shapes: the training command's further arguments for each smaller number of nodes.

They come from a JSON file: ``{"3": ["--pipeline-model-parallel-size", "1"], "2": null}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config.flags import read_command
from megatron_ft.core.errors import ConfigError
from megatron_ft.megatron import fewer_ranks
from megatron_ft.supervisor.spec import Shapes

_ADVICE = 'write {"3": ["--flag", "value"], "2": null}: arguments by number of nodes, or null'
_OURS = "--inmem-"


def read_shapes(
    source: str | None, nodes: int, ranks_per_node: int, command: Sequence[str]
) -> Shapes:
    """Shapes for fewer than ``nodes`` nodes, from a file, if there is one.

    ConfigError for a file that cannot be read or understood, and for shapes with which Megatron's
    ``command`` cannot work, as far as its flags tell.
    """
    if source is None:
        return {}
    try:
        shapes = parse_shapes(Path(source).read_text(), source, nodes)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--shapes {source} cannot be read: {error}") from error
    if reasons := list(_megatron_against(shapes, ranks_per_node, command)):
        raise ConfigError("\n  ".join([f"{source} cannot be used:", *reasons]))
    return shapes


def parse_shapes(text: str, where: str, nodes: int) -> Shapes:
    """Arguments by number of nodes, None for a number that is forbidden.

    Pure; ConfigError, which begins with ``where``, for any other text.
    """
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); {_ADVICE}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds no JSON object; {_ADVICE}")
    return {_number(key, where, nodes): _words(found[key], key, where) for key in found}


def _number(key: str, where: str, nodes: int) -> int:
    allowed = range(1, nodes)
    if key not in map(str, allowed):
        raise ConfigError(
            f"{where}: {key!r} is not a number of nodes below the {nodes} of the job; {_ADVICE}"
        )
    return int(key)


def _words(value: Any, key: str, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"{where}: {key!r} has neither a list of strings nor null; {_ADVICE}")
    ours = next((word for word in value if word.startswith(_OURS)), "")
    if ours:
        raise ConfigError(
            f"{where}: {key!r} has {ours}; settings of snapshots are the same for all numbers of "
            "nodes: give them in the training command"
        )
    return tuple(value)


def _megatron_against(shapes: Shapes, ranks_per_node: int, command: Sequence[str]) -> Iterator[str]:
    """Reasons against shapes that Megatron's flags tell, one for each number of nodes."""
    base = fewer_ranks.arguments_of(command) if read_command(command).enabled else None
    if base is None or fewer_ranks.refusals(base):
        return
    for nodes, words in shapes.items():
        args = fewer_ranks.arguments_of((*command, *words)) if words is not None else None
        if args is None:
            continue
        reason = "; ".join(fewer_ranks.refusals(args))
        if args.global_batch_size != base.global_batch_size:
            batches = f"{args.global_batch_size} instead of {base.global_batch_size}"
            reason = f"--global-batch-size is {batches}, and must stay"
        reason = reason or fewer_ranks.rule_of(args).against(nodes * ranks_per_node)
        if reason:
            yield f"{nodes} nodes: {reason}"
