"""The planner: closed forms against failures that are simulated, and what it refuses."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.cli.plan.command import add_arguments, planned_job
from megatron_ft.cli.plan.model import Forecast, PlannedJob, candidates, check, recommend
from megatron_ft.cli.plan.simulate import Strike, monte_carlo, simulate, strikes
from megatron_ft.cli.plan.sources import of_job, of_sacct, of_trace
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import RankPlace, plan_stripes

GIB = 1 << 30
RULE = {"copy": 2.2 * GIB, "digest": 2.5 * GIB, "encode": 2.2 * GIB, "link": 10.0 * GIB}


def a_job(**changed: Any) -> PlannedJob:
    given: dict[str, Any] = {
        "shard_bytes": GIB,
        "nodes": 16,
        "ranks_per_node": 8,
        "host_bytes": 1000 * GIB,
        "iteration": 10.0,
        "mtbf": 36000.0,
        "node_share": 1.0,
    }
    return PlannedJob(**{**given, **RULE, **changed})


def forecast(scheme: str, **changed: Any) -> Forecast:
    return check(a_job(**changed), Scheme.parse(scheme))


@pytest.mark.parametrize(
    ("scheme", "nodes", "mtbf", "share"),
    [
        pytest.param("xor:4", 8, 600, 1.0, marks=pytest.mark.all_layouts),
        ("xor:4", 11, 400, 0.8),
        pytest.param("replica:2", 12, 300, 1.0, marks=pytest.mark.all_layouts),
        pytest.param("rs:6+2", 16, 200, 1.0, marks=pytest.mark.all_layouts),
        ("rs:2+2", 12, 60, 0.7),
        ("none", 4, 12000, 0.05),
    ],
)
def test_survival_is_the_same_by_formula_and_by_counting(
    scheme: str, nodes: int, mtbf: float, share: float
) -> None:
    one = forecast(scheme, nodes=nodes, mtbf=float(mtbf), node_share=share, run=20.0 * mtbf)
    runs = monte_carlo(replace(one, iterations=1), 12_000, seed=3)
    saved = mean(not run.from_disk for run in runs)
    assert 0.2 < one.survival < 0.95, f"{one.survival} says nothing"
    assert abs(saved - one.survival) <= 0.01


@settings(max_examples=40, derandomize=True)
@given(
    scheme=st.sampled_from(("rs:3+1", "rs:6+2", "replica:2", "none")),
    nodes=st.integers(8, 64).map(lambda half: 2 * half),
    mtbf=st.floats(900, 400_000),
    share=st.sampled_from((0.0, 0.2, 1.0)),
    iteration=st.floats(1, 60),
    shard=st.floats(0.1, 4),
    restart=st.floats(5, 120),
    drain=st.floats(600, 7200),
    spares=st.sampled_from((-1, -1, 1, 3)),
)
def test_ettr_is_within_five_percent_of_the_simulated_one(
    scheme: str, shard: float, mtbf: float, **given: Any
) -> None:
    share = given.pop("share")
    job = a_job(shard_bytes=int(shard * GIB), mtbf=mtbf, node_share=share, run=40 * mtbf, **given)
    one = check(job, Scheme.parse(scheme))
    assume(job.mtbf > one.work + one.safe_seconds and one.memory_mtbf > 2 * job.drain)
    assume(one.spare_missing < 0.25)
    simulated = mean(run.ettr for run in monte_carlo(one, 60, seed=1))
    assert abs(one.ettr / simulated - 1) <= 0.05


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_too_few_spares_cost_what_is_simulated(spares: int) -> None:
    hours = 3600.0
    one = forecast("rs:3+1", spares=spares, replacement=12 * hours, run=20_000 * hours)
    simulated = mean(run.ettr for run in monte_carlo(one, 6, seed=2))
    assert one.ettr < 0.98 and abs(one.ettr / simulated - 1) <= 0.05


def test_a_simulated_run_by_hand() -> None:
    instant = dict.fromkeys(RULE, math.inf)
    one = forecast("xor:4", nodes=4, iteration=10.0, run=1000.0, restart=20.0, spares=0,
                   replacement=100.0, drain=150.0, **instant)  # fmt: skip
    one = replace(one, iterations=2)
    assert one.repair_seconds == 30 and one.safe_seconds == one.cost_seconds == 0
    # 100 of 105 s are saved; training continues at 125 s.
    assert simulate(one, [Strike(105.0)]).ettr == (100 + 875) / 1000
    # The node is replaced 100 s later, rebuilt 30 s and started 20 s after that.
    assert simulate(one, [Strike(105.0, 2)]).ettr == (100 + 745) / 1000
    # A failure meanwhile loses nothing; one of another node in time goes back to the drained 0 s.
    assert simulate(one, [Strike(105.0, 2), Strike(110.0)]).ettr == (100 + 745) / 1000
    assert simulate(one, [Strike(105.0, 2), Strike(120.0, 3)]) == (730 / 1000, 1)
    assert simulate(one, [Strike(105.0, 2), Strike(136.0, 3)]).from_disk == 0
    # 170 s are drained at 150 s.
    assert simulate(one, [Strike(175.0, 2), Strike(176.0, 3)]).ettr == (150 + 674) / 1000
    # A snapshot counts 8 s after its iteration, not before.
    slow = replace(one, job=replace(one.job, digest=GIB / 8))
    assert simulate(slow, [Strike(107.0)]).ettr == (80 + 873) / 1000
    assert simulate(slow, [Strike(109.0)]).ettr == (100 + 871) / 1000


@pytest.mark.parametrize("per_domain", [1, 2])
@pytest.mark.parametrize("nodes", [8, 19, 33])
def test_sets_are_those_that_a_job_makes(nodes: int, per_domain: int) -> None:
    ranks = [
        RankPlace(n, f"dp{n}", f"n{n}", f"d{n // per_domain}", 0, (), 100) for n in range(nodes)
    ]
    made = sorted(len(stripe.nodes) for stripe in plan_stripes(ranks, Scheme.parse("rs:6+2")))
    assert sorted(forecast("rs:6+2", nodes=nodes, nodes_per_domain=per_domain).set_sizes) == made


def test_chance_of_a_fatal_chain_in_one_set() -> None:
    one = forecast("xor:8", nodes=8, mtbf=1000.0)
    chance = 1 - math.exp(-7 / 8 * one.repair_seconds / 1000)
    assert one.fatal_chance == pytest.approx(chance, rel=1e-9)


@pytest.mark.parametrize("mtbf", [3600.0, 36000.0, 360000.0])
def test_no_other_interval_is_much_better(mtbf: float) -> None:
    one = forecast("rs:3+1", mtbf=mtbf, iteration=1.0)
    others = (replace(one, iterations=n).ettr for n in range(1, 8 * one.interval))
    assert 1 - one.ettr <= 1.02 * (1 - max(others))


def test_no_snapshot_is_due_before_the_last_is_safe() -> None:
    one = forecast("rs:2+2", mtbf=3600.0, link=0.1 * GIB)
    assert one.safe_seconds > 120 and 0 <= one.work - one.safe_seconds < one.job.iteration


def test_spares_leave_one_for_nearly_every_loss() -> None:
    one = forecast("rs:3+1")
    assert one.spare_missing <= 0.01 < forecast("rs:3+1", spares=one.spares - 1).spare_missing
    assert forecast("rs:3+1", node_share=0.0).spares == 0


@settings(max_examples=200)
@given(
    nodes=st.integers(1, 40),
    host=st.floats(10, 60),
    text=st.sampled_from(("rs:6+2", "rs:2+2", "replica:2", "xor:4", "replica:3", "none")),
    per_domain=st.integers(1, 4),
)
def test_what_is_named_as_possible_is_possible(
    nodes: int, host: float, text: str, per_domain: int
) -> None:
    job = a_job(nodes=nodes, host_bytes=host * GIB, nodes_per_domain=per_domain)
    best = recommend(candidates(job))
    assert best is None or best.fits
    try:
        assert check(job, Scheme.parse(text)).fits
    except ConfigError as error:
        named = str(error).partition("the nearest possible is ")[2].partition(",")[0]
        if named:
            assert check(job, Scheme.parse(named)).fits
        else:
            assert "even none needs 16.00 GiB a node" in str(error) and host < 16.01


PLAN = ("plan", "--parameters", "70e9", "--nodes", "64", "--host-memory-gib", "512",
        "--iteration-seconds", "10", "--runs", "50")  # fmt: skip


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command; its words, also those of an error."""

    def run(*more: str, fails: bool = False) -> str:
        try:
            code = cli.main([*PLAN, *more])
        except SystemExit as left:
            code = int(left.code or 0)
        shown = capsys.readouterr()
        assert code == (2 if fails else 0), shown.err
        return shown.err if fails else shown.out

    return run


