"""Runs of a layout, whole and resumed, and the comparison of what came of them.

The same for every framework: ranks are forked, play their own SMP (late_capture.py), and
leave a trace of losses and their complete state at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_ft.cli.chaos.trace import final_path, read_trace
from megatron_ft.cli.demo import final_state
from megatron_ft.config import SETTINGS
from tests.support.arena_folder import ArenaFolder, compared_replicas
from tests.support.late_capture import LOAD_FROM, RANKS_PER_NODE, SAVE_AT, SAVE_TO, SCHEME
from tests.support.warm_host import Outcome, Request, WarmHost

ITERATIONS, SNAPSHOT_AT = 8, 4
TIMEOUT_SECONDS = 120.0


class Job(Protocol):
    """What is trained, by how many ranks, and what protects it."""

    @property
    def ranks(self) -> int: ...

    @property
    def scheme(self) -> str: ...

    @property
    def ranks_per_node(self) -> int: ...

    @property
    def nodes_lost(self) -> tuple[int, ...]: ...


@dataclass
class Runs(ABC):
    """Trains in ``folder``, one folder per run."""

    server: WarmHost
    folder: Path

    @abstractmethod
    def request(self, layout: Any, name: str, *flags: str, **variables: object) -> Request:
        """What ``train`` asks of the server."""

    def check_whole(self, layout: Any, whole: Outcome) -> None:  # noqa: B027
        """Fail unless the uninterrupted run met what the layout is about."""

    def train(
        self, layout: Any, name: str, *flags: str, succeed: bool = True, **variables: object
    ) -> Outcome:
        """Run all ranks to the end; ``variables`` are environment variables of the test."""
        outcome = self.server.run(self.request(layout, name, *flags, **variables))
        assert not succeed or not any(outcome.codes), outcome.story()
        return outcome

    def environment(self, layout: Job, name: str, variables: dict[str, object]) -> dict[str, str]:
        return {
            SCHEME: layout.scheme,
            RANKS_PER_NODE: str(layout.ranks_per_node),
            SAVE_TO: str(self.folder / name / "arenas"),
            SETTINGS["compare_replicas"].variable: "1",
        } | {key: str(value) for key, value in variables.items()}

    def lines(self, name: str, rank: int) -> dict[int, tuple[str | None, list[int]]]:
        trace = read_trace(self.folder / name, rank)
        return {line.iteration: (line.loss, line.samples) for line in trace}

    def final(self, name: str, rank: int) -> Any:
        return torch.load(final_path(self.folder / name, rank), weights_only=True)

    def require_same(
        self,
        layout: Job,
        left: str,
        right: str,
        *,
        after: int = 0,
        until: int = ITERATIONS,
        but: str = " ",
    ) -> None:
        """Fail, saying where, unless two runs are bit-identical; leave out paths with ``but``.

        Compared are losses and samples of the iterations after ``after``, up to ``until``,
        and the complete states at the end, of all ranks.
        """
        found = [d for d in self.differences(layout, left, right, after, until) if but not in d]
        assert not found, f"{len(found)} differences: " + "; ".join(found[:20])

    def differences(self, layout: Job, left: str, right: str, after: int, until: int) -> list[str]:
        found = []
        for rank in range(layout.ranks):
            lines = [self.lines(name, rank) for name in (left, right)]
            for at in range(after + 1, until + 1):
                if lines[0].get(at) != lines[1].get(at) or at not in lines[0]:
                    found.append(f"rank{rank}/iteration{at}")
            states = [self.final(name, rank) for name in (left, right)]
            found += [f"rank{rank}{path}" for path in final_state.differences(*states)]
        return found


def check_resume(runs: Runs, layout: Any, crash: bool, *flags: str) -> None:
    """A run that continues after a node loss, and one after a ``crash``, are the uninterrupted one.

    After a node loss the other nodes load from their own memory, as all do after a crash.
    """
    whole = runs.train(layout, "whole", *flags, **{SAVE_AT: SNAPSHOT_AT})  # type: ignore[arg-type]
    runs.check_whole(layout, whole)
    compared_replicas(runs.folder / "whole" / "arenas")
    sources = {"crash": ArenaFolder.of(runs.folder / "whole" / "arenas")}
    if layout.scheme != "none":
        sources["crash"].protect()
        sources["loss"] = lose_nodes(sources["crash"], runs.folder / "rebuilt", layout.nodes_lost)
        if not crash:
            del sources["crash"]
    for name, source in sources.items():
        after = runs.train(layout, name, *flags, **{LOAD_FROM: source.folder})  # type: ignore[arg-type]
        assert f"restored iteration {SNAPSHOT_AT} " in after.output(0)
        assert list(runs.lines(name, 0)) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))
        runs.require_same(layout, "whole", name, after=SNAPSHOT_AT)


def lose_nodes(whole: ArenaFolder, folder: Path, nodes: Iterable[int]) -> ArenaFolder:
    """A copy in which these nodes' arenas were deleted and rebuilt."""
    damaged = whole.copy_to(folder)
    lost = damaged.lose([damaged.nodes[node] for node in nodes])
    assert lost and all(damaged.data(shard) == whole.data(shard) for shard in lost)
    return damaged
