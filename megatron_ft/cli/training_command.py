"""The training command: the settings, the ranks and the flags of torchrun that it names.

torchrun as the training command is started once per node, and starts the node's ranks itself.
Its place in the job it gets in variables (TrainerPlace.of_torchrun), so that a script around it
works as well.  A flag in the command would win over them: what contradicts us is refused before
training.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.cli.common import say
from megatron_ft.config import (
    SETTINGS,
    SWITCH,
    SnapshotConfig,
    Source,
    differences,
    environment_source,
    json_section,
    resolve,
)
from megatron_ft.config.flags import read_command
from megatron_ft.core.errors import ConfigError

_PYTHON_SWITCHES = tuple("-" + letter for letter in "bBdEhiIOPqsSuvx")

# The path of a socket in the job's folder has at most 107 bytes.
_STEM_LETTERS = 16

SHARED = tuple(setting for setting in SETTINGS.values() if setting.job)
"""Settings that ``megatron-ft run`` has flags for."""


def command_of(arguments: argparse.Namespace) -> list[str]:
    """The training command, without the ``--`` that separates it."""
    command: list[str] = arguments.training_command
    return command[1:] if command[:1] == ["--"] else command


def job_name(arguments: argparse.Namespace) -> str:
    """The name of a job without ``--job``: the same for the same command, started again.

    Other commands, and those of other folders and users, have other names.
    """
    command = command_of(arguments)
    script = next((word for word in command if word.endswith(".py")), *command[:1] or ["job"])
    stem = re.sub(r"\W+", "-", Path(script).stem, flags=re.ASCII)[:_STEM_LETTERS].strip("-")
    given = "\0".join([str(os.geteuid()), os.getcwd(), *command])
    number = hashlib.blake2b(os.fsencode(given), digest_size=4).hexdigest()
    return f"{stem or 'job'}-{number}"


def check_command(command: Sequence[str]) -> None:
    """ConfigError if this machine has no such program, or no such script for Python."""
    if not command:
        return
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no program {command[0]!r} to run: give its path, or the interpreter of a "
            "script, as in `megatron-ft run -- python train.py`"
        )
    if not Path(command[0]).name.startswith("python"):
        return
    words = itertools.dropwhile(lambda word: word in _PYTHON_SWITCHES, command[1:])
    script = next(words, "-")
    if not script.startswith("-") and not Path(script).exists():
        raise ConfigError(f"there is no script {script!r} in {Path.cwd()}")


def settle_ranks(arguments: argparse.Namespace, command: Sequence[str]) -> None:
    """Complete the flags that say who starts a node's ranks, and how many there are."""
    if arguments.ranks_per_node is None:
        arguments.ranks_per_node = ranks_of(command) or 1
    arguments.trainer_per_node |= is_torchrun(command)


def settle(
    run_flags: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str]
) -> SnapshotConfig:
    """One configuration from ``megatron-ft run``'s parsed flags and the training command.

    The command may have ``--inmem-*`` flags, or name a JSON file with our section.  What none
    of them gives comes from ``MEGATRON_FT_*`` variables, then from the defaults.  Says on
    stderr what is given without being switched on.  Raises ConfigError for unknown names, bad
    values, and for places that contradict each other, naming both.
    """
    *given, variables = sources_of(run_flags, command, environment)
    _refuse_contradictions(given)
    settings = resolve(*given, variables)
    flags, section = read_command(command), json_section.read_command(command)
    off = []
    if flags.without_effect and not (section is not None and section.enabled):
        off.append(f"the training command has {', '.join(flags.without_effect)} but not {SWITCH}")
    if section is not None and not section.enabled and section.source.given:
        off.append(f"{section.source.label(json_section.ENABLED)} is not true")
    for text in off:
        say(f"megatron-ft: warning: {text}: nothing is protected", sys.stderr)
    return settings


def sources_of(
    run_flags: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str]
) -> list[Source]:
    """The places of ``settle`` that give settings, the first first, environment variables last."""
    ours = Source(
        {setting.name: run_flags.get(setting.name) for setting in SHARED},
        lambda name: f"`megatron-ft run {SETTINGS[name].run_flag}`",
    )
    section = json_section.read_command(command)
    sources = [ours, read_command(command).source]
    if section is not None and section.enabled:
        sources.append(section.source)
    return [*sources, environment_source(environment)]


def _refuse_contradictions(sources: Sequence[Source]) -> None:
    pairs = itertools.combinations(sources, 2)
    found = [line for left, right in pairs for line in differences(left, right).values()]
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ConfigError(f"these settings contradict each other; give each in one place:{lines}")


_DEEPSPEED = ("deepspeed", "ds")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
# Flags of torchrun without a value; all others have one.
_SWITCHES = frozenset(
    ("standalone", "m", "module", "no-python", "run-path", "use-env", "virtual-local-rank")
)
_RENDEZVOUS = frozenset(
    ("standalone", "node-rank", "master-addr", "master-port",
     "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf")
)  # fmt: skip


def is_torchrun(command: Sequence[str]) -> bool:
    """True if the command starts torchrun itself; behind another program nobody can see it."""
    return _own_words(command) > 0


def ranks_of(command: Sequence[str]) -> int | None:
    """Ranks per node as torchrun's own flag says; None without it, or where it is not a number."""
    value = dict(_flags(command)).get("nproc-per-node", "")
    return int(value) if value.isdecimal() else None


def check_torchrun(
    command: Sequence[str], nodes: int, ranks_per_node: int, fewer: bool = False
) -> None:
    """ConfigError, with what to do, for flags of torchrun that would work against us.

    ``fewer`` says that the job may continue with fewer nodes.
    """
    if command and Path(command[0]).name in _DEEPSPEED:
        raise ConfigError(
            f"{command[0]} as the training command would start ranks itself, on nodes of its own "
            "choice: give the script without it, or put it around `megatron-ft run --launcher "
            "nodes` (docs/how-to/launchers.md)"
        )
    for name, value in _flags(command):
        flag = f"torchrun's --{name}{'' if name in _SWITCHES else ' ' + value}"
        ours = (
            name in _RENDEZVOUS
            or (name == "max-restarts" and value != "0")
            or (name == "nnodes" and (fewer or value != str(nodes)))
        )
        if ours:
            raise ConfigError(
                f"{flag}: drop the flag, megatron-ft run restarts all ranks itself and says where "
                f"they meet and how many nodes train (--nodes, {nodes} here)"
            )
        if name == "nproc-per-node" and value != str(ranks_per_node):
            raise ConfigError(
                f"{flag} and --ranks-per-node {ranks_per_node} differ: write the same "
                "number, or a number in the one and nothing in the other"
            )


def _own_words(command: Sequence[str]) -> int:
    """The number of words that start torchrun, before its flags; 0 if it is another program."""
    if command and Path(command[0]).name == "torchrun":
        return 1
    for index, word in enumerate(command[:-1]):
        if word == "-m":
            return index + 2 if command[index + 1] in _MODULES else 0
        if index and not word.startswith("-"):
            return 0
    return 0


def _flags(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names, with dashes, and values of torchrun's own flags: up to the script."""
    if not is_torchrun(command):
        return
    words = iter(command[_own_words(command) :])
    for word in words:
        if not word.startswith("-") or word == "--":
            return
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in _SWITCHES:
            yield name, ""
        else:
            yield name, value if equals else next(words, "")
