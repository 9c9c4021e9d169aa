"""Whole cases of `megatron-ft chaos`: a few of its table, and what it says of one that fails."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.cli.chaos import command as chaos
from megatron_ft.cli.chaos.cases import Case
from megatron_ft.cli.chaos.judge import judge
from megatron_ft.cli.chaos.runner import CaseOutcome, ChaosSettings, oracle_traces, run_case
from megatron_ft.cli.chaos.trace import Lines
from megatron_ft.cli.main import main
from tests.support.chaos_cluster import equipment
from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def settings(
    warm_host: WarmHost, no_process_left: None, tmp_path_factory: pytest.TempPathFactory
) -> ChaosSettings:
    # Not pytest's folder, whose length depends on the test's name: socket paths are short.
    folder = tmp_path_factory.mktemp("c")
    flags = {"--nodes": 2, "--lease-seconds": 2.0}
    return ChaosSettings(folder, flags, iterations=600, **equipment(warm_host))


@pytest.fixture(scope="module")
def oracle(settings: ChaosSettings) -> dict[int, Lines]:
    return oracle_traces(settings)


def run(text: str, settings: ChaosSettings, oracle: dict[int, Lines]) -> CaseOutcome:
    outcome = run_case(Case.parse(text), settings, oracle)
    assert outcome.verdict.good, chaos.failure(outcome, settings)
    return outcome


@pytest.mark.parametrize(
    ("case", "result"),
    [
        pytest.param("encode.half:encoder:kill:1", "parity", marks=pytest.mark.all_layouts),
        ("restore.half:trainer:kill:1", "parity"),
        pytest.param(
            "commit.between:supervisor:kill:0", "own memory", marks=pytest.mark.all_layouts
        ),
        pytest.param("drain.manifest:drain:kill:0", "continued", marks=pytest.mark.all_layouts),
        pytest.param("commit.last:node:kill:1:nodisk", "refused", marks=pytest.mark.all_layouts),
    ],
)
def test_a_case_ends_as_promised(
    settings: ChaosSettings, oracle: dict[int, Lines], case: str, result: str
) -> None:
    outcome = run(case, settings, oracle)
    assert chaos.in_words(outcome).split(", ")[-1] == result
    assert outcome.verdict.compared > 0 and not outcome.folder.exists()


@pytest.mark.parametrize(
    ("case", "event"),
    [
        ("smp.committed:smp:exception:0", "smp_restarted"),
        ("commit.first:supervisor:exception:0", "coordinator_failed"),
    ],
)
def test_a_mistake_of_ours_ends_what_made_it_and_nothing_waits_for_an_answer(
    settings: ChaosSettings, oracle: dict[int, Lines], case: str, event: str
) -> None:
    outcome = run(case, settings, oracle)
    kinds = [one.kind for one in outcome.story.events]
    assert event in kinds and "node_lost" not in kinds, outcome.tail


@pytest.mark.all_layouts
def test_more_losses_than_parity_take_the_disk_and_a_failure_says_how_to_repeat_it(
    settings: ChaosSettings, oracle: dict[int, Lines]
) -> None:
    outcome = run("capture.copied:trainer:kill:2", settings, oracle)
    assert outcome.verdict.restores[-1].source == "disk"
    assert chaos.as_json(outcome)["restored"][-1]["source"] == "disk"
    # The same job, had a node that nobody struck been given up, and had a weight been wrong.
    lines = [*oracle[0][:4], oracle[0][4] | {"state": "other"}, *oracle[0][5:]]
    story = replace(outcome.story, strikes=outcome.story.strikes[:1], oracle={**oracle, 0: lines})
    wrong = replace(outcome, story=story, verdict=judge(story))
    told = chaos.failure(wrong, settings)
    assert "nothing had struck it" in told and "rank 0 iteration 5: state differ" in told
    assert "megatron-ft chaos --case capture.copied:trainer:kill:2 --seed 0 --nodes 2" in told
    assert chaos.in_words(wrong) == "FAILED" and chaos.as_json(wrong)["problems"]


@pytest.mark.all_layouts
def test_a_command_of_the_user_is_run_and_compared_by_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "megatron_ft.cli.chaos.training", "--iterations", "200"]
    words = ["chaos", "--case", "encode.done:trainer:kill:0", "--json", str(found)]
    assert main([*words, "--", *command, "--seconds", "0.03"]) == 0, capsys.readouterr().out
    assert "1 cases, 0 failed" in capsys.readouterr().out
    (case,) = json.loads(found.read_text())
    assert case["compared"] >= 400 and case["restored"][0]["source"] == "own memory"


def test_a_call_that_is_refused_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["chaos", "--case", "encode.done:trainer:kill"]) == 2
    assert "is not a case; write <point>" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_points_victims_and_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--list"]) == 0
    assert "half of the parity written" in capsys.readouterr().out
    assert chaos.listing().count("\n") > 60
