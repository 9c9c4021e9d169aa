"""Entry point of ``megatron-ft``: finds the subcommand, loads only its module, runs it.

A subcommand's module offers ``add_arguments(parser)`` and ``main(arguments) -> exit code``.
Its docstring is its description; an optional ``EXIT_CODES`` mapping adds to the common ones.
``arguments.command`` holds the name that the user typed, for modules that serve two names.
A parser's default ``job_of(arguments) -> name`` chooses the job that is meant without ``--job``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from megatron_ft import __version__
from megatron_ft.cli.common import discard_output, flush_output, show_any_text
from megatron_ft.cli.parser import HELP_ALL, CommandParser, suggestion
from megatron_ft.core.errors import ConfigError, MegatronFTError, MissingEnvironmentError


class Command(NamedTuple):
    """One row of the table of subcommands."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("init", "megatron_ft.cli.init", "write batch scripts, configurations and examples"),
    Command("run", "megatron_ft.cli.run", "run a training command under protection"),
    Command("doctor", "megatron_ft.cli.doctor.command", "say before training what would go wrong"),
    Command("config", "megatron_ft.cli.config", "show settings and where they were given"),
    Command("plan", "megatron_ft.cli.plan.command", "forecast memory, traffic, survival and ETTR"),
    Command("status", "megatron_ft.cli.status", "show what is protected and what is exposed"),
    Command("top", "megatron_ft.cli.top", "show a whole job on one screen, live"),
    Command("ledger", "megatron_ft.cli.ledger", "show where the time of a job went"),
    Command("report", "megatron_ft.cli.report.command", "write an HTML page about a job"),
    Command("autopsy", "megatron_ft.cli.autopsy", "show who stopped first in a failure, and why"),
    Command("pause", "megatron_ft.cli.pause", "stop taking snapshots until resume"),
    Command("resume", "megatron_ft.cli.pause", "take snapshots again"),
    Command("drain", "megatron_ft.cli.drain", "write a snapshot from memory to disk now"),
    Command("verify", "megatron_ft.cli.verify", "check every byte of what is on disk or in memory"),
    Command("evacuate", "megatron_ft.cli.evacuate", "move the ranks of a node to a spare"),
    Command("rewind", "megatron_ft.cli.rewind", "resume from before an iteration"),
    Command("export", "megatron_ft.cli.export", "make the framework's own checkpoint"),
    Command("cat", "megatron_ft.cli.cat", "show one tensor of the unsharded model"),
    Command(
        "demo", "megatron_ft.cli.demo.command", "lose a node on this machine and resume from memory"
    ),
    Command(
        "chaos", "megatron_ft.cli.chaos.command", "inject faults at named points and judge the job"
    ),
    Command("completion", "megatron_ft.cli.completion", "print the completion for bash or zsh"),
    Command("clean", "megatron_ft.cli.clean", "remove the memory of jobs that no longer run"),
)

EXIT_CODES: Mapping[int, str] = {
    0: "success",
    2: "bad arguments or settings, or something needed is missing; the message says what",
    130: "interrupted by Ctrl-C",
}

# Packages that are never installed along with this one, and how a user gets them.
_HOW_TO_GET = {
    "torch": "install the torch build for your hardware; megatron-ft never does, so as not to "
    "replace the one you have",
    "megatron": "install Megatron, or on Python >= 3.12: pip install 'megatron-ft[megatron]'",
    "deepspeed": "pip install 'megatron-ft[deepspeed]'",
    "shtab": "pip install 'megatron-ft[completion]'",
    "mpi4py": "build mpi4py against your cluster's MPI, or: pip install 'megatron-ft[mpi]'",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``megatron-ft`` with ``argv`` (default: the process's) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_any_text()
    try:
        code = _dispatch(arguments)
        flush_output()
        return code
    except MegatronFTError as error:
        print(f"megatron-ft: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter must not fail on its last flush too.
        discard_output()
        return 128 + 13
    except OSError as error:
        # Of a file or folder that the user named; of anything else it is a mistake of ours.
        if error.filename is None:
            raise
        print(f"megatron-ft: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _dispatch(argv: list[str]) -> int:
    command = next((c for c in COMMANDS if argv[:1] == [c.name]), None)
    if command is None and argv and not argv[0].startswith("-"):
        near = suggestion(argv[0], [c.name for c in COMMANDS])
        raise ConfigError(f"there is no command {argv[0]!r}{near or '; see `megatron-ft --help`'}")
    if command is None:
        # Prints help or version and leaves, or refuses what is not a subcommand.
        _overview_parser().parse_args(argv)
        raise AssertionError("the table of subcommands and the parser disagree")
    try:
        module = import_module(command.module)
        return _run(command, module, argv[1:])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _HOW_TO_GET:
            raise
        raise MissingEnvironmentError(
            f"`megatron-ft {command.name}` needs {package}, which this Python "
            f"({sys.executable}) does not have: {_HOW_TO_GET[package]}"
        ) from error


def _run(command: Command, module: ModuleType, argv: list[str]) -> int:
    parser = CommandParser(
        prog=f"megatron-ft {command.name}",
        description=module.__doc__,
        epilog=_exit_code_text({**EXIT_CODES, **getattr(module, "EXIT_CODES", {})}),
        everything=HELP_ALL in argv,
    )
    module.add_arguments(parser)
    parser.set_defaults(command=command.name)
    arguments = parser.parse_args(argv)
    if "job_of" in arguments and arguments.job is None:
        arguments.job = arguments.job_of(arguments)
    return int(module.main(arguments))


def _overview_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ft",
        description="In-memory fault tolerance for LLM pretraining.",
        epilog="`megatron-ft <command> --help` describes one command.\n\n"
        + _exit_code_text(EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-ft {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help)
    return parser


def _exit_code_text(codes: Mapping[int, str]) -> str:
    return "exit codes:\n" + "\n".join(f"  {code:<4} {codes[code]}" for code in sorted(codes))


if __name__ == "__main__":
    sys.exit(main())
