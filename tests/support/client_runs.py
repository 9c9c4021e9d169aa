"""Runs of foreign clients, whose SMP is the test's: one incarnation after the other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ft.cli.demo.final_state import differences
from tests.support.late_capture import LOAD_FROM, SAVE_TO
from tests.support.warm_host import Request, WarmHost


@dataclass
class Incarnation:
    """What the ranks have seen, and what rank 0 has said."""

    folder: Path
    seen: list[dict[str, Any]]
    said: str

    @property
    def losses(self) -> dict[str, Any]:
        return dict(self.seen[0]["losses"])


@dataclass
class Client:
    """Runs one client in ``folder``."""

    server: WarmHost
    folder: Path
    entry: str
    ranks: int = 2

    def run(self, name: str, variables: dict[str, Any] | None = None, **told: Any) -> Incarnation:
        folder = self.folder / name
        folder.mkdir()
        request = Request(
            entry="tests.programs.clients_program:main",
            argv=[self.entry, json.dumps(told), str(folder)],
            ranks=self.ranks,
            logs=str(folder / "logs"),
            timeout_seconds=200,
            environment={SAVE_TO: str(folder / "arenas")}
            | {key: str(value) for key, value in (variables or {}).items()},
        )
        outcome = self.server.run(request)
        assert not any(outcome.codes), outcome.story()
        seen = [json.loads((folder / f"seen{r}.json").read_text()) for r in range(self.ranks)]
        return Incarnation(folder, seen, outcome.output(0))

    def again(
        self, before: Incarnation, variables: dict[str, Any] | None = None, **told: Any
    ) -> Incarnation:
        """The next incarnation: it is offered the snapshot of the one before."""
        name = f"again{len(list(self.folder.glob('again*')))}"
        return self.run(name, {LOAD_FROM: before.folder / "arenas", **(variables or {})}, **told)


def check_identical(whole: Incarnation, again: Incarnation, at: int, *names: str) -> None:
    """What ``again`` did behind step ``at``, all that it held at the end, and what ``names`` name
    of what was seen."""
    assert whole.seen[0]["samples"] != whole.seen[1]["samples"]
    for rank, (before, seen) in enumerate(zip(whole.seen, again.seen, strict=True)):
        assert seen["begins_at"] == at
        for name in ("losses", "samples"):
            late = {step: value for step, value in before[name].items() if int(step) > at}
            assert seen[name] == late and late
        for name in names:
            assert seen[name] == before[name], name
        files = [one.folder / f"final{rank}.pt" for one in (whole, again)]
        left, right = (torch.load(file, weights_only=True) for file in files)
        assert differences(left, right) == []
