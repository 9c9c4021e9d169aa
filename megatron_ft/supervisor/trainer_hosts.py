"""The trainer hosts of a job, one on each node, from which its trainers start warm.

A trainer's command becomes one that asks the host of its node (launchers/warm_client.py); without
an answer it starts cold, so a host that is lost costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.core.environment import HOST_SOCKET_NAME
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.launchers import trainer_host, warm_client
from megatron_ft.launchers.launcher import Launcher, ProcessHandle

ROOM_BYTES = 32 << 10
"""Bytes by which a trainer's environment may be longer than its host's."""


def why_cold(command: Sequence[str], trainer_per_node: bool = False) -> str:
    """Reason why a command cannot be forked; "" if it can.  Pure."""
    if trainer_per_node:
        return f"{Path(command[0]).name} starts the ranks of a node itself"
    _, words = trainer_host.split(list(command))
    if not Path(command[0]).name.startswith("python"):
        return f"{command[0]} is not a Python interpreter"
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        return f"{command[0]} {' '.join(words[:1])} runs no script or module"
    if words[0] == "-m" and len(words) < 2:
        return f"{command[0]} -m names no module"
    return ""


class TrainerHosts:
    """Starts a host where none runs, and names the commands that use it.

    ``command`` is the training command.
    """

    def __init__(self, launcher: Launcher, command: Sequence[str], log_dir: Path) -> None:
        self._launcher, self._command, self._log_dir = launcher, list(command), log_dir
        self._handles: dict[str, ProcessHandle] = {}

    def ensure(self, nodes: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a host on each node that has none.

        ``environment`` is the trainers', without what is of one rank.  A node that is lost
        meanwhile has none.
        """
        words, _ = trainer_host.split(self._command)
        for node in nodes:
            if (handle := self._handles.get(node)) is not None and handle.alive():
                continue
            argv = [self._command[0], *words, trainer_host.__file__, self._socket(node)]
            # With more, importing torch would start threads; a trainer sets its own number.
            given = {**environment, "OMP_NUM_THREADS": "1", trainer_host.ROOM: "x" * ROOM_BYTES}
            log = self._log_dir / f"host-{node}.log"
            try:
                self._handles[node] = self._launcher.start(
                    node, [*argv, *self._command], given, log
                )
            except ControlPlaneError:
                self._handles.pop(node, None)

    def warm(self, node: str, arguments: Sequence[str] = ()) -> list[str]:
        """The training command, with further arguments, by way of the node's host."""
        client = [self._command[0], "-I", "-S", warm_client.__file__, self._socket(node)]
        return [*client, *self._command, *arguments]

    def end(self) -> None:
        """Kill all hosts; trainers that they forked are not touched."""
        for handle in self._handles.values():
            handle.kill()
        self._handles = {}

    def _socket(self, node: str) -> str:
        return str(self._launcher.node_dir(node) / HOST_SOCKET_NAME)
