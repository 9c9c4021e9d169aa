"""Messages between the supervisor and the agents that start processes on its nodes.

``id`` is the supervisor's name for one process; an agent uses it in all its messages about it.
"""

from __future__ import annotations

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.rpc.node_messages import Message, Name, Pid


class AgentHello(Message, frozen=True):
    """Sent by an agent every second; ``token`` is unique to each agent that ever ran.

    ``running`` are the processes that it watches; it reports of no others any more.
    """

    node: Name
    token: Name
    rank: int
    address: str
    running: tuple[str, ...] = ()


class AgentHeard(Message, frozen=True):
    """The answer to an AgentHello."""


class AgentGoodbye(Message, frozen=True):
    """Last message of an agent: what started it has ended."""


class SupervisorBye(Message, frozen=True):
    """Last message of the supervisor: the job is over, agents end with this exit code."""

    code: int


class StartProcess(Message, frozen=True):
    """Start a process; answered with ProcessRuns or ProcessRefused, and later ProcessEnded.

    Its texts are ``carried`` (core/process_tools.py), as those of RunShell are.
    """

    id: Name
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    stdin: bytes | None = None


class AttachProcess(Message, frozen=True):
    """Watch a process that runs already; answered as StartProcess is."""

    id: Name
    job: str
    pid: Pid
    start_time: int | None = None


class ProcessRuns(Message, frozen=True):
    """A process runs."""

    id: Name
    pid: Pid
    start_time: int


class ProcessRefused(Message, frozen=True):
    """A process does not run; ``gone`` if it has ended."""

    id: Name
    error: MegatronFTError
    gone: bool = False


class ProcessEnded(Message, frozen=True):
    """A process has ended, or EndWorld or RunShell is done; ``status`` as of ProcessHandle.wait."""

    id: Name
    status: int


class KillProcess(Message, frozen=True):
    """Send SIGKILL to a process and all that it started."""

    id: Name


class EndWorld(Message, frozen=True):
    """Send SIGKILL to every process of an MPI world on the node; answered with ProcessEnded."""

    id: Name
    job: str
    world: str


class RunShell(Message, frozen=True):
    """Run words by a shell on a node, in a folder for MPI's files; answered with ProcessEnded.

    The stand-in for ssh that mpirun calls sends it to the supervisor.
    """

    id: Name
    node: str
    words: str
    folder: str
    log: str
    env: dict[str, str]
