"""torchrun as the training command: started once per node, it starts the node's ranks itself.

Where it is in the job it is told in variables (trainer_env.TrainerPlace.of_torchrun), so that a
script around it works as well.  A flag in the command would win over them: what contradicts us is
refused before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ft.core.errors import ConfigError

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
                f"torchrun's {flag}: its restarts would come between ours and mix two lives of the "
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
