"""Ask every node: the thin shell that starts probes through a Launcher and reads their answers.

Whether the Slurm job that we are in survives the loss of a node.

Slurm does not tell: what can be seen is the batch script, and how it was submitted.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_ft.cli.doctor import as_trainer
from megatron_ft.cli.doctor.export_folders import export_folders
from megatron_ft.cli.doctor.facts import (
    Clock,
    Facts,
    NodeFacts,
    ProbeRequest,
    TrainerFacts,
    Wishes,
    WorldFacts,
    answers,
    last_words,
)
from megatron_ft.cli.doctor.worlds import Worlds
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.launchers.outer_launcher import base_environment
from megatron_ft.launchers.slurm.allocation import ask
from megatron_ft.supervisor import container

SET, IN_SCRIPT, MISSING, UNKNOWN = "set", "in the script", "missing", "unknown"
_FLAG = re.compile(r"(?:^|\s)(?:--no-kill(?:=(?P<value>\S+))?|-k)(?=\s|$)")


def no_kill(environment: Mapping[str, str] = os.environ) -> str | None:
    """SET, IN_SCRIPT, MISSING or UNKNOWN; None outside of a Slurm job.

    IN_SCRIPT where the batch script has it, and the command line, which may overrule the script,
    cannot be seen: 22.05 shows it to nobody.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    script = ask("scontrol", "write", "batch_script", job, "-")
    shown = ask("scontrol", "show", "job", "--oneliner", job) or ""
    submitted = re.search(r"SubmitLine=(.*?)(?:\s\w+=|$)", shown)
    return judge_no_kill(script, submitted.group(1) if submitted else None, environment)


def judge_no_kill(
    script: str | None, submit_line: str | None, environment: Mapping[str, str]
) -> str:
    """As ``no_kill``, from the batch script, the line that submitted it, and variables.  Pure.

    A command line beats variables, which beat the script, as sbatch(1) says.
    """
    given = [
        _in_line(submit_line or ""),
        _in_variables(environment),
        _in_script(script or ""),
    ]
    found = next((value for value in given if value is not None), None)
    if found and submit_line is None:
        return IN_SCRIPT
    if found is not None:
        return SET if found else MISSING
    return UNKNOWN if submit_line is None else MISSING


def warning(found: str | None) -> str:
    """A line for the start of a job that the loss of a node may kill, "" for others.  Pure."""
    if found in (None, SET, IN_SCRIPT):
        return ""
    how = "is not set" if found == MISSING else "is not in the batch script"
    return (
        f"megatron-ft: warning: --no-kill {how}: without it Slurm kills the whole job, and its "
        "memory, when a node is lost; put `#SBATCH --no-kill` into the batch script"
    )


def _in_line(line: str) -> bool | None:
    # What follows the script's name is the script's own.
    matches = list(_FLAG.finditer(line))
    return None if not matches else matches[-1].group("value") != "off"


def _in_variables(environment: Mapping[str, str]) -> bool | None:
    for name in ("SBATCH_NO_KILL", "SALLOC_NO_KILL"):
        if name in environment:
            return environment[name] != "off"
    return None


def _in_script(script: str) -> bool | None:
    lines = re.findall(r"^#SBATCH\s+(.*)$", script, re.MULTILINE)
    return next((v for v in map(_in_line, reversed(lines)) if v is not None), None)


PROBE_SECONDS = 120.0
T = TypeVar("T")


