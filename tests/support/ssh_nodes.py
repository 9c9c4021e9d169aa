"""Nodes that are reached by ssh: a real sshd, with keys of its own, in the network of each."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB, NODE
from tests.support.node_network import NodeNetwork

START_SECONDS = 30.0
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")
PRIVILEGE_SEPARATION = Path("/run/sshd")

_SERVER = """\
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/{node}.pid
UsePAM no
StrictModes no
PasswordAuthentication no
AcceptEnv *
"""
_CLIENT = """\
IdentityFile {folder}/user
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
"""
_HOST = """\
Host {node}
    HostName {address}
    SetEnv {variables}
"""


def missing() -> str:
    """Why there can be no such nodes here, or nothing."""
    absent = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    absent += [] if SSHD else ["sshd"]
    if absent:
        return f"no {', '.join(absent)}: install openssh-server and openssh-client"
    return "" if os.geteuid() == 0 else "an sshd of one's own for any node needs root"


@contextmanager
def serving(network: NodeNetwork, folder: Path, more: Mapping[str, str]) -> Iterator[Path]:
    """An sshd on each node of the network; yields a folder with an ``ssh`` that knows them.

    What is started on a node by ssh has ``more`` in its environment, and the node's marks.
    """
    _write(network, folder, more)
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    servers = [_start(network, folder, node) for node in network.nodes]
    try:
        for node in network.nodes:
            _await(folder, node)
        yield folder / "bin"
    finally:
        for node in network.nodes:
            lose(network, node)
        for server in servers:
            server.wait(START_SECONDS)


def lose(network: NodeNetwork, node: str) -> None:
    """SIGKILL to all that is in the node's network, its sshd too."""
    place = os.stat(network.namespace_path(node)).st_ino

    def is_there(pid: int) -> bool:
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino == place
        except OSError:
            return False

    procfs.kill_matching(is_there, node)


def _write(network: NodeNetwork, folder: Path, more: Mapping[str, str]) -> None:
    (folder / "bin").mkdir(parents=True)
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    config = ""
    for node in network.nodes:
        given = {**more, JOB: network.job, NODE: node}
        variables = " ".join(f'{name}="{value}"' for name, value in given.items())
        address = network.address(node)
        config += _HOST.format(node=node, address=address, variables=variables)
        server = _SERVER.format(address=address, folder=folder, node=node)
        (folder / f"{node}.config").write_text(server)
    (folder / "config").write_text(_CLIENT.format(folder=folder) + config)
    program = folder / "bin" / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    program.chmod(0o700)


def _start(network: NodeNetwork, folder: Path, node: str) -> subprocess.Popen[bytes]:
    """Each has a host name of its own, by which Open MPI tells nodes apart."""
    serve = [
        str(SSHD),
        "-D",
        "-f",
        str(folder / f"{node}.config"),
        "-E",
        str(folder / f"{node}.log"),
    ]
    words = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *serve]
    return subprocess.Popen(network.entered(node, words), start_new_session=True)


def _await(folder: Path, node: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (folder / f"{node}.pid").exists():
        assert time.monotonic() < deadline, f"no sshd: {(folder / f'{node}.log').read_text()}"
        time.sleep(0.02)
