"""Passes the Ethernet frames of two TAP devices on to one another, some time later.

``python -m tests.support.delay_relay MILLISECONDS DEVICE DEVICE`` makes both devices,
prints one line when they are there, and removes them when it ends.  Used because kernels of
small virtual machines often lack the netem queue of ``tc``.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_DEVICE = "/dev/net/tun"
# include/uapi/linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536
# As a queue in a real switch: what does not fit is dropped, and TCP sends it again.
_QUEUE_FRAMES = 20000


class OneWay:
    """Frames from one descriptor to another, each ``seconds`` after it came."""

    def __init__(self, source: int, target: int, seconds: float) -> None:
        self.source = source
        self._target, self._seconds = target, seconds
        self._queue: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        while True:
            try:
                frame = os.read(self.source, _FRAME_BYTES)
            except BlockingIOError:
                return
            if len(self._queue) < _QUEUE_FRAMES:
                self._queue.append((now + self._seconds, frame))

    def give(self, now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            try:
                os.write(self._target, self._queue.popleft()[1])
            except OSError:
                continue  # the device is down: a frame that is lost

    def due(self, now: float) -> float:
        """Seconds until the next frame is due, at most one."""
        return min(1.0, max(0.0, self._queue[0][0] - now)) if self._queue else 1.0


def make_tap(name: str) -> int:
    """A TAP device of this process; gone when the descriptor is closed."""
    descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    )
    return descriptor


def main(milliseconds: float, one: str, other: str) -> None:
    """Relay until killed."""
    first, second = make_tap(one), make_tap(other)
    seconds = milliseconds / 1000
    ways = (OneWay(first, second, seconds), OneWay(second, first, seconds))
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        timeout = min(way.due(now) for way in ways)
        readable, _, _ = select.select([way.source for way in ways], [], [], timeout)
        now = time.monotonic()
        for way in ways:
            if way.source in readable:
                way.take(now)
            way.give(now)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3])
