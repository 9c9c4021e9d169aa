"""Writes <folder>/rank<n> when its world is complete; then waits for its end, if it is to.

``python world_rank.py FOLDER [wait]``
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from megatron_ft.core.environment import NODE


def main(folder: Path, wait: bool) -> None:
    from mpi4py import MPI  # tests import this file for its path

    world = MPI.COMM_WORLD
    world.barrier()
    seen = {"size": world.size, "node": os.environ[NODE], "odd": os.environ["ODD"]}
    seen["processors"] = len(os.sched_getaffinity(0))
    (folder / f".{world.rank}").write_text(json.dumps(seen))
    (folder / f".{world.rank}").rename(folder / f"rank{world.rank}")
    if wait:
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), len(sys.argv) > 2)
