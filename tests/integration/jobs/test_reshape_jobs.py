"""Jobs that continue with other ranks, from memory: the result is that of any number of them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.cli.main import main
from megatron_ft.core.errors import LayoutMismatchError, RestartBudgetError
from megatron_ft.core.identity import RankRule
from megatron_ft.supervisor.membership import NoSpareError
from tests.programs import elastic_training as program
from tests.support.jobs import Fault, Job

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]

ITERATIONS = 60
MORE = pytest.mark.all_layouts


def elastic_job(folder: Path, nodes: int = 4, **changes: Any) -> Job:
    flags = changes.pop("command_flags", {})
    given = {"protect": "rs:3+1", "on_no_spare": "shrink", **changes}
    return Job(folder, nodes=nodes, command=command(folder, **flags), **given)


def command(folder: Path, **flags: Any) -> tuple[str, ...]:
    words = {"folder": folder, "iterations": ITERATIONS, **flags}
    pairs = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return (sys.executable, program.__file__, *pairs)


def lose(*nodes: str) -> Fault:
    def strike(job: Job) -> None:
        for node in nodes:
            job.cluster.kill_node(node)

    return strike


def revive(node: str) -> Fault:
    return lambda job: job.cluster.revive(node)


def finish(job: Job) -> None:
    (job.folder / "gate").touch()


def told(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.events if event.kind == kind]


def check(
    folder: Path, ranks: int, iterations: int = ITERATIONS, elements: int = program.ELEMENTS
) -> None:
    """All elements are as they must be, bit by bit, and the last ranks held each of them once."""
    parts = [torch.load(folder / f"end-{rank}-{ranks}") for rank in range(ranks)]
    wanted = program.expected(iterations, elements)
    starts = np.cumsum([0, *(len(vector) for _, vector, _ in parts)])
    assert [start for start, *_ in parts] == starts[:-1].tolist()
    for number, whole in enumerate(wanted):
        found = torch.cat([part[1 + number] for part in parts]).numpy()
        assert found.tobytes() == whole.tobytes(), f"tensor {number} of {ranks} ranks"


@MORE
@pytest.mark.parametrize("lost", ["n0", "n3"])
def test_three_nodes_continue_for_four(made: list[Job], tmp_path: Path, lost: str) -> None:
    job = elastic_job(tmp_path)
    made.append(job)
    job.run((10, lose(lost)), (30, finish))
    (line,) = told(job, "shrunk")
    assert "3 nodes instead of 4, 3 ranks: " in line and "protected by rs:2+1" in line
    (line,) = told(job, "reshaped")
    assert "4 shards reshaped to 3" in line, job.story()
    (rebuilt,) = (event.fields for event in job.events if event.kind == "rebuilt")
    (reshaped,) = (event.fields for event in job.events if event.kind == "reshaped")
    assert rebuilt["bytes_decoded"] > 0 and reshaped["storage_bytes_read"] == 0
    assert not told(job, "from_disk") and not told(job, "salvaging"), job.story()
    check(tmp_path, 3)


@MORE
def test_nodes_are_lost_one_after_the_other(made: list[Job], tmp_path: Path) -> None:
    job = elastic_job(tmp_path)
    made.append(job)

    def lose_once_protected(job: Job) -> None:
        """The second loss comes when the first is made up for."""
        assert job.supervisor.standing.protected is not None
        lose("n1")(job)

    job.run((10, lose("n0")), (30, lose_once_protected), (45, finish))
    first, second = told(job, "reshaped")
    assert "4 shards reshaped to 3" in first and "3 shards reshaped to 2" in second, job.story()
    check(tmp_path, 2)


@MORE
@MORE
def test_a_node_is_lost_while_the_snapshot_of_the_new_layout_has_no_parity(
    made: list[Job], tmp_path: Path
) -> None:
    """The old layout's parity makes up for both losses together."""
    job = elastic_job(tmp_path, protect="rs:2+2")
    job.at_event = {"reshaped": lose("n1")}
    made.append(job)
    job.run((10, lose("n0")), (30, finish))
    check(tmp_path, 2)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("shrunk", marks=MORE),
        pytest.param("restoring", marks=MORE),
        pytest.param("trainers_started", marks=MORE),
        pytest.param("reshaped", marks=MORE),
    ],
)
def test_a_supervisor_that_ends_meanwhile_is_followed_by_one_that_continues(
    made: list[Job], tmp_path: Path, kind: str
) -> None:
    job = elastic_job(tmp_path)
    made.append(job)

    def lose_and_interrupt(job: Job) -> None:
        job.at_event = {kind: Job.interrupt}
        lose("n2")(job)

    with pytest.raises(asyncio.CancelledError):
        job.run((10, lose_and_interrupt))
    job.run((20, finish))
    assert len(told(job, "shrunk")) == 1, job.story()
    check(tmp_path, 3)


