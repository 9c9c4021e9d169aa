"""Soak a job: many snapshots, random faults, and a table of what grew.

    python -m tests.support.soak --snapshots 1000 --nodes 8 --ranks-per-node 2 --seed S
    python -m tests.support.soak --restarts 200 --nodes 4 --ranks-per-node 1 --seed S

Exit codes: 0 all well, 1 something grew, differed, or did not continue.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.support.soak.flatness import judge
from tests.support.soak.measure import RESTARTED_ROLES, ROLES
from tests.support.soak.report import is_good, render
from tests.support.soak.run import Soak, run
from tests.support.warm_host import WarmHost


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - started:7.1f} s] {text}", file=sys.stderr, flush=True)

    folder = options.folder or Path(tempfile.mkdtemp(prefix="mft-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    faults = options.snapshots // 40 if options.faults is None else options.faults
    snapshots = 0 if options.restarts else options.snapshots
    server = WarmHost()
    try:
        result = run(
            Soak(
                folder,
                snapshots=snapshots,
                nodes=options.nodes,
                ranks_per_node=options.ranks_per_node,
                spares=options.spares,
                protect=options.protect,
                restarts=bool(options.restarts),
                faults=options.restarts or faults,
                seed=options.seed,
                minutes=options.minutes,
                every=options.sample_every,
                iteration_seconds=options.iteration_seconds,
                warm=server.path,
                tell=tell,
            )
        )
    finally:
        server.close()
    roles = RESTARTED_ROLES if options.restarts else ROLES
    lines = judge(result.samples, roles=roles)
    if options.samples:
        options.samples.write_bytes(msgspec.json.encode(result.samples))
    print(render(result, lines))
    tell(f"logs and traces are in {folder}")
    return 0 if is_good(result, lines) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--snapshots", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--spares", type=int, default=2)
    parser.add_argument("--protect", default="rs:3+1")
    parser.add_argument("--faults", type=int, help="default: one in 40 snapshots")
    parser.add_argument("--restarts", type=int, default=0, help="so many, as fast as can be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="then it is told to end")
    parser.add_argument("--sample-every", type=int, default=5, metavar="SNAPSHOTS")
    parser.add_argument("--iteration-seconds", type=float, default=0.05, help="shortest iteration")
    parser.add_argument("--samples", type=Path, help="write every sample to this file, as JSON")
    parser.add_argument("--folder", type=Path, help="for logs and traces (default: a new one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
