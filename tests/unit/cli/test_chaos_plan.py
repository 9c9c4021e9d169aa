"""Points, cases and the plan that a process finds: what strikes whom, and how often."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_ft
from megatron_ft.cli.chaos.cases import FAULTS, VICTIMS, Case, Chance, all_cases, draw, reachable
from megatron_ft.cli.chaos.command import listing
from megatron_ft.core import fault_points
from megatron_ft.core.environment import NODE
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_plan import (
    ARMED_NAME,
    SOCKET_NAME,
    FaultPlan,
    InjectedError,
    PointFault,
    arm,
)
from megatron_ft.core.fault_points import POINTS

SOURCES = Path(megatron_ft.__file__).parent


def strike_here(folder: Path, **fields: object) -> fault_points.Callable[[str], None]:
    FaultPlan((PointFault("s", "encode.half", action="exception", **fields),)).write(folder)  # type: ignore[arg-type]
    (folder / ARMED_NAME).touch()
    return arm(str(folder))


def test_every_point_is_reached_somewhere_and_every_place_has_a_line() -> None:
    texts = [
        path.read_text()
        for path in SOURCES.rglob("*.py")
        if path.name != "fault_points.py" and "chaos" not in path.relative_to(SOURCES).parts
    ]
    lines = [line for text in texts for line in text.splitlines()]
    places = [line for line in lines if "reach(" in line or "SlotState." in line]
    named = set(re.findall(r'"([a-z]+(?:\.[a-z_]+)+)"', "".join(places)))
    assert named == set(POINTS)
    assert all(name in listing() for name in (*POINTS, *VICTIMS, *FAULTS))


def test_without_a_plan_a_point_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fault_points.VARIABLE, raising=False)
    monkeypatch.setattr(fault_points, "_strike", fault_points._first)
    fault_points.reach("encode.half")
    assert fault_points._strike is None
    fault_points.reach("encode.half")


def test_the_environment_arms_a_process_when_it_reaches_its_first_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strike_here(tmp_path)
    monkeypatch.setenv(fault_points.VARIABLE, str(tmp_path))
    monkeypatch.setattr(fault_points, "_strike", fault_points._first)
    with pytest.raises(InjectedError, match="encode.half"):
        fault_points.reach("encode.half")


def test_a_strike_is_for_the_nth_arrival_and_for_one_process_of_the_job(tmp_path: Path) -> None:
    reach = strike_here(tmp_path, nth=3)
    for point in ("encode.half", "encode.done", "encode.half"):
        reach(point)
    with pytest.raises(InjectedError):
        reach("encode.half")
    again = arm(str(tmp_path))
    for _ in range(4):
        again("encode.half")


def test_a_strike_waits_until_the_plan_is_armed(tmp_path: Path) -> None:
    reach = strike_here(tmp_path)
    (tmp_path / ARMED_NAME).unlink()
    reach("encode.half")
    (tmp_path / ARMED_NAME).touch()
    with pytest.raises(InjectedError):
        reach("encode.half")


@pytest.mark.parametrize(("fields", "strikes"), [
    ({"node": "n1"}, True), ({"node": "n2"}, False), ({"rank": 4}, True), ({"rank": 5}, False),
])  # fmt: skip
def test_a_strike_is_for_one_node_or_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: dict[str, object], strikes: bool
) -> None:
    monkeypatch.setenv(NODE, "n1")
    monkeypatch.setenv("RANK", "4")
    reach = strike_here(tmp_path, **fields)
    if strikes:
        with pytest.raises(InjectedError):
            reach("encode.half")
    else:
        reach("encode.half")


def test_who_is_at_a_point_stands_still_until_the_runner_has_answered(tmp_path: Path) -> None:
    reach = strike_here(tmp_path)
    done: list[str] = []
    with socket.socket(socket.AF_UNIX) as runner:
        runner.bind(str(tmp_path / SOCKET_NAME))
        runner.listen()

        def answer() -> None:
            connection, _ = runner.accept()
            with connection:
                assert b'"point":"encode.half"' in connection.recv(4096)
                done.append("runner")
                connection.sendall(b"go\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InjectedError):
            reach("encode.half")
        assert done == ["runner"]
        thread.join()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("encode.half:encoder:kill", "not a case"),
        ("encode.half:encoder:kill:x", "not a case"),
        ("encode.half:encoder:kill:1:disk", "not a case"),
        ("encode.hal:encoder:kill:1", "no chaos job reaches 'encode.hal'.*--list"),
        ("encode.half:encoders:kill:1", "'encoders'; there are trainer, smp"),
        ("encode.half:node:stop:1", "there are kill, return"),
        ("shrink.noted:supervisor:kill:0", "no chaos job reaches"),
        ("encode.half:trainer:exception:0", "reached by the encoder"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Case.parse(text)


@given(st.integers(0, 1 << 32), st.sampled_from([(2, 1), (4, 1), (4, 2)]))
def test_the_same_seed_draws_the_same_possible_cases(seed: int, shape: tuple[int, int]) -> None:
    nodes, parity = shape
    cases = draw(seed, 5, nodes, parity)
    assert cases == draw(seed, 5, nodes, parity)
    for case in cases:
        assert Case.parse(str(case)) == case and case.nodes_lost() <= nodes
        chance = Chance.of(case, seed, nodes)
        assert chance == Chance.of(case, seed, nodes)
        assert sorted(chance.order) == list(range(nodes))


def test_all_cases_have_every_point_process_and_fault() -> None:
    cases = all_cases(4, 2)
    assert {case.point for case in cases} == set(reachable())
    struck = {(case.victim, case.fault) for case in cases}
    assert {(v, f) for v, faults in VICTIMS.items() for f in faults} == struck
    assert {case.losses for case in cases} == {0, 1, 2, 3} and len(set(cases)) == len(cases)
    assert all(case.nodes_lost() <= 4 for case in cases)


def test_other_programs_are_needed_for_exports_fewer_nodes_and_growing_states() -> None:
    kinds = {name.partition(".")[0] for name in set(POINTS) - set(reachable())}
    assert kinds == {"export", "renewal", "reshape", "shrink"}
