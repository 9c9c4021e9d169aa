"""Explore small jobs exhaustively and print a table.

Usage: python tests/protocol/explore_protocol.py --help.

Without --nodes the standard rows are explored, each for at most --seconds.  Exit code 1 if a
row shows a violation, whose steps are printed; 2 if a row was cut off before it was complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.protocol.model.enabled import FAULTS
from tests.protocol.model.explore import Explorer, Limits, Result
from tests.protocol.model.shape import Bounds, Shape

SHAPES = {
    1: Shape("none", 1, 0, spares=0, slots=2, coarse=True),
    2: Shape("replica", 1, 1, spares=0, slots=2, coarse=True),
    3: Shape("xor", 2, 1, spares=0, slots=2, coarse=True),
}
HEAD = "| job | snapshots | faults | order | states | transitions | seconds | result |"
RULER = "| --- | ---: | --- | --- | ---: | ---: | ---: | --- |"


@dataclass(frozen=True)
class Row:
    """One exploration: a job and how much of what can happen to it."""

    shape: Shape
    bounds: Bounds
    limits: Limits

    def __str__(self) -> str:
        shape, limits = self.shape, self.limits
        extras = [f"{shape.spares} spare"] if shape.spares else []
        extras += [
            name for name in ("readers", "disk", "damage", "survivors") if getattr(shape, name)
        ]
        job = ", ".join([f"{shape.data + shape.parity} × {shape.codec}", *extras])
        kinds = ", ".join(sorted(limits.kinds)) or "any"
        faults = f"{limits.faults} of {kinds}" if limits.faults else "0"
        order = "every" if limits.delays is None else f"{limits.delays} delays"
        return f"| {job} | {self.bounds.snapshots} | {faults} | {order} |"


def row(
    nodes: int,
    snapshots: int,
    faults: int,
    delays: int | None = None,
    kinds: Sequence[str] = (),
    **extras: object,
) -> Row:
    """A row by its numbers; ``extras`` are fields of the shape."""
    shape = replace(SHAPES[nodes], **extras)
    return Row(shape, Bounds(snapshots), Limits(faults, delays, tuple(kinds)))


STANDARD = [
    row(1, 2, 1),
    row(1, 2, 2),
    row(1, 2, 1, disk=True),
    row(2, 2, 0),
    row(2, 1, 1),
    row(2, 2, 1, 0, spares=1),
    row(2, 2, 2, 0, ("lose", "restart", "smp_crash"), spares=1),
    row(2, 2, 1, 0, spares=1, disk=True),
    row(2, 2, 2, 0, ("die", "restart", "smp_crash", "suspend_writing"), spares=1, survivors=True),
    row(2, 1, 2, 0, ("flip", "lose", "suspend_writing"), spares=1, damage=True),
    row(3, 1, 0),
    row(3, 2, 1, 0, spares=1),
    row(3, 1, 2, 0, ("lose", "restart", "cut"), spares=1),
]


def explore(one: Row, seconds: float = 0.0) -> Result:
    """Explore one row, at most for so long."""
    return Explorer(one.shape, one.bounds, replace(one.limits, seconds=seconds)).run()


def line(one: Row, result: Result) -> str:
    """The row with what was found."""
    verdict = "nothing lost, nothing stuck" if result.complete else "cut off, nothing lost"
    found = result.problem or verdict
    return f"{one} {result.states:,} | {result.transitions:,} | {result.seconds:.0f} | {found} |"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows = STANDARD if options.nodes is None else [_asked_for(options)]
    status = 0
    print(HEAD, RULER, sep="\n", flush=True)
    for one in rows:
        result = explore(one, options.seconds)
        print(line(one, result), flush=True)
        for step in result.path if result.problem else ():
            print("   ", *step, file=sys.stderr)
        status = 1 if result.problem else status or 2 * (not result.complete)
    return status


def _asked_for(options: argparse.Namespace) -> Row:
    return row(
        options.nodes,
        options.snapshots,
        options.faults,
        options.delays,
        options.kinds,
        spares=options.spares,
        readers=options.readers,
        disk=options.disk,
        damage=options.damage,
        survivors=options.survivors,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="explore_protocol.py")
    parser.add_argument(
        "--nodes", type=int, choices=sorted(SHAPES), help="1 none, 2 replica, 3 xor"
    )
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--snapshots", type=int, default=2, help="permitted in each incarnation")
    parser.add_argument("--faults", type=int, default=1, help="most in one run")
    parser.add_argument("--kinds", nargs="*", default=(), choices=sorted(FAULTS), help="of faults")
    parser.add_argument("--delays", type=int, help="most in one run; every order without it")
    parser.add_argument("--seconds", type=float, default=0.0, help="most for a row; 0 no limit")
    for name in ("readers", "disk", "damage", "survivors"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
