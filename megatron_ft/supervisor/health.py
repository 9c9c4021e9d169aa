"""Health of nodes: finds the nodes that get no ranks at the next start while spares are free.

The user's command votes on every node before each start, and two failures in a row that name one
node are a vote against it, or one that proves it at fault.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ft.core.background import started_low
from megatron_ft.core.environment import TREE
from megatron_ft.core.errors import ConfigError, ControlPlaneError
from megatron_ft.core.process_tools import last_word
from megatron_ft.launchers import bounded_command
from megatron_ft.launchers.launcher import Launcher, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.admission import Inventories
from megatron_ft.supervisor.ends import Failure, NodeLost, ReplicasDiffer
from megatron_ft.supervisor.job_context import JobContext

CANNOT_RUN = (126, 127)
"""Exit statuses of a shell for a command that is not executable, or not found."""

NO_SPARE = "no spare is free"
NEEDED = "only its memory has the newest snapshot"


@dataclass(frozen=True)
class Vote:
    """The health command's vote on a node; ``unrunnable``: the shell could not run it there."""

    verdict: Literal["healthy", "unhealthy", "unknown"]
    reason: str = ""
    unrunnable: bool = False


def vote_of(status: int | None, said: str, seconds: float) -> Vote:
    """The vote of a command that ended so, None if it has not in ``seconds``.  Pure.

    Of one that was killed with its node, nobody knows how it would have ended.
    """
    if status is None:
        return Vote("unknown", f"it has not ended within {seconds:g} s")
    if status == 0:
        return Vote("healthy")
    reason = f"it ended with {status}: {said[:200] or 'it printed nothing'}"
    return Vote("unknown" if status < 0 else "unhealthy", reason, status in CANNOT_RUN)


async def ask_node(launcher: Launcher, node: str, command: str, seconds: float, log: Path) -> Vote:
    """Run the health command on one node; ``log`` gets its output.

    When this returns, or is cancelled, all that the command had started was killed.
    """
    argv = started_low([sys.executable, "-I", "-S", bounded_command.__file__, command])
    environment = base_environment() | {TREE: uuid.uuid4().hex}
    handle: ProcessHandle | None = None
    status = None
    try:
        log.unlink(missing_ok=True)
        handle = launcher.start(node, argv, environment, log)
        status = await asyncio.wait_for(handle.wait(), seconds)
    except asyncio.TimeoutError:
        pass
    except (ControlPlaneError, OSError) as error:
        return Vote("unknown", str(error))
    finally:
        if handle is not None:
            handle.kill()
    return vote_of(status, last_word(log) if status else "", seconds)


def node_at_fault(failures: Sequence[Failure]) -> str:
    """The node that the last two failures name, or the last proves, "" if there is none.  Pure.

    Lost nodes are replaced anyway.
    """
    last = failures[-2:]
    if last and _proves(last[-1]):
        return last[-1].node
    if len(last) < 2 or any(isinstance(one, NodeLost) for one in last):
        return ""
    named = {one.node for one in last}
    return named.pop() if len(named) == 1 else ""


def _proves(failure: Failure) -> bool:
    return isinstance(failure, ReplicasDiffer) and bool(failure.node)


def why_used(
    suspects: Collection[str],
    active: Collection[str],
    free: int,
    serves: Callable[[Collection[str]], bool],
) -> dict[str, str]:
    """For each suspect node why it must be used nevertheless, or "".  Pure.

    ``suspects`` come in the order of urgency; ``free`` is how many others could take places;
    ``serves`` says whether memory has the newest snapshot also without some nodes.
    """
    found: dict[str, str] = {}
    gone: list[str] = []
    for node in suspects:
        found[node] = ""
        if node not in active:
            continue
        if len(gone) >= free:
            found[node] = NO_SPARE
        elif not serves([*gone, node]):
            found[node] = NEEDED
        else:
            gone.append(node)
    return found


