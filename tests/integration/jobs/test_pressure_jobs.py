"""A job whose snapshots become dear for a while keeps its budget, and is protected again after."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from megatron_ft.cli.status import render
from megatron_ft.supervisor.pressure import CREDIT, MOST_WAIT, PRICE
from tests.integration.jobs.test_governor import governed_job
from tests.support.jobs import Job

DEAR, AGAIN, ITERATIONS = 150, 550, 1300
CHEAP_SECONDS, ITERATION_SECONDS, TIMES = 0.002, 0.004, 100


def since(iteration: int, job: Job) -> tuple[int, int]:
    """Snapshots committed from ``iteration`` on, and iterations that were made late by them."""
    taken = late = 0
    for event in job.events:
        taken += event.kind == "committed" and event.fields["iteration"] >= iteration
        late += event.fields["late"] if event.kind == "pressure" and taken else 0
    return taken, late


def test_snapshots_wait_while_they_make_iterations_late_and_return(
    tmp_path: Path, made: list[Any]
) -> None:
    """From 150 to 550 of 1300 each snapshot holds training for fifty iterations."""
    file = tmp_path / "costs"
    words = [ITERATIONS, DEAR, CHEAP_SECONDS, ITERATION_SECONDS, file, AGAIN, TIMES]
    job = governed_job(tmp_path, words, interval="2", p99_budget_percent=100.0)
    shown: list[Any] = []

    def look(job: Job) -> None:
        state = job.supervisor.summary.view()
        known = {"exposure": {}, "nodes": {}, "supervised": True}
        summary = {**state, "iteration": 1, "incarnation": 1}
        shown.append((state["waits_until"], render("job", {**known, "summary": summary})))

    job.at_event["pressure"] = look
    made.append(job)
    job.run()
    stalls = [json.loads(line)[2] for line in file.read_text().splitlines()]
    held = [after - before for before, after in itertools.pairwise(stalls)]
    dear = [one for one in held[DEAR:AGAIN] if one > TIMES * CHEAP_SECONDS / 2]
    assert 0 < len(dear) <= (AGAIN - DEAR) / PRICE + CREDIT + 4, "late iterations"
    taken, late = since(AGAIN, job)
    # A late iteration of these is the machine's own, and is paid for as well.
    free = ITERATIONS - (AGAIN + PRICE + 60) - late * PRICE
    assert taken > max(4 * free / PRICE, 2 * late) + CREDIT, "snapshots are not back"
    steps = [event for event in job.events if event.kind.startswith("pressure")]
    until, text = shown[0]
    assert until == steps[0].fields["until"]
    assert f"no snapshot before iteration {until} (late iterations)" in text
    waits = [event.fields["until"] for event in steps if event.fields.get("late")]
    assert waits and max(waits) <= AGAIN + MOST_WAIT
    # The machine itself may make an iteration late near the end; such a wait outlasts training.
    ended = [event for event in steps if event.fields.get("until", 0) <= ITERATIONS]
    assert ended[-1].kind == "pressure_over" or ended[-1].fields["late"] == 0