@pytest.mark.parametrize(
    ("nodes", "spares", "per_node", "protect"),
    [
        pytest.param(3, 1, 1, "rs:2+1", id="fewer"),
        pytest.param(6, 0, 1, "rs:3+1", id="more", marks=MORE),
        pytest.param(4, 0, 2, "xor:4", id="other ranks and scheme", marks=MORE),
    ],
)
def test_the_same_job_is_started_again_with_other_ranks(
    made: list[Job], tmp_path: Path, nodes: int, spares: int, per_node: int, protect: str
) -> None:
    first = elastic_job(tmp_path)
    made.append(first)
    with pytest.raises(asyncio.CancelledError):
        first.run((10, Job.interrupt))
    again = elastic_job(
        tmp_path, nodes, spares=spares, ranks_per_node=per_node, protect=protect, name=first.name
    )
    made.append(again)
    again.run((30, finish))
    assert told(again, "reshaped"), again.story()
    check(tmp_path, nodes * per_node)


@MORE
def test_a_job_without_parity_changes_its_ranks_twice(made: list[Job], tmp_path: Path) -> None:
    """The oldest layout is gone by then: it would be taken for the one to be reshaped."""
    changes: dict[str, Any] = {"protect": "none"}
    for nodes, until in ((4, 10), (2, 20)):
        job = elastic_job(tmp_path, nodes, spares=4 - nodes, **changes)
        made.append(job)
        changes["name"] = job.name
        with pytest.raises(asyncio.CancelledError):
            job.run((until, Job.interrupt))
    job = elastic_job(tmp_path, **changes)
    made.append(job)
    job.run((40, finish))
    (restoring,) = (event.fields for event in job.events if event.kind == "restoring")
    assert restoring["iteration"] > 10 and told(job, "reshaped"), job.story()
    check(tmp_path, 4)


@MORE
def test_captures_wait_for_the_memory_of_a_second_slot(made: list[Job], tmp_path: Path) -> None:
    elements, iterations = 36_000_000, 30
    flags = {"elements": elements, "iterations": iterations, "seconds": 0.3}
    job = elastic_job(tmp_path, 2, protect="xor:2", command_flags=flags)
    made.append(job)
    job.run((25, finish))
    assert "memory of a further slot" in told(job, "held")[0] and told(job, "released"), job.story()
    assert len(told(job, "committed")) >= 3, job.story()
    check(tmp_path, 2, iterations, elements)


def arenas(job: Job, node: str) -> list[Path]:
    folder = job.cluster.node_dir(node)
    return sorted(path for kind in ("arena", "source") for path in folder.glob(f"*.{kind}"))


@MORE
def test_another_model_is_refused_and_memory_kept(made: list[Job], tmp_path: Path) -> None:
    job = elastic_job(tmp_path)
    made.append(job)
    with pytest.raises(asyncio.CancelledError):
        job.run((10, Job.interrupt))
    job.command = command(tmp_path, elements=program.ELEMENTS + 1)
    with pytest.raises(LayoutMismatchError, match=r"momentum has the shape \[100004\]"):
        job.run((30, finish))
    names = [path.name for node in job.cluster.nodes() for path in arenas(job, node)]
    assert names == [f"pp0-tp0-dp{rank}-ep0.arena" for rank in range(4)]
    job.command = command(tmp_path)
    job.run((30, finish))
    assert not told(job, "from_scratch"), job.story()
    check(tmp_path, 4)


@MORE
def test_what_was_drained_serves_if_memory_cannot(made: list[Job], tmp_path: Path) -> None:
    """Without parity the job grows again, and loses nothing by that."""
    disk: dict[str, Any] = {"drain_dir": tmp_path / "drains", "drain_interval": 4}
    flags = {"iterations": 1200}
    job = elastic_job(tmp_path, 2, protect="none", command_flags=flags, **disk)
    made.append(job)
    job.at_event = {"drained": lose("n1"), "reshaped": revive("n1"), "grown": finish}
    job.run()
    first, second = told(job, "reshaped")
    assert "2 shards reshaped to 1" in first and "1 shards reshaped to 2" in second, job.story()
    last = [e for e in job.events if e.kind == "restoring"][-1]
    assert last.fields["iterations_lost"] == 0, job.story()
    check(tmp_path, 2, 1200)


