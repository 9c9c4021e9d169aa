"""Network namespaces and links of this machine, through the programs ``ip`` and ``tc``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.core.errors import MissingEnvironmentError

FOLDER = Path("/run/netns")
"""Where ``ip netns`` keeps the names of namespaces (ip-netns(8))."""

_PROGRAMS = ("ip", "tc", "nsenter")
# include/uapi/linux/capability.h
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def missing() -> str:
    """Why namespaces cannot be made here, with what to do; empty if they can."""
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            return f"no program {program!r} on PATH: install iproute2 and util-linux"
    held = _effective_capabilities()
    lacking = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if lacking:
        return f"a network of namespaces needs {' and '.join(lacking)}: run as root or skip"
    return ""


def entered(namespace: str, argv: Sequence[str]) -> list[str]:
    """The command that runs ``argv`` in a namespace: ``nsenter`` becomes it, with its number."""
    return ["nsenter", f"--net={FOLDER / namespace}", "--", *argv]


def ip(*words: str, inside: str = "") -> str:
    """What ``ip`` prints; MissingEnvironmentError with its complaint if it fails."""
    return _run("ip", *(("-n", inside) if inside else ()), *words)


def ip_batch(lines: Sequence[str], inside: str = "") -> None:
    """Several ``ip`` commands in one namespace, in order, up to the first that fails."""
    _run("ip", *(("-n", inside) if inside else ()), "-batch", "-", text="\n".join(lines))


def tc(*words: str, inside: str) -> str:
    """What ``tc`` prints; MissingEnvironmentError with its complaint if it fails."""
    return _run("tc", *(("-n", inside) if inside else ()), *words)


def add_namespace(name: str) -> None:
    """A new namespace whose loopback is up; one of this name is used again."""
    if not (FOLDER / name).exists():
        ip("netns", "add", name)
        ip("link", "set", "lo", "up", inside=name)


def name_own_namespace(name: str) -> None:
    """Give the namespace that this process is in a name, so that it is found from any other."""
    if not (FOLDER / name).exists():
        ip("netns", "attach", name, str(os.getpid()))


def remove_namespace(name: str) -> None:
    """Remove a name; the namespace goes with the last process in it."""
    if (FOLDER / name).exists():
        ip("netns", "delete", name)


def processes_in(name: str) -> list[int]:
    """Numbers of the processes of a namespace; none if there is no such namespace."""
    if not (FOLDER / name).exists():
        return []
    return [int(word) for word in ip("netns", "pids", name).split()]


def links(inside: str = "") -> list[str]:
    """Names of the network devices of a namespace; of this process's own for ""."""
    lines = ip("-o", "link", "show", inside=inside).splitlines()
    return [line.split(": ")[1].split("@")[0] for line in lines]


def _effective_capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise MissingEnvironmentError(f"`{' '.join(command)}` failed: {said}; {text}".rstrip("; "))
    return done.stdout


def enter_namespace(path: str) -> None:
    """Move this thread, and what it starts, into a network namespace (setns(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to {path}")
    finally:
        os.close(descriptor)