class Examination:
    """Asks all nodes of a job's wishes; logs and files of its own are named by ``token``.

    ``command`` is the training command: what precedes its Python is kept around the probe
    that stands for a trainer.  ``folder`` must be seen by all nodes.
    """

    def __init__(
        self,
        launcher: Launcher,
        wishes: Wishes,
        command: Sequence[str],
        folder: Path,
        request: ProbeRequest,
    ) -> None:
        self._launcher, self._wishes, self._folder = launcher, wishes, folder
        self._request, self._command = request, command

    async def run(self) -> Facts:
        """All facts.  What a node does not answer is said in its place."""
        nodes = self._wishes.nodes
        drain = Path(self._wishes.drain_dir) if self._wishes.drain_dir else None
        with (
            DrainToken(drain, self._request.token) as tokens,
            export_folders(self._wishes, self._request.token) as exports,
        ):
            probed = await asyncio.gather(*(self._probe(node) for node in nodes))
            seen = tokens.seen(nodes)
        trainers = await asyncio.gather(*(self._as_trainer(node) for node in nodes))
        facts = {n: said for n, (said, _) in zip(nodes, probed, strict=True)}
        found = Facts(
            wishes=self._wishes,
            nodes=facts,
            trainers=dict(zip(nodes, trainers, strict=True)),
            clocks={n: clock for n, (_, clock) in zip(nodes, probed, strict=True) if clock},
            drain_tokens=seen,
            no_kill=await asyncio.to_thread(no_kill),
            exports=exports,
        )
        return msgspec.structs.replace(found, world=await self._world(found))

    async def _world(self, facts: Facts) -> WorldFacts | None:
        if not self._wishes.scheme.parity_members or not facts.answered:
            return None
        worlds = Worlds(self._launcher, self._folder, self._request.token, self._wishes.transport)
        return await worlds.examine(list(facts.answered), facts.one_machine)

    async def _probe(self, node: str) -> tuple[NodeFacts | str, Clock | None]:
        asked = time.time()
        argv = [sys.executable, "-m", "megatron_ft.cli.doctor.probe"]
        request = msgspec.json.encode(self._request)
        said = await self._ask(node, argv, f"probe-{node}.log", NodeFacts, request)
        if isinstance(said, str):
            return said, None
        return said, clock_between(asked, said.began, said.ended, time.time())

    async def _as_trainer(self, node: str) -> TrainerFacts | str:
        source = Path(as_trainer.__file__).read_text()
        wrapped = container.python_of(self._command) or [sys.executable]
        argv = [*wrapped, "-c", source, self._request.token]
        return await self._ask(node, argv, f"trainer-{node}.log", TrainerFacts)

    async def _ask(
        self, node: str, argv: Sequence[str], name: str, kind: type[T], stdin: bytes | None = None
    ) -> T | str:
        """The answer of one process on a node, or why there is none."""
        log, environment = self._folder / name, {**base_environment(), "OMP_NUM_THREADS": "1"}
        command, mark = container.told(argv, environment)
        if mark:
            environment[TREE] = mark
        try:
            handle = self._launcher.start(node, command, environment, log, stdin)
        except MegatronFTError as error:
            return str(error)
        try:
            status = await asyncio.wait_for(handle.wait(), PROBE_SECONDS)
        except asyncio.TimeoutError:
            return f"no answer within {PROBE_SECONDS:.0f} s: {last_words(log)}"
        finally:
            handle.kill()
        said = list(answers(log, kind))
        return said[-1] if said else f"ended with status {status}: {last_words(log)}"


class DrainToken:
    """A file in the drain folder that every node has to find there, and the nodes' answers."""

    def __init__(self, folder: Path | None, token: str) -> None:
        self._folder, self._token = folder, token

    def __enter__(self) -> DrainToken:
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / self._token).write_text(self._token)
            except OSError:
                pass  # The nodes find out in the same way, and say so.
        return self

    def seen(self, nodes: Sequence[str]) -> dict[str, str]:
        """What each node's own file holds here."""
        if self._folder is None:
            return {}
        files = {node: self._folder / f"{self._token}.{node}" for node in nodes}
        return {node: path.read_text() for node, path in files.items() if path.exists()}

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            for path in self._folder.glob(f"{self._token}*"):
                if path.is_dir():
                    # Of a probe that did not come to its end.
                    shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):
                    path.unlink()


def clock_between(asked: float, began: float, ended: float, answered: float) -> Clock:
    """By how much a clock is ahead that said ``began`` and ``ended`` between two of ours.  Pure.

    It began after it was asked and ended before the answer was here, so its error is at least
    ``ended - answered`` and at most ``began - asked``.
    """
    return Clock(ended - answered, began - asked)
