"""What the cases of one command share, and the job of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_ft.cli.chaos.cases import Case
from megatron_ft.cli.chaos.job import TRAINING_MODULE, JobFile


@dataclass(frozen=True)
class Settings:
    """What all cases of one command share.

    ``command`` is the user's own, or empty; ``limit`` how long a case may wait for any one
    thing, in seconds; ``warm`` the socket of a server that forks processes, or empty.
    """

    folder: Path
    nodes: int = 2
    protect: str = "xor:2"
    ranks_per_node: int = 1
    seed: int = 0
    lease: float = 4.0
    limit: float = 60.0
    iterations: int = 1000
    iteration_seconds: float = 0.03
    command: tuple[str, ...] = ()
    warm: str = ""

    @property
    def ranks(self) -> int:
        """Number of trainers."""
        return self.nodes * self.ranks_per_node

    def job(self, case: Case, name: str, folder: Path) -> JobFile:
        """The job of a case."""
        spares = case.nodes_lost() + (case.victim in ("smp", "memory", "network", "arena"))
        spares += case.at.role == "smp" or case.at.occasion == "smp lost"
        job = JobFile(
            name=name,
            folder=str(folder),
            command=self.command or self.training(folder / "stop"),
            nodes=self.nodes,
            spares=max(1, spares),
            protect=self.protect,
            ranks_per_node=self.ranks_per_node,
            lease=self.lease,
            warm=self.warm,
            trace=str(folder / "trace"),
        )
        drains = case.disk and (
            case.nodes_lost() > job.parity
            or case.at.occasion in ("drain", "export")
            or case.victim in ("drain", "disk")
        )
        return msgspec.structs.replace(
            job,
            drain_interval=10 if drains else 0,
            exports=drains and case.at.occasion == "export",
            network=case.victim == "network",
        )

    def training(self, stop: Path | None) -> tuple[str, ...]:
        """Our own training command."""
        command = [sys.executable, "-m", TRAINING_MODULE, "--iterations", str(self.iterations)]
        pace = ["--seconds", str(self.iteration_seconds), "--stop", str(stop)]
        return (*command, *(pace if stop else []))
