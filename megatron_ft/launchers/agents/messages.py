"""What supervisor and agents say to each other, as msgspec structs in MessagePack.

``id`` is the supervisor's name for one process; an agent uses it in all that it says of it.

Where agents find the supervisor, and the secret without which it does not answer.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc.message_base import Message as Message
from megatron_ft.rpc.message_base import Name, Pid
from megatron_ft.rpc.message_base import Refused as Refused
from megatron_ft.rpc.security import JobKeys


class Hello(Message, frozen=True):
    """An agent's, every second.  ``token`` is another one for each agent that ever ran.

    ``running`` are the processes it watches: of others it will say nothing any more.
    """

    node: Name
    token: Name
    rank: int
    address: str
    running: tuple[str, ...] = ()


class Heard(Message, frozen=True):
    """The answer to a Hello."""


class Goodbye(Message, frozen=True):
    """An agent's last words: what started it has ended."""


class Bye(Message, frozen=True):
    """The supervisor's last words: the job is over, agents end with this exit code."""

    code: int


class Start(Message, frozen=True):
    """Start a process; answered with Running or NotRunning, and Ended when it has."""

    id: Name
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    stdin: bytes | None = None


class Attach(Message, frozen=True):
    """Watch a process that is there already; answered as Start is."""

    id: Name
    job: str
    pid: Pid
    start_time: int | None = None


class Running(Message, frozen=True):
    """A process runs."""

    id: Name
    pid: Pid
    start_time: int


class NotRunning(Message, frozen=True):
    """It does not; ``error`` names a class of megatron_ft.core.errors, or is empty if it has
    ended.
    """

    id: Name
    error: str
    reason: str


class Ended(Message, frozen=True):
    """A process has ended, or EndWorld or Shell is done; see ProcessHandle.wait for the status."""

    id: Name
    status: int


class Kill(Message, frozen=True):
    """SIGKILL to a process and all that it started."""

    id: Name


class EndWorld(Message, frozen=True):
    """SIGKILL to every process of an MPI world on the node; answered with Ended."""

    id: Name
    job: str
    world: str


class Shell(Message, frozen=True):
    """Run words by a shell on a node, in a folder for MPI's files; answered with Ended.

    mpirun's stand-in for ssh asks this of the supervisor.
    """

    id: Name
    node: str
    words: str
    folder: str
    log: str
    env: dict[str, str]


AnyMessage = (
    Refused
    | Hello
    | Heard
    | Goodbye
    | Bye
    | Start
    | Attach
    | Running
    | NotRunning
    | Ended
    | Kill
    | EndWorld
    | Shell
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Any:
    """The message in a frame; ControlPlaneError if there is none of ours."""
    try:
        return _decoder.decode(frame)
    except UNREADABLE as error:
        raise ControlPlaneError(f"a frame of {len(frame)} bytes is no message: {error}") from error


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
