"""The encoder world that the supervisor expects, and how much of it has come up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.events import Observers

WORLD_TIMEOUT_SECONDS = 120.0
"""Limit for the start of an encoder world, until each node's encoder has joined."""


class ExpectedEncoders:
    """One world at a time, by its ``name``; ``nodes`` are its ranks 0, 1, ...

    ``joined`` is True once it was up, ``refused`` the reason why an SMP refused its encoder.
    ``ahead`` is the world that was started ahead for the next incarnation, "" for none, and
    ``ahead_on`` the nodes on which it waits.  ``kill`` ends the world of a name.
    """

    def __init__(self, observers: Observers, kill: Callable[[str], None]) -> None:
        self.name = ""
        self.nodes: tuple[str, ...] = ()
        self.joined, self.refused = False, ""
        self.ahead = ""
        self.ahead_on: set[str] = set()
        self._observers, self._kill = observers, kill
        self._up: set[str] = set()
        self._all_up = asyncio.Event()

    def expect(self, name: str, nodes: tuple[str, ...]) -> None:
        """Expect a world that is being started."""
        self.lost()
        self.name, self.nodes = name, nodes
        self.joined, self.refused = False, ""

    def expect_ahead(self, name: str) -> None:
        """Expect a world that is started ahead for the next incarnation, "" for none."""
        self.ahead, self.ahead_on = name, set()

    async def ready(self) -> None:
        """Wait until an encoder of the world has joined on every node of it."""
        try:
            await asyncio.wait_for(self._all_up.wait(), WORLD_TIMEOUT_SECONDS)
        except asyncio.TimeoutError as error:
            missing = sorted(set(self.nodes) - self._up)
            raise ControlPlaneError(
                f"encoder world {self.name}: none from {', '.join(missing)} "
                f"in {WORLD_TIMEOUT_SECONDS:.0f} s",
                missing[0] if missing else "",
            ) from error

    @property
    def usable(self) -> str:
        """The name of the world if it is up on all its nodes, else empty."""
        return self.name if self._all_up.is_set() else ""

    def lost(self) -> None:
        """Note that the world has ended, or is being ended."""
        self._all_up.clear()
        self._up.clear()

    def end(self, name: str, reason: str) -> None:
        """Have a world ended that cannot continue; nothing is lost, a new one is started.

        If that has been done already, the new one is left alone.
        """
        self._observers.emit("world_broken", f"parity stopped: {reason}")
        if name == self.name:
            self.lost()
        self._kill(name)

    def on_event(self, event: m.NodeEvent) -> bool:
        """Take the news of an encoder; True if the world is up on all nodes by it."""
        body = event.body
        if isinstance(body, m.EncoderHello) and body.world == self.name:
            self._up.add(event.node)
            if self._up >= set(self.nodes):
                self._all_up.set()
                self.joined = True
            return self._all_up.is_set()
        if isinstance(body, m.EncoderRefused) and body.world == self.name:
            # The end of the world follows at once.
            self.refused = f"the SMP of {event.node} refused its encoder: {body.reason}"
        if isinstance(body, m.EncoderWaits) and body.world == self.ahead:
            self.ahead_on.add(event.node)
        if isinstance(body, m.WriterGone) and (body.role, body.who) == ("encoder", self.name):
            self.lost()
        return False
