"""The evidence that is kept of a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.ends import TrainerFailed
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.evidence import EvidenceKeeper, _Seen, read_kept
from megatron_ft.supervisor.heartbeats import Heartbeats
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.job_state import JobState


@dataclass
class Nodes:
    """The fleet and the trainers as an evidence keeper sees them: none has ended yet."""

    observers: Observers = field(default_factory=Observers)
    listeners: list[Callable[[m.NodeEvent], None]] = field(default_factory=list)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    incarnation: int = 3

    def listen(self, listener: Callable[[m.NodeEvent], None]) -> None:
        """As of Fleet."""
        self.listeners.append(listener)

    def nodes_by_rank(self) -> dict[int, str]:
        """No rank."""
        return {}

    def hear(self, body: Any) -> None:
        """An event of a node."""
        for listener in self.listeners:
            listener(m.NodeEvent("n0", self.incarnation, body))


def test_the_versions_are_those_of_the_trainers(tmp_path: Path) -> None:
    """This process may find other releases, and may hear of ranks that say nothing."""
    nodes = Nodes()
    cluster = VirtualCluster("job", ["n0"], tmp_path / "arenas")
    with JobState(tmp_path / "kept", "job") as state:
        job = SimpleNamespace(
            state=state,
            launcher=cluster,
            fleet=nodes,
            trainers=nodes,
            observers=nodes.observers,
        )
        keeper = EvidenceKeeper(cast(JobContext, job))
    versions = {"python": "3.9.2", "megatron-core": "0.20.0", "torch": "2.12.1"}
    hello = m.Hello(1, 0, 0, "dp0", (0,), 3, versions=versions)
    nodes.hear(hello)
    nodes.hear(m.Hello(2, 1, 1, "dp1", (1,), 3))
    _, folder = keeper._keep(TrainerFailed("a trainer ended"), _Seen({}, (), {}))
    kept = read_kept(folder).evidence.versions
    assert versions.items() <= kept.items() and {"linux", "megatron-ft"} <= kept.keys(), kept
