"""Inject faults at named points of a job on a virtual cluster, and judge what it does.

  megatron-ft chaos --list
  megatron-ft chaos --case encode.half:encoder:kill:1 --protect rs:2+2
  megatron-ft chaos --seed 7 --cases 5
  megatron-ft chaos --table --markdown table.md
  megatron-ft chaos --seed 7 --cases 5 -- python train.py ...

Each case is a job of its own.  It passes if it resumed from the newest snapshot that what it
had recorded before the fault makes safe, bit-identical to a run that nothing interrupted; with
more losses than parity makes up for, from the disk, or by a refusal that says so.  A command
of your own is compared bit by bit if it writes a trace (docs/chaos.md).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_ft.cli.chaos import report
from megatron_ft.cli.chaos.cases import FAULTS, VICTIMS, Case, draw, table
from megatron_ft.cli.chaos.oracle import OracleError
from megatron_ft.cli.chaos.report import CaseResult
from megatron_ft.cli.chaos.runner import ChaosSettings, oracle_traces, run_case
from megatron_ft.cli.chaos.trace import Lines
from megatron_ft.cli.training_command import command_of
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_points import POINTS
from megatron_ft.core.scheme import Scheme

_NONE = "an installed megatron-ft has no network that can be cut; see docs/chaos.md"
EXIT_CODES: Mapping[int, str] = {1: "a case failed, or a point of the table was never reached"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft chaos``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show points, victims and faults")
    what.add_argument(
        "--case",
        action="append",
        metavar="POINT:VICTIM:FAULT:LOSSES",
        help="run this case; may be given again",
    )
    what.add_argument("--table", action="store_true", help="every point and every fault")
    parser.add_argument(
        "--all", action="store_true", help="with --table: kill every process at every point"
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="with --table: every process and every number of losses at every point, not all "
        "of both together",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws cases, victims and moments")
    parser.add_argument("--cases", type=int, default=1, help="how many to draw (%(default)s)")
    parser.add_argument("--protect", default="xor:2", help="protection (%(default)s)")
    parser.add_argument("--nodes", type=int, help="nodes that train (default: one stripe)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="trainers a node")
    parser.add_argument("--lease-seconds", type=float, default=4.0, help="(%(default)s)")
    parser.add_argument(
        "--limit-seconds", type=float, default=60.0, help="longest wait in a case (%(default)s)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--json", type=Path, help="write every result to this file")
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="leave out the cases that have passed according to the file of --json",
    )
    parser.add_argument("training_command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def main(
    arguments: argparse.Namespace, cluster_class: str = "", warm: str = "", network: str = _NONE
) -> int:
    """Run the cases; see EXIT_CODES.

    ``cluster_class`` and ``warm`` are those of JobFile; ``network`` says why that cluster has no
    network that can be cut, and is empty if it has one.
    """
    if arguments.list:
        print(listing())
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it leaves nothing either
    folder = Path(tempfile.mkdtemp(prefix="mft-chaos-"))
    try:
        settings = ChaosSettings(
            folder=folder,
            nodes=arguments.nodes or Scheme.parse(arguments.protect).members,
            protect=arguments.protect,
            ranks_per_node=arguments.ranks_per_node,
            seed=arguments.seed,
            lease=arguments.lease_seconds,
            limit=arguments.limit_seconds,
            command=tuple(command_of(arguments)),
            cluster_class=cluster_class,
            warm=warm,
        )
        cases = _possible(_cases(arguments, settings), network)
        kept = _kept(arguments, cases, settings)
        save = partial(_save, arguments, settings, cases)
        left = {str(case) for case in cases} - {result.case for result in kept}
        results = run_all(cases, settings, _oracle(settings) if left else {}, save, kept)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty, as of a call that was refused
    return _finish(arguments, settings, results)


def listing() -> str:
    """Points with what is done by then, victims with their faults."""
    lines = ["points (reached by, once):"]
    for point in POINTS.values():
        lines.append(f"  {point.name:<26}{point.role:<12}{point.occasion:<18}{point.text}")
    lines += ["", "victims:"]
    lines += [f"  {victim:<12}{', '.join(faults)}" for victim, faults in VICTIMS.items()]
    lines += ["", "faults:"]
    return "\n".join(lines + [f"  {fault:<12}{text}" for fault, text in FAULTS.items()])


def run_all(
    cases: Sequence[Case],
    settings: ChaosSettings,
    oracle: Mapping[int, Lines],
    save: Callable[[Sequence[CaseResult]], None],
    kept: Sequence[CaseResult] = (),
) -> list[CaseResult]:
    """Run one case after the other, and print a line of each; ``save`` gets those so far.

    Cases of which results are ``kept`` from before are left out.
    """
    passed, results = {result.case for result in kept}, list(kept)
    for number, case in enumerate(cases, 1):
        if str(case) in passed:
            continue
        outcome = run_case(case, settings, oracle)
        results.append(CaseResult.of(outcome))
        save(results)
        end = report.shown(results[-1])
        print(f"[{number}/{len(cases)}] {case}: {end} ({outcome.seconds:.1f} s)", flush=True)
        if not outcome.verdict.good:
            print(report.failure(outcome, settings), flush=True)
    return results


def _cases(arguments: argparse.Namespace, settings: ChaosSettings) -> list[Case]:
    parity = Scheme.parse(settings.protect).parity_members
    if arguments.case:
        return [Case.parse(text) for text in arguments.case]
    if arguments.table:
        return table(settings.nodes, parity, every_process=arguments.all, pairs=arguments.pairs)
    return draw(settings.seed, arguments.cases, settings.nodes, parity)


def _possible(cases: Sequence[Case], no_network: str) -> list[Case]:
    """Those that can be run here."""
    if no_network and any(case.victim == "network" for case in cases):
        print(f"not run: cases of the network: {no_network}", flush=True)
    return [case for case in cases if case.victim != "network" or not no_network]


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


def _kept(
    arguments: argparse.Namespace, cases: Sequence[Case], settings: ChaosSettings
) -> list[CaseResult]:
    """Results of the wanted cases that passed before the break."""
    if not arguments.go_on:
        return []
    if arguments.json is None:
        raise ConfigError("--continue asks what has passed already: give --json FILE, too")
    wanted = {str(case) for case in cases}
    known = report.read(arguments.json, settings)
    return [result for result in known if result.good and result.case in wanted]


def _save(
    arguments: argparse.Namespace,
    settings: ChaosSettings,
    cases: Sequence[Case],
    results: Sequence[CaseResult],
) -> None:
    """Write the results; called after every case, so that an interrupted run keeps them."""
    place = {str(case): number for number, case in enumerate(cases)}
    ordered = sorted(results, key=lambda result: place[result.case])
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(ordered, settings))
    if arguments.json:
        report.write(arguments.json, ordered, settings)


def _finish(
    arguments: argparse.Namespace, settings: ChaosSettings, results: Sequence[CaseResult]
) -> int:
    failed = [result for result in results if not result.good]
    missing = report.unreached(results) if arguments.table else []
    print(f"{len(results)} cases, {len(failed)} failed")
    if missing:
        print(f"never reached: {', '.join(missing)}")
    if not failed:
        shutil.rmtree(settings.folder, ignore_errors=True)
    return 1 if failed or missing else 0
