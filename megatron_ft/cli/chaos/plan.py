"""The plan that a chaos job's processes find in its folder: where they stop, and for what."""

from __future__ import annotations

from pathlib import Path

import msgspec

PLAN_NAME = "plan.json"
SOCKET_NAME = "runner.sock"
ARMED_NAME = "armed"


class Strike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault that a process finds at a point.

    It strikes when a process on ``node`` (empty: on any) with this ``rank`` (-1: any) is at
    ``point`` for the ``nth`` time since the plan was armed: once a job, or each time from
    then on if it is to ``repeat``.  ``action`` is what the process then does to itself, after
    the runner has done its part: "kill", "stop", "exception", "delay" (for ``seconds``),
    "clock" (which then is ``seconds`` off), or nothing.
    """

    name: str
    point: str
    nth: int = 1
    node: str = ""
    rank: int = -1
    action: str = ""
    seconds: float = 0.0
    repeat: bool = False


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All strikes of one job."""

    strikes: tuple[Strike, ...]

    def write(self, folder: Path) -> None:
        """Put the plan into a chaos folder; it does nothing before it is armed."""
        (folder / PLAN_NAME).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan in a chaos folder."""
        return msgspec.json.decode((folder / PLAN_NAME).read_bytes(), type=cls)


class Arrival(msgspec.Struct, frozen=True):
    """What a process that found a strike tells the runner, which answers when it may go on."""

    strike: str
    point: str
    node: str
    rank: int
    pid: int
