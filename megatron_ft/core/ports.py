"""TCP ports for those who open them a moment after they were chosen."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
BELOW = range(15000, 30000)
"""Above most registered services, below the node ports of Kubernetes."""

ENOUGH = 1000
TRIES = 50


def unclaimed(ephemeral: str) -> range:
    """Ports that the kernel gives to nobody who does not name them; empty where these are few.

    ``ephemeral``: the two numbers of ip_local_port_range (ip(7)).  Any connection that is opened
    takes one of that range, so a port from there may be gone a moment after it was free.
    """
    low, high = (int(word) for word in ephemeral.split())
    below = range(BELOW.start, min(BELOW.stop, low))
    above = range(max(BELOW.start, high + 1), 65536)
    return next((ports for ports in (below, above) if len(ports) >= ENOUGH), range(0))


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that was free on ``address`` just now; somebody else may take it meanwhile.

    Ask for a new one at every start: the old one may linger in TIME_WAIT.
    """
    ports = range(0)
    with suppress(OSError, ValueError):
        ports = unclaimed(EPHEMERAL.read_text())
    # Not the generator of module random: its state may be somebody's training.
    named = [secrets.choice(ports) for _ in range(TRIES)] if ports else []
    return next(filter(None, (_bound(address, port) for port in [*named, 0])))


def _bound(address: str, port: int) -> int | None:
    """The port, or for 0 one that the kernel chooses; None if it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            if port == 0:
                raise
            return None
        bound: int = probe.getsockname()[1]
        return bound
