"""Delays and limits of the links between a network's bridge and its nodes."""

from __future__ import annotations

import os
import subprocess
import sys

from megatron_ft.core.errors import MissingEnvironmentError
from tests.support import namespaces as ns
from tests.support import network_notes as notes
from tests.support.network_names import INTERFACE, NetworkNames
from tests.support.networked_cluster import HOST

_BURST_BYTES = 128 * 1024
_QUEUE_MILLISECONDS = 400


class SlowLinks:
    """Makes the links of one network slow; see NodeNetwork."""

    def __init__(self, names: NetworkNames) -> None:
        self._names = names
        self._relays: dict[str, subprocess.Popen[bytes]] = {}

    def delay(self, node: str, milliseconds: float) -> None:
        """Hold every packet to and from a node for so long; 0 for not at all."""
        names, host = self._names, self._names.namespace(HOST)
        port, aside = names.device("p", node), names.device("d", node)
        ns.ip("link", "set", port, "master", names.bridge, inside=host)
        self._stop_relay(node)
        if aside in ns.links(host):
            ns.ip("link", "delete", aside, inside=host)
        if milliseconds > 0:
            self._start_relay(node, milliseconds)
            # The node's port, then a relay between two devices, then the bridge.
            near, far = names.device("n", node), names.device("f", node)
            ns.ip_batch(
                [
                    f"link add {aside} type bridge mcast_snooping 0",
                    f"link set {aside} up",
                    f"link set {near} master {aside} up",
                    f"link set {far} master {names.bridge} up",
                    f"link set {port} master {aside}",
                ],
                host,
            )

    def limit(self, node: str, megabits: float) -> None:
        """Pass at most so many Mbit/s to the node, and so many from it; 0 for no limit."""
        port = self._names.device("p", node)
        ends = ((HOST, port), (node, INTERFACE))
        for place, device in ends:
            namespace = self._names.namespace(place)
            if megabits > 0:
                shape = f"tbf rate {megabits:g}mbit burst {_BURST_BYTES} "
                shape += f"latency {_QUEUE_MILLISECONDS}ms"
                words = ("qdisc", "replace", "dev", device, "root", *shape.split())
                ns.tc(*words, inside=namespace)
            elif "tbf" in ns.tc("qdisc", "show", "dev", device, inside=namespace):
                ns.tc("qdisc", "delete", "dev", device, "root", inside=namespace)

    def end_relays(self) -> None:
        """End all delays' processes, whichever process has started them."""
        for node in self._names.nodes:
            self._stop_relay(node)

    def _start_relay(self, node: str, milliseconds: float) -> None:
        near, far = self._names.device("n", node), self._names.device("f", node)
        module = "tests.support.delay_relay"
        argv = [sys.executable, "-m", module, str(milliseconds), near, far]
        environment = {**os.environ, notes.RELAY: f"{self._names.prefix}/{node}"}
        relay = subprocess.Popen(
            ns.entered(self._names.namespace(HOST), argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._relays[node] = relay
        assert relay.stdout is not None
        with relay.stdout as said:
            if not said.readline():
                status = relay.wait()
                raise MissingEnvironmentError(
                    f"the delay of node {node} ended with {status}: it needs /dev/net/tun"
                )

    def _stop_relay(self, node: str) -> None:
        """End it, whichever process has started it."""
        notes.kill_relays(f"{self._names.prefix}/{node}")
        own = self._relays.pop(node, None)
        if own is not None:
            own.wait()
