"""A network for virtual nodes: a namespace each, joined by a bridge, that can be cut.

  with NodeNetwork("my-job", ["n0", "n1", "n2"]) as network:
      network.cut("n1")                # n1 is alone; nobody is told, packets vanish
      network.heal()
      network.cut(["n0"], ["n1"])      # these two not, all others as before
      network.delay("n2", 50)          # each way, so a round trip takes 100 ms more
      network.limit("n2", 100)         # Mbit/s, each way

Only the object that made a network changes it.  Needs root: see ``unavailable``.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path

from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from tests.support import namespaces as ns

unavailable = ns.missing

HOST = "host"
"""The place of a process that is on no node."""

INTERFACE = "eth0"
"""A node's device in its namespace."""

# Addresses for tests of networks, which are nowhere else (RFC 2544, appendix C.2.2).
SUBNETS = tuple(f"198.{18 + high}.{low}" for high in range(2) for low in range(256))
LETTERS = "ghijklmnopqrstuvwxyz"
"""One for each network of a process, none a digit of its number."""
MOST_NODES, HOST_NUMBER = 250, 254
BURST_BYTES, QUEUE_MILLISECONDS = 128 * 1024, 400

_NUMBERS = count()
_LOCK = Path("/run/megatron-ft-networks.lock")
# Nobody has it, so the bridge passes such frames to all and none takes them.
_NOBODY = "02:00:00:00:00:00"


