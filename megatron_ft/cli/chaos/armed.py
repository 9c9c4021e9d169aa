"""What a process of a chaos job does at fault points: count, claim a strike, suffer it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos.plan import ARMED_NAME, SOCKET_NAME, Arrival, Plan, Strike
from megatron_ft.core.environment import NODE

RUNNER_SECONDS = 120.0


class InjectedError(Exception):
    """The exception that the plan wanted; none of ours, so nobody expects it."""


def arm(folder: str) -> Callable[[str], None]:
    """What fault_points.reach calls in this process from now on."""
    return Armed(Path(folder))


class Armed:
    """The plan as one process sees it.  Points are counted from when the plan was armed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node = os.environ.get(NODE, "")
        self._rank = int(os.environ.get("RANK", "-1"))
        strikes = Plan.read(folder).strikes
        self._strikes = [s for s in strikes if self._concerns(s)]
        self._counts = dict.fromkeys((s.name for s in self._strikes), 0)

    def _concerns(self, strike: Strike) -> bool:
        return strike.node in ("", self._node) and strike.rank in (-1, self._rank)

    def __call__(self, point: str) -> None:
        """This process is at ``point``."""
        for strike in self._strikes:
            if strike.point == point and (self._folder / ARMED_NAME).exists():
                self._counts[strike.name] += 1
                if self._is_due(strike) and self._claim(strike):
                    self._hold(strike)
                    _inflict(strike)

    def _is_due(self, strike: Strike) -> bool:
        count = self._counts[strike.name]
        return count >= strike.nth if strike.repeat else count == strike.nth

    def _claim(self, strike: Strike) -> bool:
        """Whether this process is the first to find the strike; another incarnation's counts as
        well."""
        if strike.repeat:
            return True
        try:
            os.close(os.open(self._folder / f"fired-{strike.name}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def _hold(self, strike: Strike) -> None:
        """Tell the runner and stand still until it has done its part; without one go on."""
        arrival = Arrival(strike.name, strike.point, self._node, self._rank, os.getpid())
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(RUNNER_SECONDS)
            connection.connect(str(self._folder / SOCKET_NAME))
            connection.sendall(msgspec.json.encode(arrival) + b"\n")
            connection.recv(16)


def _inflict(strike: Strike) -> None:
    if strike.action:
        _ACTIONS[strike.action](strike)


def _raise(strike: Strike) -> None:
    raise InjectedError(f"injected at {strike.point}")


def _step_clock(strike: Strike) -> None:
    """Have this process see another time of day: the clock of one process, not of the machine."""
    seen, seen_ns = time.time, time.time_ns
    time.time = lambda: seen() + strike.seconds
    time.time_ns = lambda: seen_ns() + int(strike.seconds * 1e9)


_ACTIONS: Mapping[str, Callable[[Strike], None]] = {
    "kill": lambda strike: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda strike: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": _raise,
    "delay": lambda strike: time.sleep(strike.seconds),
    "clock": _step_clock,
}
