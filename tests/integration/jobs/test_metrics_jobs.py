"""Metrics of a real job: what they say is what the coordinator knows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.cli.main import main
from megatron_ft.cli.metrics import metrics
from tests.support.fates import in_incarnation
from tests.support.jobs import WAIT_SECONDS, Job

LABEL = r'\w+="(?:[^"\\\n]|\\.)*"'
LINE = re.compile(rf"(megatron_ft_\w+)\{{({LABEL}(?:,{LABEL})*)\}} (\S+)")


def parsed(text: str) -> dict[str, float]:
    """Values by name and labels; fails on a line that is none of the format."""
    assert text == "" or text.endswith("\n")
    found, described = {}, set()
    for line in text.splitlines():
        if line.startswith("#"):
            described.add(line.split()[2])
            continue
        parts = LINE.fullmatch(line)
        assert parts is not None and parts[1] in described, line
        found[f"{parts[1].removeprefix('megatron_ft_')}{{{parts[2]}}}"] = float(parts[3])
    return found


@pytest.mark.mpi
@pytest.mark.usefixtures("warm_trainers")
def test_a_job_that_loses_a_node(made: list[Job], tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=2, spares=1, protect="xor:2", iterations=40, iteration_seconds=0.1)
    made.append(job)
    file = tmp_path / "job.prom"
    where = ["--job", job.name, "--arena-dir", str(job.cluster.root), "--output", str(file)]

    def until(condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            assert main(["metrics", *where]) == 0
            if condition(found := parsed(file.read_text())):
                return found
            assert time.monotonic() < deadline, file.read_text()
            time.sleep(0.05)

    whose = f'training="{job.name}"'
    protected = f'iteration{{{whose},state="protected"}}'

    def before(job: Job) -> None:
        found = until(lambda found: protected in found)
        assert found[f"supervised{{{whose}}}"] == found[f"encoders_up{{{whose}}}"] == 1
        assert found[f"incarnation{{{whose}}}"] == 1
        assert 0 <= found[protected] <= found[f'iteration{{{whose},state="committed"}}']
        assert f'iteration{{{whose},state="durable"}}' not in found
        shards = [found[f'node_shards{{{whose},node="n{number}"}}'] for number in range(3)]
        assert shards == [1, 1, 0]
        job.cluster.kill_node("n0")

    def after(job: Job) -> None:
        kill = f'recovery_seconds{{{whose},part="kill"}}'
        found = until(lambda found: kill in found and found[f"incarnation{{{whose}}}"] == 2)
        recovered = next(e.fields for e in job.events if e.kind == "recovered")
        assert found[kill] == recovered["kill"]
        assert found[f'node_shards{{{whose},node="n2"}}'] == 1

    job.run((8, before), (20, in_incarnation(2, after)))
    # The job has ended: there may still be a socket, but nobody answers.
    until(lambda found: set(found.values()) <= {0})


def test_names_are_escaped_and_nodes_that_are_silent_count() -> None:
    job = {"supervised": False, "summary": {}, "nodes": {'n"1': {"error": "no answer"}}}
    found = parsed(metrics({"a\\b\n": job}))
    assert found == {
        r'supervised{training="a\\b\n"}': 0,
        r'node_answers{training="a\\b\n",node="n\"1"}': 0,
    }


@pytest.mark.parametrize("flags", [["--every", "5"], ["--every", "0", "--output", "x"]])
def test_repetition_needs_a_file_and_a_time(flags: list[str]) -> None:
    assert main(["metrics", *flags]) == 2
