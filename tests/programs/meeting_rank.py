"""A rank of a TCP world that meets the others, and again once the pipe FOLDER/go is opened."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ft.erasure.transport import Link, barrier, exchange
from megatron_ft.erasure.world import join_world

folder = Path(sys.argv[1])
world = join_world()
transport = world.transport()
link = Link(transport, range(transport.size), None)
barrier(link)
(folder / f"up{transport.rank}").touch()
(folder / "go").open().close()  # it opens when the test does
said = exchange(link, b"I am %d" % transport.rank * 100_000)
assert said == {n: b"I am %d" % n * 100_000 for n in range(transport.size)}
(folder / f"well{transport.rank}").touch()
world.leave()
