"""The training state of a DeepSpeed rank: what is captured, shared out, followed, refused."""

from __future__ import annotations

from collections import Counter, namedtuple
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers import view_of
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.master_tensors import create_state
from megatron_ft.trainer.state import host_copy, same_bits

CASES = {
    "replicas_are_shared_out": 2,
    "reloading_is_followed": 1,
    "moved_states_are_followed": 1,
    "batch_sizes_come_back": 1,
    "destroyed_engines_are_let_go": 1,
    "numbers_come_back": 1,
    "registered_optimizers_are_known": 1,
    "numbers_of_the_release_before_are_read": 1,
    "what_is_forgotten_is_found_again": 1,
    "frozen_weights_that_move_are_captured_at_the_boundary": 1,
    "foreign_objects_are_refused": 1,
    "generators_come_last": 1,
}
"""Ranks that each needs."""


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("case", CASES)
def test_state_of_an_engine(case: str, deepspeed_server: Any, tmp_path: Path) -> None:
    from tests.support.warm_host import Request

    request = Request(
        f"tests.programs.deepspeed_state_cases:{case}",
        [str(tmp_path / "disk")],
        CASES[case],
        str(tmp_path),
        60.0,
    )
    outcome = deepspeed_server.run(request)
    assert not any(outcome.codes), outcome.story()


def test_unknown_wrappers_are_named() -> None:
    engine = SimpleNamespace(optimizer=SimpleNamespace())
    with pytest.raises(ConfigError, match="SimpleNamespace as engine.optimizer is not known"):
        view_of(engine)


def test_parameters_outside_of_the_model_are_refused() -> None:
    scale = torch.nn.Parameter(torch.ones(3))
    engine = SimpleNamespace(module=torch.nn.Linear(2, 2), optimizer=torch.optim.SGD([scale]))
    with pytest.raises(ConfigError, match=r"a parameter of shape \[3\] that is not in the model"):
        view_of(engine).masters()


class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc]
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def test_state_begins_as_the_optimizer_itself_would_begin_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = FusedAdam([parameter])
    inner.param_groups[0]["step"] = 5
    create_state(inner, inner.param_groups[0], parameter)
    state = inner.state[parameter]
    assert type(state["step"]) is int and state["step"] == 5
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(not state[name].any() and not state[name].requires_grad for name in ("exp_avg",))
    state["exp_avg"].fill_(1)
    create_state(inner, inner.param_groups[0], parameter)
    assert state["exp_avg"].all(), "state that is there must stay"


Pair = namedtuple("Pair", "left right")


def test_copies_keep_classes_and_share_nothing() -> None:
    live = torch.ones(2)
    value = {"counter": Counter({3: 1}), "pair": Pair(live, [live]), "tuple": (1, live)}
    copied = host_copy(value)
    live.zero_()
    assert type(copied["counter"]) is Counter and copied["counter"] == Counter({3: 1})
    assert type(copied["pair"]) is Pair and copied["pair"].left.all()
    assert copied["pair"].right[0].all() and copied["tuple"][1].all()


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
