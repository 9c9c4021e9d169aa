"""Print the completion of ``megatron-ft`` for a shell.

  megatron-ft completion bash > ~/.local/share/bash-completion/completions/megatron-ft
  megatron-ft completion zsh > ~/.zfunc/_megatron-ft

The folder for zsh is one of its $fpath.  Write the file again after an upgrade.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from megatron_ft.cli.main import COMMANDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def main(arguments: argparse.Namespace) -> int:
    import shtab

    parser = argparse.ArgumentParser(prog="megatron-ft")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.help)
        import_module(command.module).add_arguments(one)
        for action in one._actions:
            if action.type is Path or action.nargs == argparse.REMAINDER:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0