class Health:
    """The votes on one job's nodes, and what follows from them."""

    def __init__(self, job: JobContext) -> None:
        self._spec, self._launcher, self._state = job.spec, job.launcher, job.state
        self._fleet, self._members = job.fleet, job.members
        self._failures: tuple[Failure, ...] = ()

    def failed(self, failure: Failure) -> None:
        self._failures = (*self._failures, failure)[-2:]

    async def vote(self) -> dict[str, Vote]:
        """Votes of all nodes that may train, at the same time; {} without a command.

        When this returns, or is cancelled, all that the command had started was killed.
        """
        if not self._spec.health_command:
            return {}
        away = self._members.seats.evacuated
        nodes = [n for n in self._launcher.nodes() if n not in away]
        votes = await asyncio.gather(*map(self._vote_on, nodes))
        return dict(zip(nodes, votes, strict=True))

    async def _vote_on(self, node: str) -> Vote:
        spec, path = self._spec, self._log_of(node)
        return await ask_node(self._launcher, node, spec.health_command, spec.health_seconds, path)

    def _log_of(self, node: str) -> Path:
        return self._spec.log_dir / f"health-{node}.log"

    def settle(
        self,
        votes: Mapping[str, Vote],
        admitted: Inventories,
        serves: Callable[[Collection[str]], bool],
    ) -> bool:
        """Have nodes that shall not train leave, and emit why; True if one of them has ranks.

        ``serves`` is for ``why_used``.  ConfigError at the first start when the command runs
        nowhere.
        """
        votes = self._checked({n: v for n, v in votes.items() if n in admitted})
        for node, vote in votes.items():
            if vote.verdict == "unknown":
                text = f"the health of {node} is unknown: {vote.reason}"
                self._emit("health_unknown", text, node)
        members = self._members
        unhealthy = {n: v.reason for n, v in votes.items() if v.verdict == "unhealthy"}
        fault, last = node_at_fault(self._failures), self._failures[-1:]
        named = {fault} & set(admitted) - unhealthy.keys() - members.seats.evacuated
        suspects = [*unhealthy, *named]
        spares = set(members.seats.usable(admitted)) - {*members.active, *suspects}
        free = len(spares) - len(members.seats.lost(admitted))
        used = why_used(suspects, members.active, free, serves)
        for node in unhealthy:
            text = f"the health command failed on {node}: {unhealthy[node]}"
            self._emit("unhealthy", self._conclude(node, text, used[node]), node)
        for node in named:
            causes = " and ".join(f.text for f in self._failures)
            text = f"{node} caused two failures in a row: {causes}"
            text = last[0].text if _proves(last[0]) else text
            text = self._conclude(node, text, used[node], last_resort=True)
            if used[node] != NO_SPARE:
                self._failures = ()
                self._emit("avoided", text, node)
        return not members.seats.leaving.isdisjoint(members.active)

    def _conclude(self, node: str, text: str, used: str, *, last_resort: bool = False) -> str:
        """Have the node leave, unless it must be ``used``; the text with what was done."""
        members, reason = self._members, text
        if used:
            text += f"; it is used: {used}"
            if used == NEEDED:  # As soon as parity has it, it can move.
                number = f"health-{self._fleet.incarnation}-{node}"
                self._fleet.evacuations.ask(m.Evacuate(node, number, reason[:256]))
        else:
            text += "; it is not used any more (`megatron-ft evacuate --undo` gives it back)"
            text += self._advice(node, reason)
            members.take(members.seats.exclude(node, last_resort=last_resort))
            self._fleet.evacuations.note_move(node, state="moved", text=reason)
        return text

    def _advice(self, node: str, reason: str) -> str:
        command = self._launcher.drain_command(node, f"megatron-ft: {reason}")
        return f". To drain it: {command}" if command else ""

    async def why_not_unhealthy(self, node: str) -> str:
        """Run the command on one node now: "" if it fails, which is emitted, else the reason."""
        if not self._spec.health_command:
            return "the job has no --health-command"
        vote = await self._vote_on(node)
        if vote.verdict != "unhealthy":
            return f"its health command says {vote.verdict} {vote.reason}".rstrip()
        text = f"the health command failed on {node}: {vote.reason}"
        self._emit("unhealthy", text + self._advice(node, text), node)
        return ""

    def _checked(self, votes: dict[str, Vote]) -> dict[str, Vote]:
        """The votes; a command that can be run nowhere says nothing about nodes."""
        if not votes or not all(vote.unrunnable for vote in votes.values()):
            return votes
        reason = next(iter(votes.values())).reason
        if not self._state.record.shards:
            command = self._spec.health_command
            raise ConfigError(f"the health command cannot be run: {command!r}: {reason}")
        return {node: Vote("unknown", reason) for node in votes}

    def _emit(self, kind: str, text: str, node: str) -> None:
        self._fleet.observers.emit(kind, text, node=node)
