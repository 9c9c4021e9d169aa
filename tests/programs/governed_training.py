"""A loop whose snapshots become dearer at one iteration; it writes down what they cost.

Arguments: iterations, the iteration from which on they are dear, seconds that a cheap one
holds training, seconds of an iteration, the file to write; then the iteration from which on they
are cheap again (none: never), and how many times as dear they are between (none: ten).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

from megatron_ft import SnapshotConfig, SnapshotManager
from megatron_ft.trainer.copier import CopyItem
from megatron_ft.trainer.cpu import CpuCopier


class DearCopier(CpuCopier):
    """Holds the training thread for ``seconds`` before each copy."""

    seconds = 0.0

    def stage(self, items: Sequence[CopyItem]) -> list[CopyItem]:
        time.sleep(self.seconds)
        return super().stage(items)


def main(
    iterations: int,
    dear: int,
    cheap_seconds: float,
    iteration: float,
    file: str,
    again: int = sys.maxsize,
    times: int = 10,
) -> None:
    """Train, and write one line an iteration: its end, and all stalls so far, in seconds."""
    copier = DearCopier(1 << 20)
    snapshots = SnapshotManager(SnapshotConfig.from_env(), copier=copier)
    state = {"weight": torch.zeros(1000)}
    snapshots.load(into=state)
    with open(file, "w") as lines:
        for number in range(1, iterations + 1):
            time.sleep(iteration)
            with snapshots.fence():
                state["weight"] += 1
            copier.seconds = cheap_seconds * (times if dear <= number < again else 1)
            snapshots.save(number, state)
            lines.write(json.dumps([number, time.monotonic(), snapshots.stats.stall_seconds]))
            lines.write("\n")
    snapshots.close(finished=True)


if __name__ == "__main__":
    count, first, cheap, each, to, *rest = sys.argv[1:]
    main(int(count), int(first), float(cheap), float(each), to, *map(int, rest))
