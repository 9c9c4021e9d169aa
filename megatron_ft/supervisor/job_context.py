"""The parts of a job that all of its decisions share, made once by its supervisor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.launchers.launcher import Launcher
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.encoder_world import EncoderWorld, WorldKeeper
from megatron_ft.supervisor.events import EventFacts, Observers
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.processes import TrainerFleet
from megatron_ft.supervisor.spec import JobSpec


@dataclass(frozen=True)
class JobContext:
    """One job: what was asked for, its notes, its nodes and processes, and who talks to them."""

    spec: JobSpec
    launcher: Launcher
    state: JobState
    coordinator: Coordinator
    members: Membership
    world: WorldKeeper
    trainers: TrainerFleet

    @classmethod
    def of(cls, spec: JobSpec, launcher: Launcher, state: JobState) -> JobContext:
        """The parts of this job; nothing is started."""
        encoders = EncoderWorld(launcher, spec)
        keys, scrub = JobKeys.derive(state.record.secret), spec.settings.scrub_percent
        coordinator = Coordinator(keys, Observers(), encoders.end, spec.timing, scrub)
        members = Membership(spec, launcher, state, coordinator)
        world = WorldKeeper(encoders, coordinator)
        trainers = TrainerFleet(launcher, spec)
        return cls(spec, launcher, state, coordinator, members, world, trainers)

    @property
    def observers(self) -> Observers:
        """The observers of the job's events."""
        return self.coordinator.observers

    def emit(self, what: str | EventFacts, text: str, **fields: Any) -> None:
        """Pass an event on."""
        self.observers.emit(what, text, **fields)
