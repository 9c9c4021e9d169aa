"""Meeting point of the supervisor and its agents, and the nodes that the job is to run on.

A supervisor writes its endpoint and a secret into a file of mode 0600 that agents read, or hands
both over to an agent that it starts itself.  The nodes follow from the launcher that started
``megatron-ft run`` on each of them, or from a hostfile of Open MPI or DeepSpeed (a line
``name slots=8`` for each host, ``#`` begins a comment; prterun(1)).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.errors import UNREADABLE, ConfigError
from megatron_ft.rpc.sockets import JobKeys

FILE_NAME = "supervisor.json"

SILENT_SECONDS = 15.0
"""Longest silence after which supervisor and agent give each other up."""

HELLO_SECONDS = 1.0


class Meeting(msgspec.Struct, frozen=True):
    """One supervisor's; the next makes a new secret."""

    endpoint: str
    secret: bytes

    def __repr__(self) -> str:
        """All but the secret."""
        return f"Meeting({self.endpoint})"

    @property
    def keys(self) -> JobKeys:
        """The supervisor is the server, agents are clients."""
        return JobKeys.derive(self.secret)

    @property
    def host(self) -> str:
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0]

    def write(self, file: Path) -> None:
        """Write it into a file of mode 0600."""
        private_files.replace_file(file, msgspec.json.encode(self))


class AgentOrders(msgspec.Struct, frozen=True):
    """Orders of an agent, from its standard input.

    ``node`` is its name.  Without ``meeting`` it waits for one in ``file``, and for a new one
    when that supervisor is lost.  Processes start in ``folder``, "": that of the agent.
    """

    node: str
    rank: int
    meeting: Meeting | None = None
    file: str = ""
    folder: str = ""


def read_meeting(file: Path) -> Meeting | None:
    """The content of the file; None while there is none.

    UntrustedFileError if somebody else may have written it.
    """
    try:
        return msgspec.json.decode(private_files.read_file(file), type=Meeting)
    except (OSError, *UNREADABLE):
        return None


def address_towards(host: str) -> str:
    """The numeric address by which this machine reaches ``host``, and is reached from there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connect only chooses the route.
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address


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
    """Read the node's number from flags, else from the first launcher seen around us.  Pure.

    ConfigError if no source has it, and where torchrun would start us again.
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

    ConfigError, which names the line, for what is not a hostfile.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {file} cannot be read: {error}") from error
    return parse_hostfile(lines, str(file))


def parse_hostfile(lines: list[str], where: str) -> list[str]:
    """Parse the text of a host file; see ``read_hostfile``.  Pure."""
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and match is None:
            raise ConfigError(f"{where}, line {number}: {line!r} is not of the form `name slots=8`")
        if match is not None:
            if match.group(1) in hosts:
                raise ConfigError(f"{where}, line {number}: {match.group(1)} is there twice")
            hosts.append(match.group(1))
    if not hosts:
        raise ConfigError(f"{where} names no host; write a line `name slots=8` for each")
    return hosts
