"""The few facts that an SMP must remember even without any arena."""

from __future__ import annotations

from pathlib import Path

import msgspec

FILE_NAME = "node.json"


class NodeState(msgspec.Struct, frozen=True):
    """The highest incarnation ever admitted here, and whether snapshots are paused."""

    highest_incarnation: int = 0
    paused: bool = False

    @classmethod
    def load(cls, directory: Path) -> NodeState:
        """The stored state, or the initial one."""
        path = directory / FILE_NAME
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def save(self, directory: Path) -> None:
        """Replace the file at once; it lives on a tmpfs, so nothing is flushed."""
        temporary = directory / f"{FILE_NAME}.tmp"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(directory / FILE_NAME)

    def at(self, incarnation: int) -> NodeState:
        """The state with a new highest incarnation."""
        return NodeState(incarnation, self.paused)

    def paused_as(self, paused: bool) -> NodeState:
        """The state with snapshots paused or not."""
        return NodeState(self.highest_incarnation, paused)
