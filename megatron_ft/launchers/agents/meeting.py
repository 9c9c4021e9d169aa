"""Where agents find the supervisor, and the secret without which it does not answer."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.rpc.security import JobKeys

FILE_NAME = "supervisor.json"

SILENT_SECONDS = 15.0
"""After so long without a word, supervisor and agent give each other up."""

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
        """The supervisor's address."""
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0]

    def write(self, file: Path) -> None:
        """Tell it, in a file of mode 0600."""
        private_files.replace_file(file, msgspec.json.encode(self))


class AgentOrders(msgspec.Struct, frozen=True):
    """What an agent reads from its standard input.

    ``node`` is its name.  Without ``meeting`` it waits for one in ``file``, and for a new one
    when that supervisor is lost.
    """

    node: str
    rank: int
    meeting: Meeting | None = None
    file: str = ""


def read_meeting(file: Path) -> Meeting | None:
    """What the file says; None while there is none.

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
