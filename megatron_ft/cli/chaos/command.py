"""Inject faults at named points of a job on a virtual cluster, and judge what it does.

  megatron-ft chaos --list
  megatron-ft chaos --case encode.half:encoder:kill:1 --protect rs:2+2
  megatron-ft chaos --seed 7 --cases 5
  megatron-ft chaos --seed 7 --cases 5 -- python train.py ...

Each case is a job of its own.  It passes if it resumed from the newest snapshot that was safe by
its own records before the fault, bit-identical to a run that nothing interrupted.  With more losses
than parity covers it passes if it resumed from disk, or refused with a message.  A command of your
own is compared bit by bit if it writes a trace (docs/how-to/chaos.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.cli.chaos.cases import FAULTS, VICTIMS, Case, all_cases, draw
from megatron_ft.cli.chaos.runner import (
    CaseOutcome,
    ChaosSettings,
    OracleError,
    oracle_traces,
    run_case,
)
from megatron_ft.cli.chaos.trace import Lines
from megatron_ft.cli.training_command import check_command, command_of
from megatron_ft.core.fault_points import POINTS
from megatron_ft.core.scheme import Scheme

EXIT_CODES: Mapping[int, str] = {1: "a case failed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show points, victims and faults")
    what.add_argument(
        "--case",
        action="append",
        metavar="POINT:VICTIM:FAULT:LOSSES",
        help="run this case; may be given again",
    )
    what.add_argument("--all", action="store_true", help="run every case: this takes hours")
    parser.add_argument("--seed", type=int, default=0, help="draws cases, victims and moments")
    parser.add_argument(
        "--cases", type=int, default=1, help="how many to draw (default: %(default)s)"
    )
    parser.add_argument("--protect", default="xor:2", help="protection (default: %(default)s)")
    parser.add_argument("--nodes", type=int, help="nodes that train (default: one stripe)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="trainers a node")
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=4.0,
        help="lease of the supervisor (default: %(default)s)",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=60.0,
        help="longest wait in a case (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write every result to this file")
    parser.add_argument("training_command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def main(arguments: argparse.Namespace, **equipment: Any) -> int:
    """Run the cases; see EXIT_CODES.  ``equipment`` are further fields of ChaosSettings."""
    if arguments.list:
        print(listing())
        return 0
    check_command(command_of(arguments))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it leaves nothing either
    folder = Path(tempfile.mkdtemp(prefix="mft-chaos-"))
    try:
        scheme = Scheme.parse(arguments.protect)
        nodes = arguments.nodes or scheme.members
        flags = {
            "--nodes": nodes,
            "--protect": arguments.protect,
            "--ranks-per-node": arguments.ranks_per_node,
            "--lease-seconds": arguments.lease_seconds,
        }
        own, command = (arguments.seed, arguments.limit_seconds), tuple(command_of(arguments))
        settings = ChaosSettings(folder, flags, *own, command=command, **equipment)
        cases = _cases(arguments, nodes, scheme.parity_members)
        failed = _run_all(cases, settings, arguments.json)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty, as of a call that was refused
    print(f"{len(cases)} cases, {failed} failed")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def _cases(arguments: argparse.Namespace, nodes: int, parity: int) -> list[Case]:
    if arguments.case:
        return [Case.parse(text) for text in arguments.case]
    if arguments.all:
        return all_cases(nodes, parity)
    return draw(arguments.seed, arguments.cases, nodes, parity)


def _run_all(cases: Sequence[Case], settings: ChaosSettings, json_path: Path | None) -> int:
    oracle, results = _oracle(settings), []
    for number, case in enumerate(cases, 1):
        outcome = run_case(case, settings, oracle)
        words = f"{in_words(outcome)} ({outcome.seconds:.1f} s)"
        print(f"[{number}/{len(cases)}] {case}: {words}", flush=True)
        if not outcome.verdict.good:
            print(failure(outcome, settings), flush=True)
        results.append(as_json(outcome))
        if json_path is not None:  # after every case, so that an interrupted run keeps them
            json_path.write_text(json.dumps(results, indent=1) + "\n")
    return sum(bool(result["problems"]) for result in results)


def _oracle(settings: ChaosSettings) -> dict[int, Lines]:
    """Lines to compare with; none if the user's command cannot run without us."""
    try:
        traces = oracle_traces(settings)
    except OracleError as error:
        if not settings.command:
            raise
        print(f"no comparison of bytes: {error}", flush=True)
        return {}
    if not traces:
        print("no comparison of bytes: the command wrote no trace", flush=True)
    return traces


def listing() -> str:
    lines = ["points (reached by, once):"]
    for point in POINTS.values():
        lines.append(f"  {point.name:<26}{point.role:<12}{point.occasion:<18}{point.text}")
    lines += ["", "victims:"]
    lines += [f"  {victim:<12}{', '.join(faults)}" for victim, faults in VICTIMS.items()]
    lines += ["", "faults:"]
    return "\n".join(lines + [f"  {fault:<12}{text}" for fault, text in FAULTS.items()])


def in_words(outcome: CaseOutcome) -> str:
    """The end of a case in a few words: the sources of its restores, "refused", "FAILED"."""
    if not outcome.verdict.good:
        return "FAILED"
    if outcome.story.end == "stopped":
        return "refused"
    sources = dict.fromkeys(restore.source for restore in outcome.verdict.restores)
    return ", ".join(sources) or "continued"


def as_json(outcome: CaseOutcome) -> dict[str, Any]:
    verdict = outcome.verdict
    return {
        "case": str(outcome.case),
        "result": in_words(outcome),
        "problems": list(verdict.problems),
        "done": [strike.text for strike in outcome.story.strikes],
        "restored": [
            {"iteration": r.iteration, "least": r.least, "source": r.source}
            for r in verdict.restores
        ],
        "compared": verdict.compared,
        "seconds": round(outcome.seconds, 1),
    }


def failure(outcome: CaseOutcome, settings: ChaosSettings) -> str:
    done = "; ".join(strike.text for strike in outcome.story.strikes) or "nothing"
    again = ["megatron-ft", "chaos", "--case", str(outcome.case), "--seed", str(settings.seed)]
    again += [str(word) for pair in settings.flags.items() for word in pair]
    again += ["--", *settings.command] if settings.command else []
    return "\n".join(
        [
            *(f"  {problem}" for problem in outcome.verdict.problems),
            f"  done to it: {done}",
            outcome.tail,
            f"  logs: {outcome.folder}",
            f"  again: {shlex.join(again)}",
        ]
    )