def test_a_plan_in_words_and_for_programs(plan: Callable[..., str]) -> None:
    shown, found = plan("--protect", "rs:6+2"), json.loads(plan("--protect", "rs:6+2", "--json"))
    assert "32.63 GiB for arenas" in shown and "2 of 8 nodes at once in each of 8 sets" in shown
    assert found["shard_bytes"] == math.ceil(12 * 70e9 / 512) and found["scheme"] == "rs:6+2"
    assert found["node_bytes"] / GIB == pytest.approx(32.63, abs=0.01)
    assert found["encode_bytes"] == pytest.approx(found["shard_bytes"] * 8 * 7 / 6)
    assert found["ettr_range"][0] <= found["ettr"] <= found["ettr_range"][1]
    assert found["ettr_simulated"] == pytest.approx(found["ettr"], rel=0.01)
    assert found["mtbf"] == pytest.approx(54 * 24 * 16384 / 419 / 512 * 3600)
    half = json.loads(plan("--protect", "rs:6+2", "--json", "--optimizer", "adam-bf16"))
    assert half["shard_bytes"] == math.ceil(8 * 70e9 / 512)


def test_the_recommended_scheme_fits(plan: Callable[..., str]) -> None:
    found = json.loads(plan("--host-memory-gib", "27", "--json"))
    assert found["scheme"] == "rs:15+1"
    assert {one["scheme"]: one["fits"] for one in found["schemes"]}["rs:7+1"] is False
    assert json.loads(plan("--host-memory-gib", "25", "--json"))["scheme"] == "none"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nodes", "0"), "--nodes: 0: the nearest possible is 1"),
        (("--node-share", "1.5"), "--node-share: 1.5: the nearest possible is 1"),
        (("--iteration-seconds", "nan"), "--iteration-seconds: nan: the nearest possible is above"),
        (("--protect", "raid:5"), "write xor:N, rs:K\\+M, replica:R or none"),
        (("--protect", "rs:6+2", "--nodes", "7"), "--nodes 7 .* nearest possible is rs:5\\+2"),
        (("--protect", "rs:2+2", "--host-memory-gib", "40"), "48.91 GiB .* is rs:5\\+2, with 36"),
        (("--host-memory-gib", "20"), "--host-memory-gib is 20; even none needs 24.45 GiB"),
        (("--mtbf-hours", "0.001"), "--mtbf-hours 0.001: .* least possible is 0.0"),
        (("--mtbf-hours", "1", "--job", "x"), "not allowed with argument"),
    ],
)
def test_the_impossible_is_refused_by_name(
    plan: Callable[..., str], flags: tuple[str, ...], words: str
) -> None:
    assert re.search(words, plan(*flags, fails=True))


