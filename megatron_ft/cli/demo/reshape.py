"""The demo's reshape: the job is stopped, loses nodes, and is started again in another layout.

Digests of all tensors of the unsharded model are taken from memory before and after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isclose, nan
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

import torch
from msgspec import UNSET

from megatron_ft.checkpoint.captured import GlobalTensors
from megatron_ft.checkpoint.live import LiveSource, open_live
from megatron_ft.checkpoint.source import SnapshotInfo, SnapshotSource
from megatron_ft.cli.chaos.trace import final_lines, read_trace
from megatron_ft.cli.demo.faults import STOPPED, DemoFault, DemoVictim, Traces
from megatron_ft.cli.demo.final_state import Comparison, compare_traces
from megatron_ft.cli.demo.protected_run import ProtectedRun
from megatron_ft.cli.demo.report import DemoReshape
from megatron_ft.cli.demo.settings import RESHAPED_ITERATIONS, DemoFolders, DemoSettings
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.supervisor.events import EventFacts, RebuiltEvent, ReshapedEvent
from megatron_ft.supervisor.job_state import read_record

Facts = TypeVar("Facts", bound=EventFacts)

Digests = Mapping[str, str]
"""Names of tensors of the unsharded model to digests of dtype, shape and bytes."""

LEAST_AFTER = RESHAPED_ITERATIONS // 2
"""Iterations that are left for the other layout at least."""
RELATIVE = 2e-3
"""Most by which a loss in bf16 differs because sums are taken in another order."""


class ReshapedRun(ProtectedRun):
    """The protected run, then started again in another layout as the job ``after``."""

    def __init__(
        self,
        job: RunCommand,
        after: RunCommand,
        trace: Path,
        settings: DemoSettings,
        faults: Sequence[DemoFault],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(job, trace, faults, settings.all_iterations, log)
        self._after, self._settings, self._left = after, settings, False

    def _run(self) -> str:
        if end := self._follow(self._may_leave):
            return end
        self._log("stopping the job; its snapshots stay in memory")
        self.follower.leave()
        self._left = True
        self._read()
        self._set_gate()
        source = self._memory()
        before = {info.iteration: digests_of(source, info) for info in source.snapshots()}
        self._lose_nodes()
        after = self._settings.reshape
        self._log(f"starting the job again with {after}, on {self._after.spec.nodes} nodes")
        self.follower.start(self._after)
        if end := self._follow(lambda: self._facts(ReshapedEvent) is not None):
            return end
        self._note(before)
        return self._follow()

    def _may_leave(self) -> bool:
        """True once all faults have struck and training is protected again, or soon at its end.

        Where encoders take long to come up, an older snapshot with parity is reshaped.
        """
        late = self._trains_to(self._last_stop)
        return not self._waiting and (self._is_ready(self._settings.iterations) or late)

    @property
    def _last_stop(self) -> int:
        return self._settings.all_iterations - LEAST_AFTER

    def _next(self) -> int | None:
        return super()._next() or (None if self._left else self._settings.iterations)

    def _lose_nodes(self) -> None:
        settings = self._settings
        chance = Random(f"megatron-ft demo reshape {settings.seed}")
        lost = tuple(sorted(chance.sample(range(settings.nodes), settings.lose)))
        self._strike(DemoFault(DemoVictim.NODE, settings.iterations, STOPPED, lost))
        strike = self.strikes[-1]
        self.strikes[-1] = replace(strike, victim=f"{strike.victim}, then {settings.reshape}")

    def _facts(self, kind: type[Facts]) -> Facts | None:
        since = self.strikes[-1].monotonic
        newer = (e.facts for e in reversed(self.follower.events) if e.at > since)
        return next((one for one in newer if isinstance(one, kind)), None)

    def _memory(self) -> LiveSource:
        record = read_record(self.follower.job.notes, self._job.name)
        shards = () if record is None else record.shards
        return open_live(self.follower.cluster.root, self._job.name, shards=shards)

    def _note(self, before: Mapping[int, Digests]) -> None:
        """Compare all tensors with those ``before``, by iteration; note it as ``reshape``."""
        event, rebuilt = self._facts(ReshapedEvent), self._facts(RebuiltEvent)
        assert event is not None, "it was awaited"
        source, iteration = self._memory(), event.iteration
        # Captures that need its slot are skipped while it is read.
        info = next((one for one in source.snapshots() if one.iteration == iteration), None)
        if info is None or iteration not in before:
            when = "after" if info is None else "before"
            raise ControlPlaneError(
                f"iteration {iteration} was reshaped, but {source} did not have it {when} that: "
                "there is nothing to compare"
            )
        old, new = before[iteration], digests_of(source, info)
        read = event.storage_bytes_read
        count, different = len(old.keys() | new.keys()), differing(old, new)
        self.reshape = DemoReshape(
            iteration=iteration,
            tensors=count,
            identical_tensors=count - len(different),
            different=different,
            bytes_needed=event.bytes_needed,
            bytes_decoded=rebuilt.bytes_decoded if rebuilt else 0,
            storage_bytes_read=None if read is UNSET else read,
            seconds=event.seconds,
        )
        self._log(f"{self.reshape.identical_tensors} of {self.reshape.tensors} tensors are equal")


def digests_of(source: SnapshotSource, info: SnapshotInfo) -> Digests:
    with source.open_parts(info) as shards:
        tensors = GlobalTensors(shards)
        return {name: digest_of(tensors.read(name)) for name in tensors}


def differing(old: Digests, new: Digests) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def digest_of(tensor: torch.Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compare_reshaped_runs(
    settings: DemoSettings, folders: DemoFolders, reshape: DemoReshape
) -> Comparison:
    """Compare the run that was reshaped with the one of a single layout that had no fault.

    Traces up to the reshape must be equal bit by bit, and so must all tensors have been that were
    reshaped.  After it each iteration must use the same samples; its loss may differ by RELATIVE.
    """
    result = Comparison(tensors=reshape.identical_tensors)
    result.differences += [f"{name}: not the same after the reshape" for name in reshape.different]
    for rank in range(settings.layout.ranks):
        compare_traces(result, rank, folders.protected, folders.oracle, reshape.iteration)
    before, after = settings.layouts
    ours = {rank: read_trace(folders.protected, rank) for rank in range(after.ranks)}
    oracle = {rank: read_trace(folders.oracle, rank) for rank in range(before.ranks)}
    compare_after(result, ours, oracle, range(reshape.iteration + 1, settings.all_iterations + 1))
    return result


def compare_after(
    result: Comparison, ours: Traces, oracle: Traces, iterations: Iterable[int]
) -> None:
    for at in iterations:
        mine, other = (_iteration(traces, at) for traces in (ours, oracle))
        where = f"iteration {at} after the reshape"
        if mine.samples != other.samples:
            result.differences.append(
                f"{where}: samples {sorted(mine.samples)}, without it {sorted(other.samples)}"
            )
        if not isclose(mine.loss, other.loss, rel_tol=RELATIVE):
            result.differences.append(f"{where}: loss {mine.loss!r}, without it {other.loss!r}")
        result.deviation = max(result.deviation, abs(mine.loss / other.loss - 1))


class _Iteration(NamedTuple):
    """One iteration over all ranks; ``loss`` is NaN, which equals nothing, if no rank has it."""

    samples: set[int]
    loss: float


def _iteration(traces: Traces, at: int) -> _Iteration:
    lines = [line for rank in traces.values() if (line := final_lines(rank).get(at)) is not None]
    losses = (line.loss_value for line in lines if line.loss_value is not None)
    return _Iteration({s for line in lines for s in line.samples}, next(losses, nan))
