"""Stands for a trainer that agents start: the tests' host forks it, in the network of this one.

``python tests/programs/warm_trainer.py HOST SCRIPT ...`` under ``--trainer-per-node``, as a
torchrun of one rank: the mark by which all that torchrun started is found ends both together.  It
begins once the node's encoder is there, as imports give that the time elsewhere; a node alone has
none.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.smp.processes import WRITERS_NAME
from tests.programs import placed_trainer
from tests.support.warm_host import warm

WAIT_SECONDS = 200.0


def main() -> None:
    host, *script = sys.argv[1:]
    place = {"RANK": "PET_NODE_RANK", "WORLD_SIZE": "PET_NNODES"}
    place |= {"MASTER_ADDR": "PET_MASTER_ADDR", "MASTER_PORT": "PET_MASTER_PORT"}
    given = {name: os.environ[told] for name, told in place.items()} | {"LOCAL_RANK": "0"}
    if given["WORLD_SIZE"] != "1":
        await_encoder(ProcessEnvironment.from_env().node_dir / WRITERS_NAME)
    network = f"/proc/{os.getpid()}/ns/net"
    words = warm(host, [placed_trainer.__file__, network, "", *script])
    os.execve(words[0], words, {**os.environ, **given})


def await_encoder(writers: Path) -> None:
    """Until the SMP has noted an encoder among those that write into its arenas."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (writers.exists() and b'"encoder"' in writers.read_bytes()):
        assert time.monotonic() < deadline, f"no encoder in {writers}"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
