"""Examines every node: starts probes through a Launcher and reads their answers."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_ft.checkpoint.export_drained import held_by_other
from megatron_ft.cli.doctor import as_trainer
from megatron_ft.cli.doctor.facts import (
    AskedJob,
    Facts,
    NodeFacts,
    ProbeRequest,
    TrainerFacts,
    WorldFacts,
    answers,
    last_words,
)
from megatron_ft.cli.doctor.trial_world import TrialWorlds
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.launchers import container
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.launchers.slurm.allocation import grace_lost, no_kill
from megatron_ft.supervisor.health import Vote, ask_node

PROBE_SECONDS = 120.0
T = TypeVar("T")


class Examination:
    """Asks all nodes of a job; logs and files of its own are named by the token.

    What precedes the training command's Python is kept around the probe that stands for a
    trainer.  ``folder`` must be seen by all nodes.
    """

    def __init__(
        self, launcher: Launcher, job: AskedJob, folder: Path, request: ProbeRequest
    ) -> None:
        self._launcher, self._job, self._folder, self._request = launcher, job, folder, request

    async def run(self) -> Facts:
        """All facts.  A node that does not answer has the reason in its place."""
        nodes, token = self._job.nodes, self._request.token
        with token_in(self._request.folders, token):
            probed = await asyncio.gather(*(self._probe(node) for node in nodes))
            seen = {
                folder: tuple(n for n in nodes if Path(folder, f"{token}.{n}").exists())
                for folder in self._request.folders
            }
        trainers = await asyncio.gather(*(self._as_trainer(node) for node in nodes))
        exports = self._job.settings.drain_export_dir
        answered = [n for n, said in zip(nodes, probed, strict=True) if isinstance(said, NodeFacts)]
        return Facts(
            job=self._job,
            nodes=dict(zip(nodes, probed, strict=True)),
            trainers=dict(zip(nodes, trainers, strict=True)),
            world=await self._world(answered),
            seen_here=seen,
            no_kill=await asyncio.to_thread(no_kill),
            grace_lost=await asyncio.to_thread(grace_lost),
            exporter=held_by_other(exports, self._job.noted) if exports else "",
            votes=await self._votes(answered),
        )

    async def _votes(self, nodes: Sequence[str]) -> dict[str, Vote]:
        """Votes of the health command, run at the same time everywhere; {} without one."""
        command, seconds = self._job.spec.health_command, self._job.spec.health_seconds
        voters = nodes if command else ()
        asked = (
            ask_node(self._launcher, node, command, seconds, self._folder / f"health-{node}.log")
            for node in voters
        )
        return dict(zip(voters, await asyncio.gather(*asked), strict=True))

    async def _world(self, nodes: Sequence[str]) -> WorldFacts | None:
        if not self._job.scheme.parity_members or not nodes:
            return None
        wish, token = self._job.settings.transport, self._request.token
        return await TrialWorlds(self._launcher, self._folder, token, wish).examine(nodes)

    async def _probe(self, node: str) -> NodeFacts | str:
        argv = [sys.executable, "-m", "megatron_ft.cli.doctor.probe"]
        request = msgspec.json.encode(self._request)
        return await self._ask(node, argv, f"probe-{node}.log", NodeFacts, request)

    async def _as_trainer(self, node: str) -> TrainerFacts | str:
        source = Path(as_trainer.__file__).read_text()
        wrapped = container.python_of(self._job.spec.command) or [sys.executable]
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


@contextmanager
def token_in(folders: Sequence[str], token: str) -> Iterator[None]:
    """A file in each folder while the block runs, which every node has to find there."""
    for folder in map(Path, folders):
        with suppress(OSError):  # the nodes meet the same error, and report it
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
    try:
        yield
    finally:
        for folder in map(Path, folders):
            _clear(folder, token)


def _clear(folder: Path, token: str) -> None:
    """Remove what begins with the token, also what a probe that was killed has left."""
    for path in folder.glob(f"{token}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()
