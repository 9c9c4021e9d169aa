"""The parts of a job that all of its decisions share, made once by its supervisor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.launchers.launcher import Launcher
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.damage import DamagedShards
from megatron_ft.supervisor.encoder_group import EncoderGroup
from megatron_ft.supervisor.encoder_processes import EncoderProcesses
from megatron_ft.supervisor.events import EventFacts, Observers
from megatron_ft.supervisor.expected_encoders import ExpectedEncoders
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.processes import TrainerFleet
from megatron_ft.supervisor.snapshots import SnapshotPump
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.standing import Standing


@dataclass(frozen=True)
class JobContext:
    """One job: what was asked for, its notes, its nodes and processes, and who talks to them."""

    spec: JobSpec
    launcher: Launcher
    state: JobState
    pump: SnapshotPump
    members: Membership
    encoder_group: EncoderGroup
    trainers: TrainerFleet

    @classmethod
    def of(cls, spec: JobSpec, launcher: Launcher, state: JobState) -> JobContext:
        """The parts of this job; nothing is started."""
        processes, observers = EncoderProcesses(launcher, spec), Observers()
        keys, scrub = JobKeys.derive(state.record.secret), spec.settings.scrub_percent
        fleet = Fleet(keys, observers, spec.timing, scrub)
        encoders = ExpectedEncoders(observers, processes.end)
        pump = SnapshotPump(fleet, Standing(DamagedShards(observers)), encoders)
        members = Membership(spec, launcher, state, pump)
        group = EncoderGroup(processes, encoders, fleet)
        return cls(spec, launcher, state, pump, members, group, TrainerFleet(launcher, spec))

    @property
    def fleet(self) -> Fleet:
        return self.pump.fleet

    @property
    def standing(self) -> Standing:
        return self.pump.standing

    @property
    def encoders(self) -> ExpectedEncoders:
        return self.pump.encoders

    @property
    def observers(self) -> Observers:
        return self.fleet.observers

    def emit(self, what: str | EventFacts, text: str, **fields: Any) -> None:
        self.observers.emit(what, text, **fields)
