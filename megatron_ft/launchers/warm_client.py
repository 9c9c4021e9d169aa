"""Starts a training command warm: the node's trainer host forks it, and this process stands for it.

``python -I -S warm_client.py SOCKET COMMAND...``.  The host's child gets this process's streams,
environment, working directory, umask, limits and processors, and this process ends as the child
does.  When this process is killed, the kernel kills the child.  Where the host does not answer or
cannot fork the command, this process becomes the command itself.

It imports only what starts in milliseconds, and nothing of this package: the interpreter is the
training command's own.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

START = {"MEGATRON_FT_START": "warm"}
"""The child's report of its start; a command that this process becomes starts cold."""
WHY_COLD = "MEGATRON_FT_WHY_COLD"
"""Reason why such a command starts cold."""
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""Longest wait for a host that still imports; a cold start would import as long."""
STATUS_SECONDS = 5.0
"""Longest wait for a status after the end; a host that has died or is stopped gives none."""
PEER = (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
IGNORABLE = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def as_bytes(text: str) -> str:
    """The bytes of an argument, path or variable, one letter each.

    The host may decode them otherwise: this process is isolated from variables that say how.
    """
    return os.fsencode(text).decode("latin-1")


def request_of(command: list[str]) -> bytes:
    """All that the child needs to be what a started process would be, as JSON."""
    umask = os.umask(0o077)
    os.umask(umask)
    limits = {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    return json.dumps(
        {
            "argv": [as_bytes(word) for word in command],
            "env": {as_bytes(n): as_bytes(v) for n, v in {**os.environ, **START}.items()},
            "cwd": as_bytes(os.getcwd()),
            "umask": umask,
            "limits": limits,
            "affinity": sorted(os.sched_getaffinity(0)),
            "ignored": [n for n in IGNORABLE if signal.getsignal(n) == signal.SIG_IGN],
        }
    ).encode()


def connect(path: str) -> socket.socket | None:
    """A connection to the host; None if none of this user's listens there in time."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        else:
            if struct.unpack("3i", connection.getsockopt(*PEER))[1] == os.geteuid():
                return connection
            connection.close()
            return None


def ask(connection: socket.socket, command: list[str], seconds: float) -> tuple[int | None, str]:
    """The number of the forked process; 0 if the host refuses, None if it gives no answer; why."""
    # The child is killed by the kernel when nobody holds the end of this pipe that stays here.
    link, _kept = os.pipe()
    message = request_of(command)
    connection.settimeout(seconds)
    try:
        sent = socket.send_fds(connection, [message], [0, 1, 2, link])
        connection.sendall(message[sent:])
        connection.shutdown(socket.SHUT_WR)
        answer = json.loads(read_line(connection))
        return int(answer["pid"]), str(answer.get("why", ""))
    except (OSError, ValueError) as error:
        os.close(_kept)
        return None, f"the trainer host gave no answer: {error or type(error).__name__}"
    finally:
        os.close(link)


def read_line(connection: socket.socket) -> bytes:
    """One line; what came before the end of the stream if that is first."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            break
        line += piece
    return line


def wait_for(connection: socket.socket, pid: int) -> int:
    """The exit status of the child, below zero a signal; that of SIGKILL if it is unknown."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        pidfd = -1
    if pidfd >= 0:
        for name in FORWARDED:
            signal.signal(signal.Signals[name], lambda number, _: forward(pidfd, number))
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
    connection.settimeout(STATUS_SECONDS)
    try:
        return int(json.loads(read_line(connection))["status"])
    except (OSError, ValueError, KeyError):
        return -signal.SIGKILL


def forward(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass


def leave(status: int) -> None:
    """End as the child has ended."""
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(128 - status)


def main() -> None:
    """Run the command warm, or become it."""
    path, command = sys.argv[1], sys.argv[2:]
    deadline = time.monotonic() + ANSWER_SECONDS
    why = f"no trainer host listens at {path}"
    # A host that replaces itself closes its connections, and answers the next one.
    while (left := deadline - time.monotonic()) > 0 and (connection := connect(path)) is not None:
        pid, why = ask(connection, command, left)
        if pid:
            leave(wait_for(connection, pid))
        connection.close()
        if pid == 0:
            break
    os.environ[WHY_COLD] = why
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
