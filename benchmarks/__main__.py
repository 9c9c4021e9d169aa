"""Measure megatron-ft on this machine and print one table.

    python -m benchmarks [capture] [coding] [stripes] [training] [--mib 512] [--rounds 7]
                         [--arenas FOLDER] [--job-seconds 900] [--markdown FILE] [--json FILE]
    python -m benchmarks --peers [--minutes 12] [--only WAY]...
    python -m benchmarks reshape [--mib 512] [--rounds 7]
    python -m benchmarks restart [--seeds 20] [--only TRAINING]... | [--soak 200]

Figures are ratios within one run: a yardstick and what is compared with it take turns, and
the median of the rounds counts.  Leave the machine alone meanwhile.  --peers installs other
projects' ways of saving into an environment of their own and measures them beside ours.
``restart`` measures how long training stands after faults, in seconds; ``reshape`` how long a
state takes to fewer ranks, in memory and by a checkpoint of DCP.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks import coding, memory, training
from benchmarks.capturing import SHARED_MEMORY
from benchmarks.jobs import Jobs
from benchmarks.peers import comparison, cycles
from benchmarks.peers.catalogue import WAYS
from benchmarks.reshape import measure as reshapes
from benchmarks.restart import measure as restarts
from benchmarks.stripe import rows as stripes
from benchmarks.table import Row, as_json, markdown
from tests.support.campaign import __main__ as campaign

VECTORS = ("avx2", "avx512bw", "vpclmulqdq", "gfni")
"""Instructions that copies, CRCs and parity use where they are there, as Linux calls them."""

PARTS = ("capture", "coding", "stripes", "training")
RESTART = "restart"
"""Takes an hour, and is no part of all."""

RESHAPE = "reshape"
"""Needs nine times the memory of the state, and is no part of all either."""


def main() -> int:
    """Measure and print; 1 if a limit is missed or something could not be measured, 2 without the
    GPU that was asked for.  Who is ended early prints what there is."""
    options = _arguments().parse_args()
    # So that a job that runs is ended with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.peers:
        return _peers(options)
    if RESTART in options.parts:
        return _restart(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks: torch {torch.__version__} sees no GPU here", file=sys.stderr)
        return 2
    # Asked now: a device that has failed may not tell it at the end.
    where = _where(options.device)
    found: list[Row] = []
    failed: list[str] = []
    try:
        for part in _parts(options.parts or PARTS, options):
            failed += _measure(part, found)
    finally:
        place = _place(where)
        text = "\n\n".join([place, markdown(found), *failed])
        _keep(options, f"{text}\n", as_json(found, place, failed))
    return int(bool(failed) or any(row.met is False for row in found))


def _measure(part: Iterator[Row], found: list[Row]) -> list[str]:
    """Add the rows of a part to ``found``; why it ended before its last one, if it did."""
    try:
        for row in part:
            found.append(row)
            print("  ".join(cell for cell in row.cells() if cell), file=sys.stderr, flush=True)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or ["no more is known"]
        said = " ... ".join(lines[:1] + lines[1:][-1:])
        after = f"after {found[-1].name!r}" if found else "at the beginning"
        return [f"Not measured, {after}: {type(error).__name__}: {said}"]
    return []


def _peers(options: argparse.Namespace) -> int:
    """The comparison with other projects; 1 if a limit is missed or one of them is ahead."""
    sizes = cycles.Sizes(mib=options.mib // 2)
    count, found = cycles.run(sizes, options.minutes, options.only or list(WAYS))
    _keep(options, *cycles.report(sizes, count, found, _place(_where("cpu"))))
    return int(any(row.met is False for row in comparison.limits(comparison.measured(found, 1))))


def _restart(options: argparse.Namespace) -> int:
    """Restarts after faults; 1 if a limit is missed or one of them could not be measured."""
    if options.soak:
        words = ["--restarts", str(options.soak), "--protect", "rs:3+1", "--minutes", "60"]
        return campaign.main(words)
    place, report = _place(_where("cpu")), restarts.Report(options.seeds)
    try:
        for way in options.only or restarts.WAYS:
            report.measure(way)
    finally:
        _keep(options, report.text(place), report.as_json(place))
    return int(any(row.met is False for row in report.rows()))


def _keep(options: argparse.Namespace, text: str, data: str) -> None:
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(data)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*PARTS, RESHAPE, RESTART, []],
        help="default: all but reshape and restart",
    )
    parser.add_argument("--mib", type=int, default=512, help="state of a rank (512)")
    parser.add_argument("--rounds", type=int, default=7, help="of each figure (7)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", action="store_true", help="other ways of saving, and ours")
    parser.add_argument("--minutes", type=float, default=12, help="for --peers (12)")
    ways = [*WAYS, *restarts.WAYS]
    parser.add_argument("--only", action="append", choices=ways, help="of --peers, or of restart")
    parser.add_argument("--soak", type=int, default=0, help="restart: so many in a row")
    parser.add_argument("--seeds", type=int, default=20, help="for restart (20)")
    parser.add_argument(
        "--arenas",
        type=Path,
        default=SHARED_MEMORY,
        help="where arenas and the files of other ways are (/dev/shm); try a mount with huge pages",
    )
    parser.add_argument(
        "--job-seconds", type=float, default=900, help="a job of training that takes longer fails"
    )
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    return parser


def _parts(wanted: Sequence[str], options: argparse.Namespace) -> Iterator[Iterator[Row]]:
    """What is measured; each part by itself, so that one that fails costs no other."""
    rounds, device, arenas = options.rounds, options.device, options.arenas
    jobs = Jobs(rounds, device, arenas, options.job_seconds)
    if "capture" in wanted:
        yield from memory.parts(options.mib, rounds, device, arenas)
    if "coding" in wanted:
        yield coding.rows(min(options.mib, 256), rounds)
    if "stripes" in wanted:
        yield stripes.rows(min(options.mib, 64), rounds)
    if "training" in wanted:
        yield from training.parts(options.mib // 2, jobs)
    if RESHAPE in wanted:
        yield reshapes.rows(options.mib, jobs)


def _where(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def processor() -> str:
    """The machine's architecture, and of what copies and codes faster what it has."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return " ".join([platform.machine(), *filter(flags.__contains__, VECTORS)])


def _place(where: str) -> str:
    load = os.getloadavg()[0]
    return (
        f"{date.today()}, {where}, {os.cpu_count()} cores, load average {load:.1f} at the end, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
