"""Train a small GPT with Megatron-LM, break it, and compare with an unbroken run.

  megatron-ft demo
  megatron-ft demo --tp 2 --pp 2 --seed 7 --json report.json
  megatron-ft demo --protect rs:2+2 --lose 2
  megatron-ft demo --tp 2 --reshape tp=1,dp=3
  megatron-ft demo --corrupt

Four virtual nodes on this machine train, with one in reserve.  A trainer is killed in the
middle of an iteration, later a whole node with its memory is lost, then the trainer and the
encoder of a node die at once.  Training resumes from memory each time.  Then the same training
runs again uninterrupted, and losses, weights, optimizer state, random states and the order of
the data are compared bit by bit.  Needs no GPU.

The job is a `megatron-ft run` command, which is printed; faults come from outside.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.cli.common import say
from megatron_ft.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ft.cli.demo.settings import DemoSettings

EXIT_CODES: Mapping[int, str] = {
    0: "everything is identical",
    1: "the runs differ, or not every fault could strike",
    10: "refused: more was lost at once than the protection covers",
    11: "stopped: a node is lost and no spare is left",
    12: "stopped: the same failure three times without progress",
}

_INTERRUPTED = 130


_NUMBERS = (
    ("--tp", 1, "tensor parallel size"),
    ("--pp", 1, "pipeline parallel size"),
    ("--nodes", 4, "nodes that train"),
    ("--ranks-per-node", 1, "trainers a node"),
    ("--iterations", 80, "length"),
    ("--seed", 0, "who is hit, and when"),
    (
        "--lose",
        1,
        "nodes lost at once; more than the protection covers shows how the job refuses to continue",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default, text in _NUMBERS:
        shown = f"{text} (default: %(default)s)"
        parser.add_argument(flag, type=int, default=default, help=shown)
    parser.add_argument("--spares", type=int, help="nodes in reserve (default: what --lose takes)")
    parser.add_argument(
        "--protect", default="rs:3+1", help="xor:N, rs:K+M or replica:R (default: %(default)s)"
    )
    parser.add_argument(
        "--reshape",
        metavar="LAYOUT",
        help="after the faults, stop the job, lose nodes, and start it again with other sizes of "
        "parallelism, as tp=1,dp=3; those that are not named stay",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="instead of the three faults: a bit of a live weight is wrong on one node, silently",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")


def main(arguments: argparse.Namespace) -> int:
    from megatron_ft.cli.demo.report import show
    from megatron_ft.cli.demo.run import Demo
    from megatron_ft.cli.demo.settings import DemoFolders

    settings = settings_from(arguments)
    report_path: Path | None = arguments.json
    # Complain now about what could not be written in a few minutes.
    if report_path is not None and not report_path.resolve().parent.is_dir():
        raise ConfigError(f"--json {report_path}: there is no folder {report_path.parent}")
    folders = DemoFolders(Path(tempfile.mkdtemp(prefix="megatron-ft-demo-")))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = Demo(settings, folders).run()
    except KeyboardInterrupt:
        say("interrupted: every process is ended and the memory is free again")
        shutil.rmtree(folders.root, ignore_errors=True)
        return _INTERRUPTED
    except Exception:
        say(f"the demo could not be carried through; logs are in {folders.logs}")
        raise
    show(report)
    if report_path is not None:
        report_path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if report.exit_code == 0:
        # The printed command reads the text.
        for path in set(folders.root.iterdir()) - {folders.report, folders.corpus}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        say(f"the job's time, recoveries and events: {folders.report}")
    else:
        say(f"logs, traces and report.html: {folders.root}")
    return report.exit_code


def settings_from(arguments: argparse.Namespace) -> DemoSettings:
    """The demo that the flags describe; ConfigError or ProtectionError if it makes no sense."""
    from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings, job_of, read_layout

    text: str | None = arguments.reshape
    given = {field.name: getattr(arguments, field.name) for field in fields(DemoSettings)}
    if arguments.spares is None:
        given["spares"] = max(1, arguments.lose)
    settings = DemoSettings(**{**given, "reshape": None})
    if text is not None:
        settings = replace(settings, reshape=read_layout(text, settings))
    # What the job would refuse is refused here, before anything is written.
    _ = job_of(settings, DemoFolders(Path()), Path(), "demo").spec
    return settings
