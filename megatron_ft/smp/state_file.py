"""The few facts that an SMP must remember even without any arena."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_ft.core import private_files
from megatron_ft.core.errors import UNREADABLE, ControlPlaneError

FILE_NAME = "node.json"


class NodeState(msgspec.Struct, frozen=True):
    """The highest incarnation ever admitted here, and whether snapshots are paused."""

    highest_incarnation: int = 0
    paused: bool = False

    @classmethod
    def load(cls, directory: Path) -> NodeState:
        """The stored state, or the initial one.

        ControlPlaneError if it is damaged: without it the fence against older incarnations is gone.
        """
        path = directory / FILE_NAME
        try:
            return msgspec.json.decode(private_files.read_file(path), type=cls)
        except FileNotFoundError:
            return cls()
        except UNREADABLE as error:
            raise ControlPlaneError(
                f"{path} is damaged ({error}), so nobody knows which incarnation was here"
            ) from error

    def save(self, directory: Path) -> None:
        """Rewrite the file at once; it lives on a tmpfs, so nothing is flushed."""
        private_files.rewrite_file(directory / FILE_NAME, msgspec.json.encode(self))

    def at(self, incarnation: int) -> NodeState:
        """The state with a new highest incarnation."""
        return NodeState(incarnation, self.paused)

    def paused_as(self, paused: bool) -> NodeState:
        """The state with snapshots paused or not."""
        return NodeState(self.highest_incarnation, paused)
