"""Does the doctor name exactly the node that is throttled?  A command, since it takes minutes.

  python tests/support/doctor_throttle.py --runs 20

Each run measures the pairs of four virtual nodes in a real world of MPI, in which one rank, drawn
at random, holds every message back for a second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.cli.doctor.pairs import Worlds, judge_pairs
from megatron_ft.launchers.launcher import Placement
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.launchers.world import WorldProcess

HELD_BACK = """
import time
from megatron_ft.cli.doctor import pair_world
real = pair_world.PairMeter._exchange
def slow(*arguments, **named):
    time.sleep(1.0)
    return real(*arguments, **named)
pair_world.PairMeter._exchange = slow
pair_world.main()
"""


class ThrottledCluster(VirtualCluster):
    """A cluster on whose node ``victim`` every message is held back."""

    victim = ""

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        """As usual, with another program on the victim."""
        changed = [
            p._replace(argv=[sys.executable, "-c", HELD_BACK, p.argv[-1]])
            if p.node == self.victim
            else p
            for p in placements
        ]
        return super().start_world(changed, log_path)


def run_once(nodes: list[str], victim: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """Slow nodes with their shares, and those without any answer."""
    cluster = ThrottledCluster(f"doctor-{uuid.uuid4().hex[:8]}", nodes)
    cluster.victim = victim
    with tempfile.TemporaryDirectory(prefix="mft-") as folder:
        try:
            found = asyncio.run(Worlds(cluster, Path(folder), ".none").examine(nodes, True))
        finally:
            cluster.destroy()
    verdict = judge_pairs(nodes, found.rates, True)
    return dict(verdict.slow), (*verdict.broken, *found.broken)


def main() -> None:
    """Print one line a run, and how many named exactly the victim."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw, right = random.Random(arguments.seed), 0
    nodes = [f"n{i}" for i in range(4)]
    for number in range(1, arguments.runs + 1):
        victim, begin = draw.choice(nodes), time.monotonic()
        slow, broken = run_once(nodes, victim)
        right += {*slow, *broken} == {victim}
        shares = ", ".join(f"{node} ({share:.1%})" for node, share in slow.items())
        print(
            f"{number:3} throttled {victim}, slow: {shares or 'none'}, broken: "
            f"{', '.join(broken) or 'none'}, {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    print(f"{right} of {arguments.runs} runs named exactly the throttled node")


if __name__ == "__main__":
    main()
