"""How long the control plane waits for what."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.errors import ConfigError


@dataclass(frozen=True)
class Timing:
    """Seconds.  A node that is silent for ``node_timeout`` is lost; it must exceed the lease,
    so that a node which was only cut off has stopped its trainers before it is replaced.
    ``encode_timeout`` bounds parity, and a capture from when a trainer has passed its iteration."""

    heartbeat: float = 0.5
    lease: float = 10.0
    node_timeout: float = 15.0
    encode_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.lease < 4 * self.heartbeat:
            raise ConfigError(
                f"a lease of {self.lease:g} s is too short for heartbeats every "
                f"{self.heartbeat:g} s: give at least {4 * self.heartbeat:g} s"
            )
        if self.node_timeout <= self.lease:
            raise ConfigError(
                f"a node would be replaced after {self.node_timeout:g} s of silence, before its "
                f"lease of {self.lease:g} s has run out"
            )
