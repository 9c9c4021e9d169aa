"""Sees to it before a job starts that its processes may open as many files as they will.

The settings that the supervisor uses: from its flags, the training command, the environment.

torchrun as the training command: started once per node, it starts the node's ranks itself.

Where it is in the job it is told in variables (trainer_env.TrainerPlace.of_torchrun), so that a
script around it works as well.  A flag in the command would win over them: what contradicts us is
refused before training.
"""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from megatron_ft.supervisor.spec import JobSpec

SHARED = tuple(setting for setting in SETTINGS.values() if setting.job)
"""Settings that ``megatron-ft run`` has flags for."""


def settle(
    run_flags: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str]
) -> SnapshotConfig:
    """One configuration from ``megatron-ft run``'s parsed flags and the training command.

    The command may have ``--inmem-*`` flags, or name a JSON file with our section.  What none
    of them gives comes from ``MEGATRON_FT_*`` variables, then from the defaults.  Says on
    stderr what is given without being switched on.  Raises ConfigError for unknown names, bad
    values, and for places that contradict each other, naming both.
    """
    ours = Source(
        {setting.name: run_flags.get(setting.name) for setting in SHARED},
        lambda name: f"`megatron-ft run {SETTINGS[name].run_flag}`",
    )
    flags, section = read_command(command), json_section.read_command(command)
    sources = [ours, flags.source]
    if section is not None and section.enabled:
        sources.append(section.source)
    _refuse_contradictions(sources)
    settings = resolve(*sources, environment_source(environment))
    if flags.without_effect and not (section is not None and section.enabled):
        _warn(
            f"the training command has {', '.join(flags.without_effect)} but not {SWITCH}: "
            "without it Megatron takes no snapshots and nothing is protected"
        )
    if section is not None and not section.enabled and section.source.given:
        label = section.source.label(json_section.ENABLED)
        _warn(f"{label} is not true: DeepSpeed takes no snapshots and nothing is protected")
    return settings


def _warn(text: str) -> None:
    print(f"megatron-ft: warning: {text}", file=sys.stderr, flush=True)


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
    """Whether the command starts torchrun itself; behind another program nobody can see it."""
    return _own_words(command) > 0


def ranks_of(command: Sequence[str]) -> int | None:
    """Ranks per node as torchrun's own flag says; None without it, or where it is no number."""
    value = dict(_flags(command)).get("nproc-per-node", "")
    return int(value) if value.isdecimal() else None


def check(command: Sequence[str], nodes: int, ranks_per_node: int, fewer: bool = False) -> None:
    """ConfigError, with what to do, for flags of torchrun that would work against us.

    ``fewer`` says that the job may go on with fewer nodes.
    """
    if command and Path(command[0]).name in _DEEPSPEED:
        raise ConfigError(
            f"{command[0]} as the training command would start ranks itself, on nodes of its own "
            "choice: give the script without it, or put it around `megatron-ft run --launcher "
            "nodes` (docs/launchers.md)"
        )
    for name, value in _flags(command):
        flag = f"--{name}{'' if name in _SWITCHES else ' ' + value}"
        if name == "max-restarts" and value != "0":
            raise ConfigError(
                f"torchrun's {flag}: its restarts would mix incarnations of the "
                "job; drop the flag, megatron-ft run restarts all ranks itself"
            )
        if name in _RENDEZVOUS:
            raise ConfigError(
                f"torchrun's {flag}: megatron-ft run says where the ranks meet, anew at every "
                "start; drop the flag"
            )
        if name == "nnodes" and fewer:
            raise ConfigError(
                f"torchrun's {flag}: with --on-no-spare shrink the number of nodes may change; "
                "drop the flag, megatron-ft run tells torchrun"
            )
        if name == "nnodes" and value != str(nodes):
            raise ConfigError(
                f"torchrun's {flag}: {nodes} nodes train; drop the flag and give --nodes {value}"
            )
        if name == "nproc-per-node" and value != str(ranks_per_node):
            raise ConfigError(
                f"torchrun's {flag} and --ranks-per-node {ranks_per_node} differ: write the same "
                "number, or a number in the one and nothing in the other"
            )


def _own_words(command: Sequence[str]) -> int:
    """How many words start torchrun, before its flags; 0 if it is another program."""
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


_ALWAYS, _A_NODE, _A_PROCESS = 48, 5, 3
"""Some more than a supervisor was seen to open: 20, 4 for a node's SMP, 2 for a trainer."""


def needed(spec: JobSpec) -> int:
    """Descriptors that the supervisor of a job opens at most; no other process needs more."""
    trainers = spec.nodes * (1 if spec.trainer_per_node else spec.ranks_per_node)
    return _ALWAYS + _A_NODE * (spec.nodes + spec.spares) + _A_PROCESS * trainers


def provide(count: int) -> None:
    """Raise this process's limit, which its children inherit, to ``count`` if it is lower.

    MissingEnvironmentError if it may not be raised that far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise MissingEnvironmentError(
            f"this job needs {count} open files a process, and the limit is {hard} (`ulimit -n`): "
            f"raise the hard limit (`ulimit -Hn {count}` as root, nofile in "
            "/etc/security/limits.conf, LimitNOFILE of a service, --ulimit of a container), or "
            "take fewer nodes or ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