def test_a_job_grows_when_its_node_is_back(made: list[Job], tmp_path: Path) -> None:
    """No iteration is lost: the boundary was captured.  Three nodes have further arguments."""
    iterations, fewer = 1200, tmp_path / "fewer"
    fewer.mkdir()
    job = elastic_job(tmp_path, command_flags={"iterations": iterations, "multiple": 4})
    job.more["shapes"] = {3: ("--folder", str(fewer), "--multiple", "1")}
    made.append(job)
    rules = []

    def note_rule_and_finish(job: Job) -> None:
        rules.append(job.supervisor.state.record.rank_rule)
        finish(job)

    job.at_event = {"grown": note_rule_and_finish}
    job.run((10, lose("n1")), (40, revive("n1")))
    (line,) = told(job, "grown")
    assert "continuing with 4 instead of 3, 4 ranks" in line, job.story()
    assert "3 shards reshaped to 4" in told(job, "reshaped")[1], job.story()
    last = [e for e in job.events if e.kind == "restoring"][-1]
    assert last.fields["iterations_lost"] == 0, job.story()
    starts = ["which --shapes gives for 3 nodes" in t for t in told(job, "trainers_started")]
    assert starts == [False, True, False], job.story()
    assert rules == [RankRule(4, 1, program.BATCH)], "growth is by the rule of the command itself"
    samples = (fewer / "samples-0").read_text(), (tmp_path / "samples-0").read_text()
    done = [json.loads(line)[0] for lines in samples for line in lines.splitlines()]
    assert samples[0] and sorted(set(done)) == list(range(1, iterations + 1))
    check(tmp_path, 4, iterations)


@MORE
def test_arguments_that_ranks_refuse_are_named_and_memory_is_kept(
    made: list[Job], tmp_path: Path
) -> None:
    job = elastic_job(tmp_path, command_flags={"multiple": 4})
    job.more["shapes"] = {3: ("--elements", "many")}
    made.append(job)
    with pytest.raises(RestartBudgetError, match=r"with --elements many, which --shapes gives"):
        job.run((10, lose("n1")))
    job.more["shapes"] = {3: ("--multiple", "1")}
    job.run((30, finish))
    assert told(job, "reshaped") and not told(job, "from_scratch"), job.story()
    check(tmp_path, 3)


def evacuate(job: Job, node: str) -> int:
    words = ["evacuate", node, "--job", job.name, "--arena-dir", str(job.cluster.root)]
    return main([*words, "--wait-seconds", "100"])


@pytest.mark.all_layouts
def test_a_node_is_evacuated_without_a_spare(made: list[Job], tmp_path: Path) -> None:
    """Training stands at a captured boundary until three nodes have what four had."""
    iterations = 1200
    job = elastic_job(tmp_path, command_flags={"iterations": iterations})
    made.append(job)
    job.at_event = {"reshaped": finish}
    codes = []
    job.run((10, lambda job: codes.append(evacuate(job, "n1"))))
    assert codes == [0], job.story()
    assert told(job, "evacuated") == [
        "n1 is evacuated: 3 nodes have its state, 0 iterations are lost"
    ]
    (line,) = told(job, "shrunk")
    assert "n1 leaves: continuing with 3 instead of 4, 3 ranks: n0, n2, n3" in line, job.story()
    assert not told(job, "node_lost") and "n1" in job.supervisor.members.seats.evacuated, (
        job.story()
    )
    done = [json.loads(line)[0] for line in (tmp_path / "samples-0").read_text().splitlines()]
    assert done == list(range(1, iterations + 1)), "no iteration is done twice"
    check(tmp_path, 3, iterations)


@MORE
def test_a_node_that_was_to_leave_stays_when_another_is_lost(
    made: list[Job], tmp_path: Path
) -> None:
    job = elastic_job(tmp_path, command_flags={"iterations": 1200})
    made.append(job)
    job.at_event = {"shrunk": lose("n2"), "reshaped": finish}
    codes = []
    job.run((10, lambda job: codes.append(evacuate(job, "n1"))))
    assert codes == [1], job.story()
    (line,) = told(job, "not_evacuated")
    assert "another node was lost meanwhile" in line, job.story()
    assert job.supervisor.members.active == ["n0", "n1", "n3"], job.story()
    check(tmp_path, 3, 1200)


@pytest.mark.all_layouts
def test_ranks_may_decline_a_snapshot_of_another_layout(made: list[Job], tmp_path: Path) -> None:
    job = elastic_job(tmp_path, command_flags={"declines": 3})
    made.append(job)
    job.run((10, lose("n1")), (30, finish))
    assert told(job, "declined") and not told(job, "reshaped"), job.story()
    check(tmp_path, 3)


@pytest.mark.all_layouts
def test_a_job_that_may_not_shrink_stops(made: list[Job], tmp_path: Path) -> None:
    job = elastic_job(tmp_path, on_no_spare="stop")
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((10, lose("n1")))
