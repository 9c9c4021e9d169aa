"""Warm spares: they import once what trainers will, so that its files are in memory by then.

Measured on a local disk: with an empty page cache torch took 2.2 and 2.5 s to import, with its
files read before 1.6 and 1.5 s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from megatron_ft.config import json_section
from megatron_ft.config.flags import read_command
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers import container
from megatron_ft.launchers.launcher import Launcher, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.supervisor.spec import JobSpec

AUTO, NONE = "auto", "none"
_ALWAYS = ("torch", "torch.distributed", "torch.nn.parallel", "megatron_ft.trainer.manager")
_MEGATRON = ("megatron.training.training", "megatron_ft.megatron.hooks")
_DEEPSPEED = ("deepspeed", "deepspeed_ext.hooks")

# One that is missing, or needs a device, leaves the others; its log is looked at by nobody else.
_SOURCE = """
import importlib, os, sys
os.nice(19)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.stderr)
"""


def modules_of(wanted: str, command: Sequence[str]) -> tuple[str, ...]:
    """The modules that the setting ``spare_imports`` stands for with this training command."""
    if wanted == NONE:
        return ()
    if wanted != AUTO:
        return tuple(name.strip() for name in wanted.split(",") if name.strip())
    section = json_section.read_command(command)
    megatron = _MEGATRON if read_command(command).enabled else ()
    deepspeed = _DEEPSPEED if section is not None and section.enabled else ()
    return (*_ALWAYS, *megatron, *deepspeed)


class WarmSpares:
    """Has each spare of a job import the spec's ``warm_modules`` once."""

    def __init__(self, launcher: Launcher, spec: JobSpec) -> None:
        self._launcher, self._spec = launcher, spec
        self._begun: dict[str, ProcessHandle | None] = {}

    def begin(self, nodes: Iterable[str]) -> None:
        """Start with those that have not begun; one that cannot be reached stays cold."""
        for node in nodes if self._spec.warm_modules else ():
            if node not in self._begun:
                self._begun[node] = self._start(node)

    def end(self) -> None:
        """End what still imports."""
        for handle in self.handles():
            handle.kill()

    def handles(self) -> list[ProcessHandle]:
        """Processes that were started, also those that have ended."""
        return [handle for handle in self._begun.values() if handle is not None]

    def _start(self, node: str) -> ProcessHandle | None:
        python = container.python_of(self._spec.command) or [sys.executable]
        environment = {
            **base_environment(),
            **self._spec.trainer_environment,
            "CUDA_VISIBLE_DEVICES": "",
        }
        argv = [*python, "-c", _SOURCE, *self._spec.warm_modules]
        command, mark = container.pass_environment(argv, environment)
        if mark:
            environment[TREE] = mark
        try:
            log = self._spec.log_dir / f"spare-{node}.log"
            return self._launcher.start(node, command, environment, log)
        except MegatronFTError:
            return None
