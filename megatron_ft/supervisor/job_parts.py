"""What one supervised job consists of, made once and kept over all its incarnations."""

from __future__ import annotations

from megatron_ft.launchers.launcher import HostSource, Launcher
from megatron_ft.rpc.sockets import JobKeys
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.disk_restore import DiskRestores
from megatron_ft.supervisor.distrust import Distrust
from megatron_ft.supervisor.drains import Drains, noted_places
from megatron_ft.supervisor.encoder_world import EncoderWorld, WorldKeeper
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.failure import JobNotes
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.processes import TrainerFleet
from megatron_ft.supervisor.schedule import Pacing
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.warm_spares import WarmSpares
from megatron_ft.supervisor.watch import JobWatch


class JobParts:
    """The parts of one job, connected; making them starts nothing.

    ``hosts`` is where replacement hosts can be had, None: nowhere.
    ``reached`` is the last iteration that was heard of before the last failure, -1 if none.
    ``budget`` is what is left of the restarts, ``replaced`` are nodes that the job has gone on
    without, ``registered`` says that a rank has registered since this supervisor began.
    """

    def __init__(self, spec: JobSpec, launcher: Launcher, state: JobState) -> None:
        self.spec, self.launcher, self.state = spec, launcher, state
        self.hosts: HostSource | None = None
        self.observers = Observers()
        self.trainers = TrainerFleet(launcher, spec)
        self.warm_spares = WarmSpares(launcher, spec)
        encoders = EncoderWorld(launcher, spec)
        self.coordinator = Coordinator(
            JobKeys.derive(state.record.secret),
            self.observers,
            encoders.end,
            spec.timing,
            spec.settings.scrub_percent,
        )
        self.world = WorldKeeper(encoders, self.coordinator)
        self.members = Membership(spec, launcher, state, self.coordinator)
        places = noted_places(state.record.disk, spec)
        if places != state.record.disk:
            state.update(disk=places)
        self.drains = Drains(
            spec,
            launcher,
            state.record.job,
            self.coordinator,
            self.members.spares_gone,
            places.drain_mount,
        )
        self.disk = DiskRestores(spec, launcher)
        self.distrust = Distrust(
            state, self.coordinator, spec.settings.quarantine_iterations, spec.checkpoint_dir
        )
        self.pacing = Pacing(
            spec.settings.overhead_percent / 100,
            3600 * spec.settings.expected_mtbf_hours,
            self.observers,
        )
        self.coordinator.listeners.append(self.pacing.on_event)
        self.notes = JobNotes(state, self.coordinator)
        self.watch = JobWatch(self.coordinator, spec.settings, spec.log_dir)
        self.reached = -1
        self.budget = spec.budget
        self.replaced: set[str] = set()
        self.registered = False
