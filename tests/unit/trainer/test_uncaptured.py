"""What a restart would lose is named once, at the first save; the rest is not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from megatron_ft import ResumableLoader, RngState
from megatron_ft.trainer import notices
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.resumable_loader import registered
from megatron_ft.trainer.uncaptured import uncaptured
from tests.support.captures import FakeSmp, make_manager

State = dict[str, Any]


class Average:
    """Of the weights, as scripts write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def state_dict(self) -> State:
        return self.shadow

    def load_state_dict(self, content: State) -> None:
        self.shadow = content


class Stream(IterableDataset[int]):
    """Without a sampler that says what is read."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3, 4])


class Loaders:
    """Entry with all positions, as that of an Accelerator."""

    def __init__(self) -> None:
        self.every = registered

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, content: State) -> None:
        """Nothing."""


class Holder(nn.Module):
    """A model in a module that has more than the state does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(3, 3)


@pytest.fixture(autouse=True)
def own_objects() -> Iterator[None]:
    """Frozen objects are not looked at: those that other tests have left in this process."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def training() -> State:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": RngState()}


def beside(state: State, *leave_out: str) -> list[str]:
    adapted = MappingState(state, leave_out=leave_out)
    adapted.refresh()
    own = (__name__, "torch.optim", "torch.amp", "torch.utils.data", "torch.nn.modules.linear")
    return [text for text in adapted.restart_losses().objects if text.startswith(own)]


def without(state: State, name: str) -> State:
    return {key: value for key, value in state.items() if key != name}


def test_what_the_mapping_holds_is_not_named() -> None:
    state = training()
    assert beside(state) == []


KEPT: list[Any] = []


def test_what_a_function_that_gives_state_names_is_not_named() -> None:
    """Through its closure, through globals of its module, and as an argument of a partial."""
    state = training()
    schedule = state["schedule"]
    KEPT[:] = [torch.optim.lr_scheduler.StepLR(state["optimizer"], 2)]
    state["partial"] = partial(vars, torch.optim.lr_scheduler.StepLR(state["optimizer"], 2))
    state["closure"] = lambda: schedule.state_dict()
    state["module"] = lambda: KEPT[0].state_dict()
    del state["schedule"]
    found = uncaptured(state, list(state["model"].parameters()))
    KEPT.clear()
    assert [name for name in found if "StepLR" in name] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("optimizer", "torch.optim.adamw.AdamW"), ("schedule", "torch.optim.lr_scheduler.StepLR")],
)
def test_what_it_does_not_hold_is(name: str, said: str) -> None:
    state = training()
    assert beside(without(state, name)) == [said]
    assert beside(without(state, name), said.rpartition(".")[2]) == []


def test_a_second_optimizer_and_a_scaler_are_named() -> None:
    state = training()
    second = torch.optim.SGD(state["model"].parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    off = torch.amp.GradScaler("cpu", enabled=False)
    said = ["torch.amp.grad_scaler.GradScaler", "torch.optim.sgd.SGD"]
    assert beside(state) == said
    assert beside({**state, "second": second, "scaler": scaler}) == []
    assert not off.is_enabled()


def test_copies_of_weights_are_named() -> None:
    state = training()
    average = Average(state["model"])
    teacher = nn.Linear(3, 3)
    holder = Holder(state["model"])
    found = beside(state)
    assert found == [f"{__name__}.Average", "torch.nn.modules.linear.Linear (2 tensors, 48 bytes)"]
    assert beside(state, "*.Linear", f"{__name__}.*") == []
    everything = {**state, "average": average, "teacher": teacher, "head": holder.head}
    assert beside(everything) == []


def test_a_loader_that_is_read_is_named() -> None:
    data: Any = [1, 2, 3]
    state = training()
    loader: torch.utils.data.DataLoader[int] = torch.utils.data.DataLoader(data)
    reader = iter(loader)
    assert beside(state) == []
    next(reader)
    assert beside(state) == ["torch.utils.data.dataloader._SingleProcessDataLoaderIter"]

    class Position:
        def __init__(self) -> None:
            self.loader = loader

        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, content: State) -> None:
            """Nothing."""

    assert beside({**state, "position": Position()}) == []


def test_the_first_start_names_what_is_left_out(
    smp: FakeSmp, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = make_manager(smp, leave_out=["model/*bias"])
    manager.prepare({"model": nn.Linear(2, 2)})
    manager.close()
    assert "hold 1 tensors, 16 bytes: 1 of model; left out: model/bias" in capsys.readouterr().err


@pytest.mark.parametrize("batches", ["batched", "single", "stream"])
def test_a_loader_whose_position_is_captured_is_not_named(batches: str) -> None:
    data: Any = Stream() if batches == "stream" else [1, 2, 3, 4]
    own: Any = DataLoader(data, batch_size=None if batches == "single" else 2)
    state, loader = training(), ResumableLoader(own, f"captured {batches}")
    reader = iter(loader)
    next(reader)
    assert beside({**state, "loader": loader}) == []
    assert beside({**state, "position": loader._position}) == []
    assert beside({**state, "rest": Loaders()}) == []
    assert beside(state) == ["torch.utils.data.dataloader._SingleProcessDataLoaderIter"]
    again = iter(DataLoader([5, 6]))  # type: ignore[arg-type]
    next(again)
    assert beside({**state, "loader": loader}) != []


def test_a_sampler_that_is_captured_stands_for_its_loader() -> None:
    class Kept(torch.utils.data.SequentialSampler):
        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, content: State) -> None:
            """Nothing."""

    data: Any = [1, 2, 3]
    state, sampler = training(), Kept(data)
    reader = iter(DataLoader(data, batch_size=2, sampler=sampler))
    next(reader)
    assert beside(state) != []
    assert beside({**state, "sampler": sampler}) == []


@pytest.fixture
def smp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSmp]:
    monkeypatch.setattr(notices, "_said", [])
    made = FakeSmp(tmp_path)
    yield made
    if made.arena is not None:
        made.arena.close()


def test_the_first_start_says_once_what_is_captured(
    smp: FakeSmp, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = training()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            manager = make_manager(smp)
            manager.prepare(without(state, "schedule"))
            manager.close()
    said = capsys.readouterr().err
    assert said.count("hold 7 tensors, 104 bytes: 7 of model") == 1
    assert caplog.text.count("a restart loses the state of ") == 1
    assert "StepLR" in caplog.text and "leave_out" in caplog.text
