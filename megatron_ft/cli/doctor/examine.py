"""Examines every node: starts probes through a Launcher and reads their answers.

Also finds out whether the Slurm job that we are in survives the loss of a node.  Slurm does not
show it; what can be seen is the batch script, and how it was submitted.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_ft.checkpoint.export_drained import held_by_other
from megatron_ft.cli.doctor import as_trainer
from megatron_ft.cli.doctor.facts import (
    Clock,
    ExportFolder,
    Facts,
    NodeFacts,
    ProbeRequest,
    TrainerFacts,
    Wishes,
    WorldFacts,
    answers,
    last_words,
)
from megatron_ft.cli.doctor.pairs import Worlds
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers import container
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.slurm.allocation import ask

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
    """Do as ``no_kill``, from the batch script, the line that submitted it, and variables.  Pure.

    A command line beats variables, which beat the script, as sbatch(1) says.
    """
    lines = re.findall(r"^#SBATCH\s+(.*)$", script or "", re.MULTILINE)
    variables = [environment.get(name) for name in ("SBATCH_NO_KILL", "SALLOC_NO_KILL")]
    given = [
        # Words that follow the script's name are the script's own.
        _in_line(submit_line or ""),
        *(value != "off" for value in variables if value is not None),
        *(_in_line(line) for line in reversed(lines)),
    ]
    found = next((value for value in given if value is not None), None)
    if found and submit_line is None:
        return IN_SCRIPT
    if found is None and submit_line is None:
        return UNKNOWN
    return SET if found else MISSING


def _in_line(line: str) -> bool | None:
    matches = list(_FLAG.finditer(line))
    return None if not matches else matches[-1].group("value") != "off"


def warning(found: str | None) -> str:
    """A line for the start of a job that the loss of a node may kill, "" for others.  Pure."""
    if found in (None, SET, IN_SCRIPT):
        return ""
    how = "is not set" if found == MISSING else "is not in the batch script"
    return (
        f"megatron-ft: warning: --no-kill {how}: without it Slurm kills the whole job, and its "
        "memory, when a node is lost; put `#SBATCH --no-kill` into the batch script"
    )


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
            drain_token(drain, self._request.token),
            export_folders(self._wishes, self._request.token) as exports,
        ):
            probed = await asyncio.gather(*(self._probe(node) for node in nodes))
            seen = tokens_seen(drain, self._request.token, nodes)
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
        command, mark = container.pass_environment(argv, environment)
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


def clock_between(asked: float, began: float, ended: float, answered: float) -> Clock:
    """Lead of a clock that showed ``began`` and ``ended`` between two times of ours.  Pure.

    It began after it was asked and ended before the answer was here, so its error is at least
    ``ended - answered`` and at most ``began - asked``.
    """
    return Clock(ended - answered, began - asked)


@contextmanager
def drain_token(folder: Path | None, token: str) -> Iterator[None]:
    """A file in the drain folder while the block runs, which every node has to find there."""
    if folder is None:
        yield
        return
    with suppress(OSError):  # the nodes meet the same error, and report it
        folder.mkdir(parents=True, exist_ok=True)
        (folder / token).write_text(token)
    try:
        yield
    finally:
        _clear(folder, token)


def tokens_seen(folder: Path | None, token: str, nodes: Sequence[str]) -> dict[str, str]:
    """Contents, as read here, of each node's own file in the drain folder."""
    files = {node: folder / f"{token}.{node}" for node in nodes} if folder else {}
    return {node: path.read_text() for node, path in files.items() if path.exists()}


@contextmanager
def export_folders(wishes: Wishes, token: str) -> Iterator[tuple[ExportFolder, ...]]:
    """All folders of exports as they are here; a locked file lies in each while the block runs.

    It is named ``token`` and has that in it.  A job keeps others from its exports by a lock, which
    the supervisor takes and each writer on a node shares; so a lock is taken here, on a file of the
    doctor's own, and looked at from every node.
    """
    with ExitStack() as held:
        yield tuple(
            ExportFolder(
                flag,
                folder,
                held_by_other(Path(folder), wishes.job),
                held.enter_context(_locked(Path(folder) / f"{token}.lock", token)),
            )
            for flag, folder in wishes.exports.items()
        )


@contextmanager
def _locked(path: Path, token: str) -> Iterator[str]:
    """Keep a locked file there meanwhile; gives the reason why it could not be locked, or ""."""
    problem = ""
    with ExitStack() as held:
        held.callback(_clear, path.parent, token)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("w"))
            file.write(token)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # Two flags name one folder.
        except OSError as error:
            problem = error.strerror or str(error)
        yield problem


def _clear(folder: Path, token: str) -> None:
    """Remove what begins with the token, also what a probe that was killed has left."""
    for path in folder.glob(f"{token}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()
