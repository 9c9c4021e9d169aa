"""A network for virtual nodes: a namespace each, joined by a bridge, that can be cut.

  with NodeNetwork("my-job", ["n0", "n1", "n2"]) as network:
      network.cut("n1")                # n1 is alone; nobody is told, packets vanish
      network.heal()
      network.cut(["n0"], ["n1"])      # these two not, all others as before
      network.delay("n2", 50)          # each way, so a round trip takes 100 ms more
      network.limit("n2", 100)         # Mbit/s, each way

Names follow from the job's, so another process that makes the same object can change the
same network.  Needs root: see ``unavailable``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from types import TracebackType

from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from tests.support import namespaces as ns
from tests.support import network_notes as notes
from tests.support.network_names import INTERFACE, NetworkNames, prefix_of
from tests.support.networked_cluster import HOST
from tests.support.slow_links import SlowLinks

__all__ = ["HOST", "NodeNetwork", "remove_leftovers", "unavailable"]

# Nobody has it, so the bridge passes such frames to all and none takes them.
_NOBODY = "02:00:00:00:00:00"


def unavailable() -> str:
    """Why there can be no NodeNetwork on this machine, with what to do; empty if there can."""
    return ns.missing()


class NodeNetwork:
    """The network of one job's virtual nodes.

    Places are node names and ``HOST``, where all processes are that were not started in a
    namespace.  Verbs take effect before they return, and hold for connections that exist.
    """

    def __init__(self, job: str, nodes: Sequence[str]) -> None:
        """Name the network; ``open`` makes it.  ConfigError for nodes that cannot be named."""
        self._names = NetworkNames.of(job, nodes)
        note = notes.read(self._names.notes)
        if note is not None:
            self._names = NetworkNames(job, tuple(nodes), prefix_of(job), note.subnet)
        self._links = SlowLinks(self._names)

    def open(self) -> NodeNetwork:
        """Make the network, or take it over as it is; leftovers of dead runs are removed.

        MissingEnvironmentError without the rights, programs or kernel for it.
        """
        reason = unavailable()
        if reason:
            raise MissingEnvironmentError(reason)
        with notes.locked():
            remove_leftovers(except_of=self._names.job)
            note = notes.read(self._names.notes)
            if note is not None and note.nodes == self._names.nodes:
                self._names = NetworkNames(note.job, note.nodes, self._names.prefix, note.subnet)
                notes.write(self._names)
                return self
            others = notes.all_networks()
            names = self._names
            taken = {other.subnet for other in others if other.prefix != names.prefix}
            self._names = NetworkNames.of(names.job, names.nodes, taken)
            self._make()
        return self

    def close(self) -> None:
        """Remove all of it.  Processes of the nodes should have ended before."""
        self._links.end_relays()
        with notes.locked():
            notes.remove(self._names)

    def __enter__(self) -> NodeNetwork:
        """Open it."""
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    @property
    def job(self) -> str:
        """Whose network it is."""
        return self._names.job

    @property
    def prefix(self) -> str:
        """What the names of all its devices and namespaces begin with."""
        return self._names.prefix

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes."""
        return self._names.nodes

    def address(self, place: str) -> str:
        """IPv4 address of a node or of HOST."""
        return self._names.address(place)

    def interface(self, place: str) -> str:
        """Name of the device that has this address, as it is called where the place is."""
        return self._names.interface(place)

    def namespace_path(self, place: str) -> str:
        """A file that stands for the place's namespace, for setns(2)."""
        return str(ns.FOLDER / self._names.namespace(place))

    def entered(self, place: str, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` at a place; the process that is started becomes it."""
        return ns.entered(self._names.namespace(place), argv)

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
            self._speak(sender, "replace", receiver, f"lladdr {_NOBODY} nud permanent")
            (self._names.notes / "cuts" / f"{sender}>{receiver}").touch()

    def heal(
        self, one: str | Iterable[str] | None = None, other: str | Iterable[str] | None = None
    ) -> None:
        """Take back what ``cut`` did: between two groups, of one, or everything."""
        everybody = {*self._names.nodes, HOST}
        pairs = product(everybody, everybody) if one is None else self._pairs(one, other, False)
        for sender, receiver in pairs:
            note = self._names.notes / "cuts" / f"{sender}>{receiver}"
            if note.exists():
                # Known at once: an address that must be asked for first costs a second or more.
                known = f"lladdr {self._names.hardware_address(receiver)} nud reachable"
                self._speak(sender, "replace", receiver, known)
                note.unlink()

    def connected(self, one: str, other: str) -> bool:
        """Whether packets pass between two places, both ways."""
        cuts = self._names.notes / "cuts"
        pairs = ((one, other), (other, one))
        return not any((cuts / f"{sender}>{receiver}").exists() for sender, receiver in pairs)

    def delay(self, node: str, milliseconds: float) -> None:
        """Hold every packet to and from a node for so long; 0 for not at all."""
        self._links.delay(node, milliseconds)

    def limit(self, node: str, megabits: float) -> None:
        """Pass at most so many Mbit/s to the node, and so many from it; 0 for no limit."""
        self._links.limit(node, megabits)

    def _make(self) -> None:
        """Whatever is there of the same names is of a run that died half-way."""
        names, host = self._names, self._names.namespace(HOST)
        ns.name_own_namespace(host)
        notes.remove(names)
        notes.write(names)
        ns.name_own_namespace(host)
        address = f"{names.address(HOST)}/24"
        lines = [
            f"link add {names.bridge} type bridge mcast_snooping 0",
            f"link set {names.bridge} address {names.hardware_address(HOST)} up",
            f"addr add {address} dev {names.bridge}",
        ]
        for node in names.nodes:
            ns.add_namespace(names.namespace(node))
            port, inner = names.device("p", node), names.namespace(node)
            lines += [
                f"link add {port} type veth peer name {INTERFACE} netns {inner} "
                f"address {names.hardware_address(node)}",
                f"link set {port} master {names.bridge} up",
            ]
        ns.ip_batch(lines, host)
        for node in names.nodes:
            address = f"addr add {names.address(node)}/24 dev {INTERFACE}"
            ns.ip_batch([address, f"link set {INTERFACE} up"], names.namespace(node))

    def _pairs(
        self, one: str | Iterable[str], other: str | Iterable[str] | None, one_way: bool
    ) -> list[tuple[str, str]]:
        """Who sends to whom, for two groups."""
        left = _group(one)
        everybody = {*self._names.nodes, HOST}
        right = everybody - left if other is None else _group(other)
        unknown = sorted((left | right) - everybody)
        if unknown:
            raise ConfigError(f"no node {', '.join(unknown)}; there are {sorted(everybody)}")
        ways = list(product(sorted(left), sorted(right)))
        ways += [] if one_way else [(receiver, sender) for sender, receiver in ways]
        return [
            (sender, receiver) for sender, receiver in dict.fromkeys(ways) if sender != receiver
        ]

    def _speak(self, sender: str, verb: str, receiver: str, rest: str) -> None:
        names = self._names
        words = f"neigh {verb} {names.address(receiver)} dev {names.interface(sender)} {rest}"
        ns.ip(*words.split(), inside=names.namespace(sender))


def remove_leftovers(except_of: str = "") -> list[str]:
    """Remove networks whose makers are dead and that nobody is in; names of their jobs.

    The job ``except_of`` keeps its own.  Only what this module has made is touched.
    """
    others = [n for n in notes.all_networks() if n.job != except_of and not notes.in_use(n)]
    for names in others:
        notes.remove(names)
    return [names.job for names in others]


def _group(places: str | Iterable[str]) -> set[str]:
    return {places} if isinstance(places, str) else set(places)
