"""Names and addresses of one job's network: the same for the same job, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.core.errors import ConfigError
from tests.support.networked_cluster import HOST

NOTES = Path("/run/megatron-ft-networks")
"""A folder for each network: what it is of, and what is cut; gone with the next start."""

INTERFACE = "eth0"
"""A node's device in its namespace."""

MOST_NODES = 250
_HOST_NUMBER = 254
# Addresses for tests of networks, which are nowhere else (RFC 2544, appendix C.2.2).
SUBNETS = tuple(f"198.{18 + high}.{low}" for high in range(2) for low in range(256))


def prefix_of(job: str) -> str:
    """What the names of a job's devices and namespaces begin with."""
    return f"mft{hashlib.blake2b(job.encode(), digest_size=4).hexdigest()}"


@dataclass(frozen=True)
class NetworkNames:
    """What everything of one network is called.  Device names have at most 15 characters."""

    job: str
    nodes: tuple[str, ...]
    prefix: str
    subnet: str

    @classmethod
    def of(cls, job: str, nodes: Sequence[str], taken: Collection[str] = ()) -> NetworkNames:
        """The first subnet after the job's own that is not ``taken``.

        ConfigError for a node that is called ``host`` or for too many nodes.
        """
        if HOST in nodes or len(nodes) > MOST_NODES:
            raise ConfigError(
                f"a network has at most {MOST_NODES} nodes and none is called {HOST!r}: "
                f"{len(nodes)} nodes, {', '.join(nodes[:5])}"
            )
        prefix = prefix_of(job)
        first = int(prefix[3:], 16) % len(SUBNETS)
        in_turn = SUBNETS[first:] + SUBNETS[:first]
        subnet = next(subnet for subnet in in_turn if subnet not in taken)
        return cls(job, tuple(nodes), prefix, subnet)

    @property
    def notes(self) -> Path:
        """The network's own folder."""
        return NOTES / self.prefix

    @property
    def bridge(self) -> str:
        """The device that joins all nodes; its address is the host's."""
        return f"{self.prefix}b"

    def namespace(self, place: str) -> str:
        """The namespace of a node, or the one of HOST."""
        return f"{self.prefix}.{HOST}" if place == HOST else f"{self.prefix}-{place}"

    def address(self, place: str) -> str:
        """IPv4 address of a node or of HOST."""
        number = _HOST_NUMBER if place == HOST else self._index(place) + 1
        return f"{self.subnet}.{number}"

    def hardware_address(self, place: str) -> str:
        """MAC address, from the range for local use."""
        number = _HOST_NUMBER if place == HOST else self._index(place) + 1
        octets = bytes([2, number]) + bytes.fromhex(self.prefix[3:])
        return octets.hex(":")

    def interface(self, place: str) -> str:
        """The device by which a place reaches the others."""
        return self.bridge if place == HOST else INTERFACE

    def device(self, kind: str, node: str) -> str:
        """A node's device in the host's namespace; ``kind`` is one letter."""
        return f"{self.prefix}{kind}{self._index(node)}"

    def _index(self, node: str) -> int:
        if node not in self.nodes:
            raise ConfigError(f"no node {node!r} in job {self.job}; there are {list(self.nodes)}")
        return self.nodes.index(node)
