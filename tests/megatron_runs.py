"""Runs of a layout, and the comparison of what came of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_program as program
import torch
from fork_server import ForkServer, Outcome, Request
from megatron_arenas import ArenaFolder
from megatron_layouts import Layout

from megatron_ft.testing import demo_model, final_state
from megatron_ft.testing.trace import final_path, read_trace

ITERATIONS, SNAPSHOT_AT = 8, 4
TIMEOUT_SECONDS = 120.0
SNAPSHOTS = "--inmem-snapshot"


@dataclass
class Runs:
    """Trains in ``folder``, one folder per run, on the corpus with this prefix."""

    server: ForkServer
    corpus: Path
    folder: Path

    def train(
        self, layout: Layout, name: str, *flags: str, succeed: bool = True, **variables: object
    ) -> Outcome:
        """Run all ranks to the end; ``variables`` are environment variables of the test."""
        outcome = self.server.run(self.request(layout, name, *flags, **variables))
        assert not succeed or not any(outcome.codes), outcome.story()
        return outcome

    def request(self, layout: Layout, name: str, *flags: str, **variables: object) -> Request:
        """What ``train`` asks of the server."""
        arguments = demo_model.demo_arguments(
            iterations=ITERATIONS,
            data_path=self.corpus,
            hidden=32,
            sequence=16,
            precision="fp32",
            distributed_optimizer=False,
        )
        environment = {
            program.SCHEME: layout.scheme,
            program.RANKS_PER_NODE: str(layout.ranks_per_node),
            program.PLUGINS: " ".join(layout.plugins),
            program.SAVE_TO: str(self.folder / name / "arenas"),
        } | {key: str(value) for key, value in variables.items()}
        return Request(
            entry="megatron_program:train",
            argv=[*arguments, *layout.flags, *flags, "--trace-dir", str(self.folder / name)],
            ranks=layout.ranks,
            logs=str(self.folder / name / "logs"),
            timeout_seconds=TIMEOUT_SECONDS,
            environment=environment,
        )

    def lines(self, name: str, rank: int) -> dict[int, tuple[str | None, list[int]]]:
        """Loss and sample indices by iteration."""
        trace = read_trace(self.folder / name, rank)
        return {line.iteration: (line.loss, line.samples) for line in trace}

    def final(self, name: str, rank: int) -> Any:
        """A rank's complete state at the end."""
        return torch.load(final_path(self.folder / name, rank), weights_only=True)

    def require_same(
        self,
        layout: Layout,
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

    def differences(
        self, layout: Layout, left: str, right: str, after: int, until: int
    ) -> list[str]:
        """Paths at which two runs differ, over all ranks."""
        found = []
        for rank in range(layout.ranks):
            lines = [self.lines(name, rank) for name in (left, right)]
            for at in range(after + 1, until + 1):
                if lines[0].get(at) != lines[1].get(at) or at not in lines[0]:
                    found.append(f"rank{rank}/iteration{at}")
            states = [self.final(name, rank) for name in (left, right)]
            found += [f"rank{rank}{path}" for path in final_state.differences(*states)]
        return found


def skipped_iterations(outputs: Iterable[str]) -> list[int]:
    """Iterations whose step was skipped, by Megatron's log."""
    pattern = re.compile(r"iteration +(\d+)/.*number of skipped iterations: +([1-9])")
    return sorted({int(m.group(1)) for text in outputs for m in pattern.finditer(text)})


def check_resume(runs: Runs, layout: Layout, crash: bool) -> None:
    """A run that goes on after a node loss, and one after a ``crash``, are the uninterrupted one.

    After a node loss the other nodes load from their own memory, as all do after a crash.
    """
    snapshot = {program.SAVE_AT: SNAPSHOT_AT}
    whole = runs.train(layout, "whole", SNAPSHOTS, **snapshot)
    if layout.skips_iterations:
        skipped = skipped_iterations(whole.output(rank) for rank in range(layout.ranks))
        assert skipped and skipped[0] <= SNAPSHOT_AT < skipped[-1], skipped
    sources = {"crash": ArenaFolder.of(runs.folder / "whole" / "arenas")}
    if layout.scheme != "none":
        sources["crash"].protect()
        sources["loss"] = lose_nodes(sources["crash"], runs.folder / "rebuilt", layout.nodes_lost)
        if not crash:
            del sources["crash"]
    for name, source in sources.items():
        after = runs.train(layout, name, SNAPSHOTS, **{program.LOAD_FROM: source.folder})
        assert f"at iteration {SNAPSHOT_AT} in" in after.output(0)
        assert list(runs.lines(name, 0)) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))
        runs.require_same(layout, "whole", name, after=SNAPSHOT_AT)


def lose_nodes(whole: ArenaFolder, folder: Path, nodes: Iterable[int]) -> ArenaFolder:
    """A copy in which these nodes' arenas were deleted and rebuilt."""
    damaged = whole.copy_to(folder)
    lost = damaged.lose([damaged.nodes[node] for node in nodes])
    assert lost and all(damaged.data(shard) == whole.data(shard) for shard in lost)
    return damaged
