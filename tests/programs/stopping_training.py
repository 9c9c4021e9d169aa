"""A training of independent ranks that ends itself with 0, before or at its planned end.

``--until`` ends this start, ``--last`` is the plan (0: none is given), ``--leave`` how it leaves:
by ``close``, by ``close(finished=True)``, at the end of the script, by ``os._exit``, or before it
asks for anything.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from megatron_ft import SnapshotConfig, SnapshotManager


def main() -> None:
    """Train, and add a line of the iterations that this start has made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--last", type=int, default=0)
    parser.add_argument("--leave", default="close")
    parser.add_argument("--file", type=Path, required=True)
    options = parser.parse_args()
    if options.leave == "before":
        return
    snapshots = SnapshotManager(SnapshotConfig.from_env(), last=options.last)
    state = {"weight": torch.zeros(1000)}
    first = snapshots.load(into=state)
    for number in range(first + 1, options.until + 1):
        time.sleep(0.05)
        with snapshots.fence():
            state["weight"] += 1
        snapshots.save(number, state)
    if options.leave == "close":
        snapshots.close()
    elif options.leave == "finished":
        snapshots.close(finished=True)
    with open(f"{options.file}-{os.environ['RANK']}", "a") as lines:
        lines.write(f"{first} {float(state['weight'][0]):g}\n")
    if options.leave == "_exit":
        lines.close()
        os._exit(0)


if __name__ == "__main__":
    main()
