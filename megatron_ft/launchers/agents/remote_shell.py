"""Stand-in for ssh with which mpirun starts its daemons: the node's agent runs the words.

mpirun calls ``python -m megatron_ft.launchers.agents.remote_shell [-x] NODE WORDS...``.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.process_tools import carried
from megatron_ft.launchers.agents.rendezvous import read_meeting
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.sockets import Connection

MEETING = "MEGATRON_FT_MEETING"
"""The file with the supervisor's endpoint."""

NODES = "MEGATRON_FT_MEETING_NODES"
"""Node by the address that mpirun knows it by, as ``address=node`` with blanks between."""

FOLDER = "MEGATRON_FT_JOB_DIR"
"""The job's folder on each node; MPI keeps its files in <folder>/<node>/mpi."""


def order_of(arguments: Sequence[str], environment: Mapping[str, str]) -> m.RunShell:
    """The request to the supervisor.  Pure but for the name.

    Flags of ssh come before the address, as MPICH's ``-x``.
    """
    rest = list(arguments)
    while rest[0].startswith("-"):
        rest = rest[1:]
    nodes = dict(pair.split("=", 1) for pair in environment[NODES].split())
    node = nodes[rest[0]]
    folder = os.path.join(environment[FOLDER], node, "mpi")
    log = str(Path(environment[MEETING]).with_name(f"mpi-{node}.log"))
    words = carried(" ".join(rest[1:]))
    given = {carried(name): carried(value) for name, value in environment.items()}
    return m.RunShell(uuid.uuid4().hex, node, words, carried(folder), carried(log), given)


def main() -> int:
    """Send the request and wait as long as the words run; returns their status."""
    meeting = read_meeting(Path(os.environ[MEETING]))
    if meeting is None:
        print(f"megatron-ft: no supervisor in {os.environ[MEETING]}", file=sys.stderr)
        return 1
    order = order_of(sys.argv[1:], os.environ)
    with Connection(meeting.endpoint, meeting.keys, linger_ms=1000) as supervisor:
        supervisor.send(order)
        answer = supervisor.receive()
    status: int = answer.status if isinstance(answer, m.ProcessEnded) else 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
