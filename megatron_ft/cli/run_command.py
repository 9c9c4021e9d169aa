"""The command line of ``megatron-ft run`` as a value: how the demo, chaos cases and benchmarks
describe the jobs that they start."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

from megatron_ft.cli import run
from megatron_ft.cli.parser import CommandParser
from megatron_ft.cli.run_place import virtual_nodes
from megatron_ft.cli.training_command import settle
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.job_state import state_folder
from megatron_ft.supervisor.spec import JobSpec

PROGRAM = (sys.executable, "-m", "megatron_ft")
_WIDTH = 100


@dataclass(frozen=True)
class RunCommand:
    """``megatron-ft run FLAGS -- TRAINING``, on virtual nodes.

    ``flags`` map names to values; ``--job``, ``--state-dir`` and ``--log-dir`` are always there.
    ``variables`` are added to the environment, from which every other MEGATRON_FT_* is taken.
    ``program`` are the words that stand for ``megatron-ft``.
    """

    flags: Mapping[str, object]
    training: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = PROGRAM

    @property
    def words(self) -> list[str]:
        given = ((name, str(value)) for name, value in self.flags.items())
        return [*self.program, "run", *chain.from_iterable(given), "--", *self.training]

    def environment(self) -> dict[str, str]:
        """The environment of the process, which all others of the job inherit."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_FT_")}
        return {**kept, **self.variables}

    def shell(self) -> str:
        """The same for a shell, folded."""
        lines = [""]
        given = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        for word in [*given, *map(shlex.quote, self.words)]:
            if len(lines[-1]) + len(word) > _WIDTH:
                lines.append("   ")
            lines[-1] += f" {word}"
        return " \\\n".join(lines)

    @cached_property
    def _arguments(self) -> argparse.Namespace:
        parser = CommandParser(prog="megatron-ft run")
        run.add_arguments(parser)
        arguments: argparse.Namespace = parser.parse_args(self.words[len(self.program) + 1 :])
        return arguments

    @cached_property
    def spec(self) -> JobSpec:
        """The job as ``run`` understands it; ConfigError or ProtectionError as it refuses it."""
        settings = settle(vars(self._arguments), self.training, self.environment())
        nodes, names = virtual_nodes(self._arguments)
        return run.spec_from(self._arguments, self.training, settings, nodes, names)

    @property
    def node_names(self) -> list[str]:
        return virtual_nodes(self._arguments)[1]

    @property
    def notes(self) -> Path:
        """The supervisor's folder."""
        return state_folder(self._arguments.job, self._arguments.state_dir)

    def cluster(self) -> VirtualCluster:
        """The nodes; any process that makes this can lose them."""
        root = self.spec.settings.arena_dir
        return VirtualCluster(self._arguments.job, self.node_names, root)
