"""For which scripts a snapshot may stand in the place of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.client_state import CLIENT, NAME, ClientState, set_client_state


@given(st.booleans(), st.booleans(), st.lists(st.text(min_size=1), max_size=2))
def test_memory_serves_only_a_script_that_is_known_to_follow_it(
    follows: bool, provided: bool, outside: list[str]
) -> None:
    engine, later = _engine(None), _engine(None)
    if provided:
        set_client_state(engine, lambda: {})
    snapshot = ClientState(engine).state_dict() | {"outside": outside}
    said = ClientState(later, follows=follows).objection({NAME: snapshot})
    assert (said == "") == (provided or (follows and not outside))
    assert not said or "set_client_state" in said
    assert all(name in said for name in outside) or not said


def _engine(optimizer: Any, schedule: Any = None) -> Any:
    return SimpleNamespace(basic_optimizer=optimizer, lr_scheduler=schedule, global_steps=3)


def _optimizer() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def test_a_schedule_that_the_engine_does_not_have_is_seen() -> None:
    """Also one that is made behind the load, when training begins."""
    optimizer = _optimizer()
    part = ClientState(_engine(optimizer), follows=True)
    assert not part.objection()
    schedule = _schedule(optimizer)
    assert "a learning rate scheduler that deepspeed.initialize did not get" in part.objection()
    assert not ClientState(_engine(optimizer, schedule), follows=True).objection()


def test_a_second_optimizer_is_seen_when_it_steps() -> None:
    own, other = _optimizer(), _optimizer()
    part = ClientState(_engine(own), follows=True)
    handle = part.watch_optimizers(lambda: own)
    try:
        own.step()
        assert not part.objection()
        other.step()
        assert "a second optimizer (SGD)" in part.objection()
    finally:
        handle.remove()


def test_the_state_of_an_adapter_serves_only_that_adapter() -> None:
    """A script that loads on its own would leave all that the adapter restores where it is."""
    engine = _engine(None)
    set_client_state(engine, lambda: {CLIENT: "one"})
    objects = {NAME: ClientState(engine).state_dict()}
    later = ClientState(_engine(None), follows=True)
    assert "has its state from one, and what asks for it is the script" in later.objection(objects)
    later.client = "one"
    assert later.objection(objects) == ""
    own = {NAME: ClientState(_engine(None), follows=True).state_dict()}
    assert "has its state from the script, and what asks for it is one" in later.objection(own)


def test_what_an_adapter_refuses_stays_refused_in_the_snapshot() -> None:
    engine = _engine(None)
    set_client_state(engine, lambda: {})
    part = ClientState(engine)
    part.refuse("its batches are made by chance")
    objects = {NAME: part.state_dict()}
    assert part.objection() == "its batches are made by chance"
    later = ClientState(_engine(None), follows=True)
    assert later.objection(objects) == "its batches are made by chance"
