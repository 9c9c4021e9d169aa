"""Train a small GPT with Megatron-LM or DeepSpeed, break it, and compare with an unbroken run.

  megatron-ft demo
  megatron-ft demo --tp 2 --pp 2 --seed 7 --plot loss.png --json report.json
  megatron-ft demo --protect rs:2+2 --lose 2
  megatron-ft demo --framework megatron-lm --megatron-lm-path ~/Megatron-LM
  megatron-ft demo --framework deepspeed --zero 3

Four virtual nodes on this machine train, with one in reserve.  A trainer is killed in the
middle of an iteration, later a whole node with its memory is lost, then the trainer and the
encoder of a node die at once.  Training resumes from memory each time.  Then the same training
runs again uninterrupted, and losses, weights, optimizer state, random states and the order of
the data are compared bit by bit.  Needs no GPU.  With --framework megatron-lm a checkout's own
pretrain_gpt.py trains, unedited; with --framework deepspeed a plain DeepSpeed script, for which
one key in its JSON is all that it takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.core.errors import ConfigError, MissingEnvironmentError

if TYPE_CHECKING:
    from megatron_ft.cli.demo.report import DemoReport
    from megatron_ft.cli.demo.run import Demo
    from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings

EXIT_CODES: Mapping[int, str] = {
    0: "everything is identical",
    1: "the runs differ, or not every fault could strike",
    10: "refused: more was lost at once than the protection covers",
    11: "stopped: a node is lost and no spare is left",
    12: "stopped: the same failure three times without progress",
}

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``megatron-ft demo``."""
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (%(default)s)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size (%(default)s)")
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="ZeRO stage, with --framework deepspeed (default: 3, with --pp 1)",
    )
    parser.add_argument("--nodes", type=int, default=4, help="nodes that train (%(default)s)")
    parser.add_argument("--spares", type=int, help="nodes in reserve (default: what --lose takes)")
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, help="trainers a node (%(default)s)"
    )
    parser.add_argument(
        "--protect", default="rs:3+1", help="xor:N, rs:K+M or replica:R (default: %(default)s)"
    )
    parser.add_argument(
        "--lose",
        type=int,
        default=1,
        help="nodes lost at once; more than the protection covers shows how the job refuses to go "
        "on (default: %(default)s)",
    )
    parser.add_argument(
        "--framework",
        choices=("megatron-core", "megatron-lm", "deepspeed"),
        default="megatron-core",
        help="what trains: a program of this package on the installed megatron-core, the stock "
        "pretrain_gpt.py of a checkout of Megatron-LM, or examples/deepspeed_gpt.py "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--megatron-lm-path",
        type=Path,
        metavar="DIR",
        help="that checkout (default: the environment variable MEGATRON_LM_PATH)",
    )
    parser.add_argument("--iterations", type=int, default=40, help="length (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="who is hit, and when (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both losses there")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="new folder for logs, traces and final states (default: a temporary one, without "
        "the large files)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; see EXIT_CODES."""
    from megatron_ft.cli.demo.report import show
    from megatron_ft.cli.demo.run import Demo
    from megatron_ft.cli.demo.screen import Screen, make_console

    settings = settings_from(arguments)
    _check_outputs(arguments)
    folders = make_folders(arguments.keep)
    console = make_console()
    demo = Demo(settings, folders, Screen(console))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = demo.run()
    except KeyboardInterrupt:
        console.print("interrupted: every process is ended and the memory is free again")
        if arguments.keep is None:
            shutil.rmtree(folders.root, ignore_errors=True)
        return _INTERRUPTED
    except Exception:
        console.print(f"the demo could not be carried through; logs are in {folders.logs}")
        raise
    show(report, console)
    _write(demo, report, arguments)
    console.print(_where(folders, report, arguments), soft_wrap=True)
    if arguments.keep is None:
        _remove_large_files(folders)
    return report.exit_code


def settings_from(arguments: argparse.Namespace) -> DemoSettings:
    """The demo that the flags describe; ConfigError or ProtectionError if it makes no sense."""
    from megatron_ft.cli.demo import frameworks
    from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings, job_of

    settings = DemoSettings(
        framework=frameworks.from_arguments(arguments),
        nodes=arguments.nodes,
        spares=max(1, arguments.lose) if arguments.spares is None else arguments.spares,
        ranks_per_node=arguments.ranks_per_node,
        protect=arguments.protect,
        iterations=arguments.iterations,
        seed=arguments.seed,
        lose=arguments.lose,
    )
    # What the job would refuse is refused here, before anything is written.
    job_of(settings, DemoFolders(Path()), Path(), "demo").spec()
    return settings


def make_folders(keep: Path | None) -> DemoFolders:
    """The demo's folders; ConfigError if ``keep`` holds something already."""
    from megatron_ft.cli.demo.settings import DemoFolders

    if keep is None:
        return DemoFolders(Path(tempfile.mkdtemp(prefix="megatron-ft-demo-")))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep {keep} is not empty; give a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    return DemoFolders(keep.resolve())


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Complain now about what could not be written in a few minutes."""
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.resolve().parent}")
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise MissingEnvironmentError("--plot needs matplotlib: pip install 'megatron-ft[demo]'")


def _write(demo: Demo, report: DemoReport, arguments: argparse.Namespace) -> None:
    """The report and the picture, where the user wants them or beside the logs."""
    text = json.dumps(report.as_json(), indent=1)
    for path in {demo.folders.root / "report.json", arguments.json} - {None}:
        path.write_text(text + "\n")
    if find_spec("matplotlib") is None:
        return
    from megatron_ft.cli.demo.plot import draw, headline

    ours, oracle = (demo.traces(f) for f in (demo.folders.protected, demo.folders.oracle))
    path, last = _plot_path(demo.folders, arguments), demo.settings.iterations
    draw(path, headline(report), ours, oracle, report.recoveries, last)


def _plot_path(folders: DemoFolders, arguments: argparse.Namespace) -> Path:
    given: Path | None = arguments.plot
    return folders.root / "loss.png" if given is None else given


def _where(folders: DemoFolders, report: DemoReport, arguments: argparse.Namespace) -> str:
    plot = _plot_path(folders, arguments)
    picture = f"picture: {plot}   " if plot.exists() else ""
    return f"{picture}logs and traces: {folders.root}   ({report.seconds:.0f} s in all)"


def _remove_large_files(folders: DemoFolders) -> None:
    shutil.rmtree(folders.corpus, ignore_errors=True)
    for trace in (folders.protected, folders.oracle):
        for path in trace.glob("final-rank*.pt"):
            path.unlink()