def test_the_forecast_agrees_with_a_long_trace(plan: Callable[..., str], tmp_path: Path) -> None:
    failures = islice(strikes(forecast("rs:6+2", nodes=64, node_share=0.5), random.Random(7)), 3000)
    text = "\n".join(f"{s.at / 3600},{s.node if s.node >= 0 else ''}" for s in failures)
    (tmp_path / "trace").write_text(f"# hours,node\n{text}\n")
    found = json.loads(plan("--trace", str(tmp_path / "trace"), "--protect", "rs:6+2", "--json"))
    assert found["mtbf"] == pytest.approx(36000, rel=0.05)
    assert found["node_share"] == pytest.approx(0.5, abs=0.03)
    assert found["ettr"] < 0.999 and abs(found["ettr"] / found["ettr_on_trace"] - 1) < 0.05


def test_names_of_nodes_in_a_trace_are_neighbours(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("2,n10\n1,n9  # the first\n\n4,\n")
    found = of_trace(tmp_path / "t", 8)
    assert found.strikes == [(3600, 0), (7200, 1), (14400, -1)]
    assert (found.mtbf, found.node_share) == (4800, 2 / 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,1", "line 1: 'x,1' is not a failure"),
        ("1\n-2,3", "line 2: -2 hours"),
        ("1,a\n2,b\n3,c", "names 3 nodes, --nodes is 2; the nearest possible is 3"),
        ("0,1", "no failure after hour 0"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=words):
        of_trace(tmp_path / "t", 2)


def test_node_hours_of_sacct(tmp_path: Path) -> None:
    rows = ["JobID|State|ElapsedRaw|NNodes", "1|COMPLETED|3600|8", "2|NODE_FAIL|7200|4",
            "2.batch|FAILED|7200|1", "3|FAILED|1800|8", "4|CANCELLED by 1000|1800|8"]  # fmt: skip
    (tmp_path / "s").write_text("\n".join(rows))
    found = of_sacct(tmp_path / "s", 4)
    assert (found.mtbf, found.node_share) == (24 * 3600 / 2 / 4, 0.5)
    (tmp_path / "s").write_text("\n".join(rows[:2]))
    with pytest.raises(ConfigError, match="none of 1 jobs failed in 8 node hours"):
        of_sacct(tmp_path / "s", 4)
    (tmp_path / "s").write_text("JobID|State\n1|FAILED\n")
    with pytest.raises(ConfigError, match="not the output of `sacct -X"):
        of_sacct(tmp_path / "s", 4)


def test_incidents_of_a_job(tmp_path: Path) -> None:
    def line(at: float, kind: str, **fields: Any) -> str:
        every = {"time": 5000 + at, "at": at, "job": "u", "text": kind, "incarnation": 1}
        return json.dumps({**every, "kind": kind, **fields}) + "\n"

    begun = line(0, "supervising") + line(4, "training", iteration=0)
    cause = {"node": "n1", "reached": 20, "ago": 0.0}
    failed = line(100, "incarnation_ended", cause="a trainer was killed by signal 9", **cause)
    failed += line(106, "training", iteration=18)
    lost = line(190, "incarnation_ended", cause="lost", **cause) + line(190, "node_lost", node="n1")
    lost += line(200, "training", iteration=40)
    (tmp_path / "j").mkdir(mode=0o700)
    events = tmp_path / "j" / "events.jsonl"
    events.write_text(begun + failed + lost)
    events.chmod(0o600)
    found = of_job("j", tmp_path)
    assert (found.mtbf, found.node_share, found.restart) == (100, 0.5, 8)
    said = argparse.ArgumentParser()
    add_arguments(said)
    flags = said.parse_args([*PLAN[1:], "--job", "j", "--state-dir", str(tmp_path)])
    assert planned_job(flags, found).restart == 8 and planned_job(flags, found).mtbf == 100
    events.write_text(begun)
    with pytest.raises(ConfigError, match="no incident .* --mtbf-hours"):
        of_job("j", tmp_path)