class NodeNetwork:
    """The network of one job's virtual nodes.

    Places are node names and ``HOST``, where all processes are that were not started in a
    namespace.  Verbs take effect before they return, and hold for connections that exist.
    Names of all its devices and namespaces begin with ``prefix``, which has this process's number.
    """

    def __init__(self, job: str, nodes: Sequence[str]) -> None:
        """Name the network; ``open`` makes it.  ConfigError for nodes that cannot be named."""
        if HOST in nodes or len(nodes) > MOST_NODES:
            raise ConfigError(
                f"a network has at most {MOST_NODES} nodes and none is called {HOST!r}: "
                f"{len(nodes)} nodes, {', '.join(nodes[:5])}"
            )
        self.job, self.nodes = job, tuple(nodes)
        self.prefix, self._subnet = f"mft{os.getpid():x}{LETTERS[next(_NUMBERS) % 20]}", ""
        self._cuts: set[tuple[str, str]] = set()
        self._relays: dict[str, subprocess.Popen[bytes]] = {}

    def open(self) -> NodeNetwork:
        """Make the network; leftovers of dead runs are removed.

        MissingEnvironmentError without the rights, programs or kernel for it.
        """
        if reason := unavailable():
            raise MissingEnvironmentError(reason)
        with _locked():
            remove_leftovers()
            taken = ns.ip("-o", "-4", "addr", "show")
            self._subnet = next(s for s in SUBNETS if f" {s}.{HOST_NUMBER}/" not in taken)
            self._make()
        return self

    def close(self) -> None:
        """Remove all of it.  Processes of the nodes should have ended before."""
        for node in self.nodes:
            self._end_relay(node)
        remove(self.prefix)

    def __enter__(self) -> NodeNetwork:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    def address(self, place: str) -> str:
        """IPv4 address of a node or of HOST."""
        return f"{self._subnet}.{self._number(place)}"

    def interface(self, place: str) -> str:
        """Name of the device that has this address, as it is called where the place is."""
        return self._bridge if place == HOST else INTERFACE

    def namespace_path(self, place: str) -> str:
        """A file that stands for the place's namespace, for setns(2)."""
        return str(ns.FOLDER / self._namespace(place))

    def entered(self, place: str, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` at a place; the process that is started becomes it."""
        return ns.entered(self._namespace(place), argv)

    def cut(
        self,
        one: str | Iterable[str],
        other: str | Iterable[str] | None = None,
        *,
        one_way: bool = False,
    ) -> None:
        """Lose every packet between two groups; without ``other``, between one and all others.

        Nobody is told: connections stay, and nothing arrives.  ``one_way`` loses only what
        ``one`` sends.
        """
        for sender, receiver in self._pairs(one, other, one_way):
            self._know(sender, receiver, f"{_NOBODY} nud permanent")
            self._cuts.add((sender, receiver))

    def heal(
        self, one: str | Iterable[str] | None = None, other: str | Iterable[str] | None = None
    ) -> None:
        """Take back what ``cut`` did: between two groups, of one, or everything."""
        healed = self._cuts & set(self._cuts if one is None else self._pairs(one, other, False))
        for sender, receiver in healed:
            # Known at once: an address that must be asked for first costs a second or more.
            self._know(sender, receiver, f"{self._hardware_address(receiver)} nud reachable")
        self._cuts -= healed

    def connected(self, one: str, other: str) -> bool:
        return self._cuts.isdisjoint({(one, other), (other, one)})

    def delay(self, node: str, milliseconds: float) -> None:
        """Hold every packet to and from a node for this long; 0 for not at all."""
        port, aside = self._device("p", node), self._device("d", node)
        ns.ip("link", "set", port, "master", self._bridge)
        self._end_relay(node)
        if aside in ns.links():
            ns.ip("link", "delete", aside)
        if milliseconds > 0:
            near, far = self._device("n", node), self._device("f", node)
            self._start_relay(node, milliseconds, near, far)
            # The node's port, then a relay between two devices, then the bridge.
            ns.ip_batch(
                [
                    f"link add {aside} type bridge mcast_snooping 0",
                    f"link set {aside} up",
                    f"link set {near} master {aside} up",
                    f"link set {far} master {self._bridge} up",
                    f"link set {port} master {aside}",
                ]
            )

    def limit(self, node: str, megabits: float) -> None:
        """Pass at most this many Mbit/s to the node, and from it; 0 for no limit."""
        shape = f"tbf rate {megabits:g}mbit burst {BURST_BYTES} latency {QUEUE_MILLISECONDS}ms"
        for device, inside in (
            (self._device("p", node), ""),
            (INTERFACE, self._namespace(node)),
        ):
            queue = ("dev", device, "root")
            if megabits > 0:
                ns.tc("qdisc", "replace", *queue, *shape.split(), inside=inside)
            elif "tbf" in ns.tc("qdisc", "show", "dev", device, inside=inside):
                ns.tc("qdisc", "delete", *queue, inside=inside)

    def _make(self) -> None:
        ns.name_own_namespace(self._namespace(HOST))
        lines = [
            f"link add {self._bridge} type bridge mcast_snooping 0",
            f"link set {self._bridge} address {self._hardware_address(HOST)} up",
            f"addr add {self.address(HOST)}/24 dev {self._bridge}",
        ]
        for node in self.nodes:
            ns.add_namespace(self._namespace(node))
            port = self._device("p", node)
            lines += [
                f"link add {port} type veth peer name {INTERFACE} netns {self._namespace(node)} "
                f"address {self._hardware_address(node)}",
                f"link set {port} master {self._bridge} up",
            ]
        ns.ip_batch(lines)
        for node in self.nodes:
            address = f"addr add {self.address(node)}/24 dev {INTERFACE}"
            ns.ip_batch([address, f"link set {INTERFACE} up"], self._namespace(node))

    def _start_relay(self, node: str, milliseconds: float, near: str, far: str) -> None:
        words = [sys.executable, "-m", "tests.support.delay_relay", str(milliseconds), near, far]
        relay = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._relays[node] = relay
        assert relay.stdout is not None
        with relay.stdout as said:
            if not said.readline():
                raise MissingEnvironmentError(
                    f"the delay of node {node} ended with {relay.wait()}: it needs /dev/net/tun"
                )

    def _end_relay(self, node: str) -> None:
        if (relay := self._relays.pop(node, None)) is not None:
            relay.kill()
            relay.wait()

    @property
    def _bridge(self) -> str:
        return f"{self.prefix}b"

    def _namespace(self, place: str) -> str:
        return f"{self.prefix}.{place}"

    def _device(self, kind: str, node: str) -> str:
        """A node's device here, with at most 15 characters; ``kind`` is one letter."""
        return f"{self.prefix}{kind}{self._number(node)}"

    def _number(self, place: str) -> int:
        if place not in (HOST, *self.nodes):
            raise ConfigError(f"no node {place!r} in job {self.job}; there are {list(self.nodes)}")
        return HOST_NUMBER if place == HOST else self.nodes.index(place) + 1

    def _hardware_address(self, place: str) -> str:
        """MAC address, from the range for local use."""
        octets = [2, *map(int, self.address(place).split("."))]
        return ":".join(f"{octet:02x}" for octet in (*octets, 0))

    def _pairs(
        self, one: str | Iterable[str], other: str | Iterable[str] | None, one_way: bool
    ) -> list[tuple[str, str]]:
        left, everybody = _group(one), {*self.nodes, HOST}
        right = everybody - left if other is None else _group(other)
        if unknown := sorted((left | right) - everybody):
            raise ConfigError(f"no node {', '.join(unknown)}; there are {sorted(everybody)}")
        ways = [*product(sorted(left), sorted(right))]
        ways += [] if one_way else [(receiver, sender) for sender, receiver in ways]
        return [(sender, receiver) for sender, receiver in ways if sender != receiver]

    def _know(self, sender: str, receiver: str, link: str) -> None:
        """Have a sender take this for the link address of a receiver."""
        words = f"neigh replace {self.address(receiver)} dev {self.interface(sender)} lladdr {link}"
        ns.ip(*words.split(), inside="" if sender == HOST else self._namespace(sender))


def remove_leftovers() -> list[str]:
    """Remove networks whose makers are dead and that nobody is in; their prefixes."""
    names = [*ns.links(), *(os.listdir(ns.FOLDER) if ns.FOLDER.exists() else ())]
    found = {match[0]: match[1] for name in names if (match := _PREFIX.match(name))}
    dead = [prefix for prefix, pid in found.items() if not Path(f"/proc/{int(pid, 16)}").exists()]
    left = [prefix for prefix in dead if not any(map(ns.processes_in, _nodes_of(prefix)))]
    for prefix in left:
        remove(prefix)
    return left


_PREFIX = re.compile(r"mft([0-9a-f]+)[g-z]")


def remove(prefix: str) -> None:
    """Remove what has names with this prefix.  Processes in it are left without a network."""
    for device in sorted(d for d in ns.links() if d.startswith(prefix)):
        # Of a pair the other end goes too.
        if device in ns.links():
            ns.ip("link", "delete", device)
    for namespace in [*_nodes_of(prefix), f"{prefix}.{HOST}"]:
        ns.remove_namespace(namespace)


def _nodes_of(prefix: str) -> list[str]:
    names = [path.name for path in ns.FOLDER.glob(f"{prefix}.*")]
    return [name for name in names if name != f"{prefix}.{HOST}"]


@contextmanager
def _locked() -> Iterator[None]:
    """Only one process at a time makes networks: each takes a subnet that nobody has."""
    with open(_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _group(places: str | Iterable[str]) -> set[str]:
    return {places} if isinstance(places, str) else set(places)
