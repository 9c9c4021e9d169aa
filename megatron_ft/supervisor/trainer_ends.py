"""The end of an incarnation by a trainer's exit, and what it says of the command and the node."""

from __future__ import annotations

import signal
from contextlib import suppress

from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.process_tools import last_lines, last_word
from megatron_ft.core.startup import REFUSED, UNAVAILABLE
from megatron_ft.supervisor.ends import (
    Asked,
    End,
    Failure,
    Finished,
    NodeLost,
    TrainerFailed,
    TrainerRefused,
    TrainerStopped,
)
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.processes import TrainerExit
from megatron_ft.supervisor.registration import Registration
from megatron_ft.supervisor.restore import RestorePlan

RERUN_CODES = (16, 17)
"""Exit codes of Megatron's rerun machine for a doubtful result; the snapshot is not at fault."""

NEVER_STARTED = (2, 126, 127, UNAVAILABLE)
"""Exit codes of a command that could not be started: of Python without its script or after wrong
flags (argparse), of a shell without the program, and of a script that cannot be imported."""


async def judge_exit(
    job: JobContext, plan: RestorePlan, registration: Registration, first: TrainerExit
) -> End:
    """The end that the first exit of a rank means; what ranks were refused for is raised."""
    if first.finished:
        with suppress(MegatronFTError):
            await job.fleet.refresh()  # after what ranks have said of their end
        return Finished()
    if registration.refused is not None:
        raise registration.refused
    if first.status > 0 and not registration.complete.is_set():
        # Nodes answer after their earlier events, perhaps why this rank could not begin.
        await job.fleet.refresh()
    if registration.other_layout(plan.decision.stripes) and not plan.reshaped:
        job.members.reshape()
        text = "the command has another parallel layout than the snapshots in memory"
        job.emit("reshaping", f"{text}: they are reshaped")
        return Asked(text)
    registration.check_fit()
    return _failure(job, plan, registration, first)


def _failure(
    job: JobContext, plan: RestorePlan, registration: Registration, first: TrainerExit
) -> Failure:
    """The failure of a trainer; its end and the end of its log are emitted."""
    node, status, trainer = first.node, first.status, job.trainers.name_of(first.rank)
    how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
    # The OOM killer of the kernel sends the same signal.
    memory = " (if by the OOM killer, see dmesg there)" if status == -signal.SIGKILL else ""
    where = f"{trainer} on {node} {how}{memory}"
    job.emit("trainer_died", where, rank=first.rank, node=node, status=status)
    path, said = job.trainers.log_of(first.rank), ""
    if status > 0:
        said = last_word(path, job.trainers.log_starts.get(path, 0))
        job.emit("log", f"end of {path}:\n{last_lines(path)}")
    text = f"{trainer} {how}"
    if status > 0 and not registration.complete.is_set():
        text += job.spec.shape_note(len(plan.active))
    if registration.late:
        text += f" ({registration.late})"
    if not job.launcher.reachable(node):
        return NodeLost(text, node)
    if job.launcher.is_away(said):
        return TrainerRefused(f"{text}: {said}")
    if status in RERUN_CODES:
        why = f"{text}, as Megatron does to be resumed from its checkpoint (--rerun-mode)"
        return TrainerStopped(why, status=status)
    never = not (job.state.record.shards or registration.hellos)
    if status == REFUSED or (status in NEVER_STARTED and never):
        # No node, and nothing of the job, is the cause.
        return TrainerFailed(text, final=True, status=status)
    outside = -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    return (TrainerStopped if outside else TrainerFailed)(text, node, status=status)
