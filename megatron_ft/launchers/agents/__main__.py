"""Start an agent: ``python -m megatron_ft.launchers.agents`` with AgentOrders as a line on stdin.

The agent leaves the process tree and the session of who started it: some launchers end what
descends from what they started, and the node's SMP is a child of the agent's.  It ends when its
input does.  What was started waits for it and has its exit code: sshd ends the input with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import msgspec

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.agents.agent import Agent
from megatron_ft.launchers.agents.messages import AgentOrders


def main() -> int:
    """Read the orders, have the agent obey them elsewhere, wait for its end."""
    orders = msgspec.json.decode(_first_line(), type=AgentOrders)
    # What a launcher sends to all of a job must not end the memory before it was drained.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end, agents_end = os.pipe()
    middle = os.fork()
    if middle:
        os.close(agents_end)
        os.waitpid(middle, 0)
        return int(os.read(end, 16) or b"1")
    os.close(end)
    os.setsid()
    if not os.fork():
        os.write(agents_end, str(_obey(orders)).encode())
    os._exit(0)


def _first_line() -> bytes:
    """Not by sys.stdin, which would keep what follows in a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("megatron-ft: an agent got no orders on its standard input")
        line += byte
    return line


def _obey(orders: AgentOrders) -> int:
    logging.basicConfig(format=f"megatron-ft, agent of {orders.node}: %(message)s")
    try:
        return asyncio.run(Agent(orders).run())
    except (MegatronFTError, OSError) as error:
        logging.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
