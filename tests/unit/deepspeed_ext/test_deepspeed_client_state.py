"""The script's client_state in snapshots: exact, made anew, or refused with a remedy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.client_state import NAME, ClientState, set_client_state


class Engine:
    """The counters that an engine has."""

    def __init__(self, step: int = 0, rank: int = 0) -> None:
        self.global_rank, self.basic_optimizer = rank, None
        self.at(step)

    def at(self, step: int) -> None:
        """Every counter as of this step, with two micro-batches of 4 samples in each."""
        self.global_steps, self.global_samples = step, 8 * step
        self.micro_steps, self.skipped_steps = 2 * step, 1


def restored(captured: dict[str, Any], declared: dict[str, str] | None = None) -> Any:
    """What a fresh process makes of a snapshot: a problem, or the client_state."""
    engine = Engine()
    part = ClientState(engine, declared, follows=True)
    problem = part.objection({NAME: captured})
    part.load_state_dict(captured)
    engine.at(captured["step"])
    return problem or part.result()


def test_at_the_step_of_the_save_it_is_exact() -> None:
    engine = Engine(5)
    part = ClientState(engine, follows=True)
    part.given({"epoch": 2})
    assert restored(part.state_dict()) == {"epoch": 2, "global_samples": 40}


def test_behind_the_save_it_is_refused_and_the_remedy_said() -> None:
    engine = Engine(5)
    part = ClientState(engine, follows=True)
    part.given({"epoch": 2})
    engine.at(7)
    problem = restored(part.state_dict())
    assert "at step 5" in problem and "of step 7" in problem
    assert '"client_state": {"epoch": "global_steps"}' in problem
    assert "set_client_state" in problem


def test_entries_that_are_declared_are_made_anew() -> None:
    declared = {"step": "global_steps", "seen": "global_samples", "name": "constant"}
    engine = Engine(5)
    part = ClientState(engine, declared, follows=True)
    part.given({"step": 5, "seen": 40, "name": "run"})
    engine.at(7)
    found = restored(part.state_dict(), declared)
    assert found == {"step": 7, "seen": 56, "name": "run", "global_samples": 56}


def test_a_function_of_the_script_makes_it_exact() -> None:
    engine = Engine(5)
    part = ClientState(engine, follows=True)
    set_client_state(engine, lambda: {"epoch": engine.global_steps // 3})
    part.given({"epoch": 1})
    engine.at(7)
    assert restored(part.state_dict())["epoch"] == 2


@given(st.dictionaries(st.text(max_size=3), st.integers()), st.integers(0, 9), st.integers(0, 9))
def test_nothing_stale_is_ever_handed_back(entries: dict[str, int], save: int, now: int) -> None:
    engine = Engine(save)
    part = ClientState(engine, follows=True)
    part.given(entries)
    engine.at(save + now)
    found = restored(part.state_dict())
    if entries and now:
        assert isinstance(found, str)
    else:
        assert {k: v for k, v in found.items() if k != "global_samples"} == {
            k: v for k, v in entries.items() if k != "global_samples"
        }


def test_without_any_save_nothing_stands_in_the_way() -> None:
    engine = Engine(4)
    found = restored(ClientState(engine, follows=True).state_dict())
    with pytest.raises(KeyError, match='"epoch": "global_steps"'):
        found["epoch"]
    assert found.get("epoch") is None


def test_what_deepspeed_loaded_is_the_scripts_part_of_it() -> None:
    engine = Engine(5)
    part = ClientState(engine, follows=True)
    part.loaded({"epoch": 1, "ds_version": "0", "module": {}, "global_samples": 40})
    assert part.state_dict()["entries"] == {"epoch": 1}
    assert part.state_dict()["given_at"] == 5


def test_a_save_that_makes_snapshots_useless_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, other = Engine(5), Engine(5, rank=1)
    parts = [ClientState(one) for one in (engine, other)]
    with caplog.at_level(logging.WARNING):
        for part in (*parts, parts[0]):
            part.given({"epoch": 2})
    (record,) = caplog.records
    assert "'epoch'" in record.getMessage()


@pytest.mark.parametrize("declared", [{"epoch": "global_steps"}, None])
def test_no_warning_without_need(
    declared: dict[str, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(5)
    part = ClientState(engine, declared, follows=True)
    part.given({"epoch": 2} if declared else {})
    assert not caplog.records
