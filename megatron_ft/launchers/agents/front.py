"""What stands for an agent where it was started: on its node, or at the end of a remote shell.

Which of the nodes this is, as the launcher says that started us once on each.

Hostfiles of Open MPI and DeepSpeed: ``name slots=8`` a line, ``#`` begins a comment.

Formats are those of prterun's and DeepSpeed's documentation.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.agents.messages import AgentOrders

# torchrun and deepspeed; Open MPI; MPICH, its descendants and srun --mpi=pmi2; srun.
_SOURCES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"


class NodeRank(NamedTuple):
    """Number of this node, from 0, and how many there are, spares included."""

    rank: int
    size: int


def node_rank(
    environment: Mapping[str, str], rank: int | None = None, size: int | None = None
) -> NodeRank:
    """From flags, where given, else from the first launcher that is seen to be around us.  Pure.

    ConfigError where nobody says it, and where torchrun would start us again.
    """
    if environment.get(_RESTARTS, "0") != "0":
        raise ConfigError(
            f"the launcher around megatron-ft run would restart it ({_RESTARTS}="
            f"{environment[_RESTARTS]}): give torchrun --max-restarts 0, and deepspeed no "
            "--enable_elastic_training; megatron-ft run restarts the trainers itself"
        )
    for names in _SOURCES:
        found = [environment.get(name, "") for name in names]
        if rank is None and all(text.isdecimal() for text in found):
            rank, size = int(found[0]), int(found[1])
    if rank is None or size is None:
        sources = ", ".join("/".join(names) for names in _SOURCES)
        raise ConfigError(
            "--launcher nodes does not know which node this is: start it once on each node with "
            f"mpirun, srun, torchrun or deepspeed ({sources}), or give --node-rank and --nodes"
        )
    if not 0 <= rank < size:
        raise ConfigError(f"node rank {rank} is not below the number of nodes, {size}")
    return NodeRank(rank, size)


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


COMMAND = (sys.executable, "-m", "megatron_ft.launchers.agents")


class Front:
    """One agent, for as long as this object or its process is there."""

    def __init__(self, orders: AgentOrders, through: Sequence[str] = ()) -> None:
        """Start it, through the words of a remote shell and a host where it is not here.

        OSError when there is no such program.
        """
        self.node = orders.node
        self._process = subprocess.Popen(
            [*through, *COMMAND], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        # One that has ended already is told by its status.
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(orders) + b"\n")
            self._process.stdin.flush()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, that of the agent, once it has ended; None if it has not in time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def leave(self) -> None:
        """The agent's input ends, and so does the agent."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
