"""State that appears, grows or leaves while a rank trains is captured and restored exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ft.core.errors import ControlPlaneError, LayoutMismatchError, StateMismatchError
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state
from megatron_ft.trainer.sample import Sampler
from megatron_ft.trainer.state import RngState
from tests.support.captures import (
    WAIT,
    FakeSmp,
    GatedCopier,
    bits,
    capture,
    make_manager,
    saved,
    wait_finished,
)

CHANGE = 4
"""The iteration in which each program's state changes."""

LAST = 9


class Program:
    """A loop whose state changes in iteration CHANGE; ``begin`` is where it starts from."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": RngState(),
        }

    def again(self, restored: int) -> None:
        """Run what must have run before a load of a snapshot that is behind the change."""

    def change(self, iteration: int) -> None:
        """Change the state, or not."""

    def loss(self) -> torch.Tensor:
        """The loss of an iteration."""
        return self.model(torch.randn(4, 8)).square().mean()

    def step(self, iteration: int) -> None:
        """One iteration."""
        self.change(iteration)
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def bits(self) -> list[Any]:
        """All bits of the model and of the optimizer."""
        weights = [(k, bits(v)) for k, v in self.model.state_dict().items()]
        moments: list[Any] = []

        def look(where: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                moments.append((where, bits(value)))
            elif isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, one in items:
                    look(f"{where}/{key}", one)
            else:
                moments.append((where, value))

        look("", self.optimizer.state_dict())
        return [weights, moments, bits(torch.get_rng_state())]


class Unfreezing(Program):
    def change(self, iteration: int) -> None:
        self.model[0].requires_grad_(iteration >= CHANGE)


class FirstStepsSkipped(Program):
    """As a loss scaler skips them: the optimizer has no state at the first save."""

    def step(self, iteration: int) -> None:
        loss = self.loss()
        if iteration >= CHANGE:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


class AddingGroup(Program):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model[2].parameters(), lr=0.01)
        self.state["optimizer"] = self.optimizer

    def again(self, restored: int) -> None:
        if restored >= CHANGE:
            self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.1})

    def change(self, iteration: int) -> None:
        if iteration == CHANGE:
            self.again(iteration)


class ReplacingModule(Program):
    """A wider layer takes the place of two; its optimizer is made anew."""

    def again(self, restored: int) -> None:
        if restored >= CHANGE:
            torch.manual_seed(3)
            self.model[0], self.model[2] = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.state["optimizer"] = self.optimizer

    def change(self, iteration: int) -> None:
        if iteration == CHANGE:
            self.again(iteration)


class Pruning(Program):
    """A layer goes, and its moments with it."""

    def again(self, restored: int) -> None:
        if restored >= CHANGE:
            self.model[0] = torch.nn.Identity()
            self.model[2] = torch.nn.Linear(8, 8)
            torch.nn.init.ones_(self.model[2].weight)
            torch.nn.init.zeros_(self.model[2].bias)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
            self.state["optimizer"] = self.optimizer

    def change(self, iteration: int) -> None:
        if iteration == CHANGE:
            self.again(iteration)


class SecondOptimizer(Program):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.ones(300))
        self.second = torch.optim.Adam([self.more])

    def again(self, restored: int) -> None:
        if restored >= CHANGE:
            self.state |= {"more": self.more, "second": self.second}

    def step(self, iteration: int) -> None:
        super().step(iteration)
        if iteration == CHANGE:
            self.again(iteration)
        if iteration >= CHANGE:
            self.second.zero_grad()
            (self.more * torch.randn(300)).sum().backward()
            self.second.step()


class Lbfgs(Program):
    """Its state is lists of tensors that grow with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), history_size=3, max_iter=2)
        self.state["optimizer"] = self.optimizer

    def step(self, iteration: int) -> None:
        inputs = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(inputs).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)


PROGRAMS = [
    Unfreezing,
    FirstStepsSkipped,
    AddingGroup,
    ReplacingModule,
    Pruning,
    SecondOptimizer,
    Lbfgs,
]


def train(
    smp: FakeSmp, make: Callable[[], Program], until: int, capture_at: tuple[int, ...] = ()
) -> Program:
    """Train from what the job offers; at the end of these iterations a snapshot is captured."""
    program = make()
    manager = make_manager(smp)
    program.again(manager.offered_iteration)
    start = manager.load(into=program.state)
    for iteration in range(start + 1, until + 1):
        with manager.fence():
            program.step(iteration)
        if iteration in capture_at:
            save_permitted(smp, manager, program.state, iteration)
        else:
            manager.save(iteration, program.state)
    manager.close()
    return program


def go(smp: FakeSmp, manager: SnapshotManager, state: Any, iteration: int) -> None:
    """Come to the boundary at which the rank leaves its arena, and to the one when it has."""
    wait_finished(manager)
    manager.save(iteration, state)
    mover = manager._captures._arena._mover
    assert mover is not None
    mover.join(WAIT)
    manager.save(iteration, state)
    assert smp.attached.is_set(), "the rank has not gone into its new arena"


def save_permitted(smp: FakeSmp, manager: SnapshotManager, state: Any, iteration: int) -> None:
    """Capture now, in the other slot than last time; if there is no room, in a new arena."""
    if not manager._captures.is_open:
        manager.prepare(state)
    for _ in range(3):
        known = len(smp.outgrown)
        if capture(smp, manager, state, iteration, iteration % 2).captured.result(WAIT):
            return
        if len(smp.outgrown) > known:
            smp.renew()
            go(smp, manager, state, iteration)
        else:
            # Another form of the same names: the copy thread has seen it, and gives this one up.
            assert "layout has changed" in str(smp.abandoned_ids)
    raise AssertionError(smp.abandoned_ids)


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize(
    "snapshots",
    [
        (1, CHANGE - 1),
        (2, CHANGE),
        pytest.param((2, CHANGE + 2), marks=pytest.mark.all_layouts),
        pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.all_layouts),
    ],
)
def test_training_across_a_change_is_restored_exactly(
    smp: FakeSmp, make: type[Program], snapshots: tuple[int, ...]
) -> None:
    """Snapshots before the change, right before it, of it, behind it; each with others before."""
    expected = train(FakeSmp(smp.directory / "other"), make, LAST).bits()
    train(smp, make, LAST - 1, snapshots)
    smp.offer_last()
    second = train(smp, make, LAST, (LAST - 1,))
    assert smp.restored_calls[-1].sequence > 0 and not smp.unfit_errors
    assert second.bits() == expected
    smp.offer_last()
    assert train(smp, make, LAST).bits() == expected


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (AddingGroup, r"\(add_param_group\) must be there before `load`"),
        (ReplacingModule, "Layers that it had added or replaced by then must be so before `load`"),
        (SecondOptimizer, "holds more, .*before you load, and all that the run had added"),
    ],
)
def test_a_program_that_is_before_the_change_is_told_what_must_run_before_its_load(
    smp: FakeSmp, make: type[Program], line: str
) -> None:
    train(smp, make, CHANGE + 1, (CHANGE + 1,))
    smp.offer_last()
    with pytest.raises(LayoutMismatchError, match=line):
        make_manager(smp).load(into=make().state)


def test_a_list_that_grows_goes_into_ever_larger_arenas(smp: FakeSmp) -> None:
    """Each of them has room for more than twice the bytes of the one before."""
    state: dict[str, Any] = {"weight": torch.randn(100), "losses": []}
    manager = make_manager(smp)
    for iteration in range(1, 13):
        state["weight"] += 1
        state["losses"] = state["losses"] + [iteration / k for k in range(1, 6001)]
        save_permitted(smp, manager, state, iteration)
    assert 1 <= len(smp.outgrown) <= 4
    manager.close()
    smp.offer_last()
    fresh = {"weight": torch.zeros(100), "losses": []}
    # The arena is what it was, although twice as much is asked for now as a start.
    second = make_manager(smp)
    assert second.load(into=fresh) == 12 and fresh["losses"] == state["losses"]
    assert torch.equal(fresh["weight"], state["weight"])
    second.prepare(fresh)
    assert capture(smp, second, fresh, 13).captured.result(WAIT)
    second.close()


def test_a_buffer_that_grows_outgrows_arenas_seldom(smp: FakeSmp) -> None:
    state = {"seen": torch.randn(40_000)}
    manager = make_manager(smp)
    for iteration in range(1, 31):
        state["seen"] = torch.cat([state["seen"], torch.randn(4000)])
        save_permitted(smp, manager, state, iteration)
    assert 2 <= len(smp.outgrown) <= 8
    manager.close()
    smp.offer_last()
    fresh = {"seen": torch.zeros_like(state["seen"])}
    assert make_manager(smp).load(into=fresh) == 30 and torch.equal(fresh["seen"], state["seen"])


def test_a_restart_into_an_arena_that_is_too_small_trains_and_asks_for_another(
    smp: FakeSmp,
) -> None:
    state = {"weight": torch.randn(100)}
    manager = make_manager(smp)
    assert capture(smp, manager, state).captured.result(WAIT)
    manager.close()
    smp.offer_last()
    second = make_manager(smp)
    fresh = {"weight": torch.zeros(100)}
    assert second.load(into=fresh) == 1
    fresh["moments"] = torch.randn(200_000)
    save_permitted(smp, second, fresh, 2)
    assert len(smp.outgrown) == 1 and smp.abandoned_ids
    second.close()
    smp.offer_last()
    third = {"weight": torch.zeros(100), "moments": torch.zeros(200_000)}
    assert make_manager(smp).load(into=third) == 2
    assert torch.equal(third["moments"], fresh["moments"])


def test_a_rank_goes_into_its_new_arena_once_its_capture_has_ended(smp: FakeSmp) -> None:
    state = {"weight": torch.randn(1000)}
    copier = GatedCopier()
    manager = make_manager(smp, copier=copier)
    with manager.fence():
        pass
    manager.prepare(state)
    smp.grant(1)
    ticket = manager.save(1, state)
    smp.outgrown.append(1 << 20)
    old = smp.path.stat().st_ino
    source = smp.renew()
    manager.save(2, state)
    assert not smp.attached.is_set() and source.stat().st_ino == old
    copier.gate.set()
    assert ticket.captured.result(WAIT)
    go(smp, manager, state, 3)
    smp.attached.clear()
    assert smp.on_arena is not None
    smp.on_arena(smp.path)  # told twice
    manager.save(4, state)
    assert smp.attached.is_set()
    assert capture(smp, manager, state, 5).captured.result(WAIT)
    assert smp.arena is not None and smp.arena.progress() == 5
    manager.close()


def test_an_arena_that_cannot_be_opened_is_told_and_tried_again(
    smp: FakeSmp, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.randn(1000)}
    manager = make_manager(smp)
    assert capture(smp, manager, state).captured.result(WAIT)
    smp.outgrown.append(1 << 20)
    smp.renew()
    good = smp.path.read_bytes()
    smp.path.write_bytes(b"nothing")
    assert smp.on_arena is not None
    for tries in range(1, 3):
        for iteration in (2 * tries, 2 * tries + 1):
            assert manager.save(iteration, state).skipped
            mover = manager._captures._arena._mover
            assert mover is not None
            mover.join(WAIT)
        assert len(smp.unattached) == tries and not smp.attached.is_set()
        smp.on_arena(smp.path)  # as the job does every few seconds
    assert "without snapshots until it can" in caplog.text and manager._captures.is_open
    with manager.fence():
        pass
    smp.path.write_bytes(good)
    go(smp, manager, state, 6)
    assert capture(smp, manager, state, 7).captured.result(WAIT)
    manager.close()
    assert not manager._captures.is_open


class Unready:
    """A Stateful object whose state cannot be had in some iterations."""

    ready = True

    def state_dict(self) -> dict[str, Any]:
        if not self.ready:
            raise RuntimeError("not now")
        return {"n": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"n": 3}


def test_a_state_that_cannot_be_planned_behind_a_restore_ends_no_job(
    smp: FakeSmp, caplog: pytest.LogCaptureFixture
) -> None:
    part = Unready()
    state: dict[str, Any] = {"weight": torch.randn(100), "part": part}
    manager = make_manager(smp)
    assert capture(smp, manager, state).captured.result(WAIT)
    manager.close()
    smp.offer_last()
    second = make_manager(smp)
    assert second.load(into=state) == 1
    part.ready = False
    assert second.save(2, state).skipped
    assert "training continues without snapshots" in caplog.text and "not now" in caplog.text
    smp.grant(3)
    assert not second.save(3, state).captured.result(WAIT)
    part.ready = True
    assert capture(smp, second, state, 4, 1).captured.result(WAIT)
    second.close()


def test_the_first_save_of_a_restored_rank_never_raises(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.randn(100)}
    manager = make_manager(smp)
    assert capture(smp, manager, state).captured.result(WAIT)
    manager.close()

    def silent(*_: object, **__: object) -> None:
        raise ControlPlaneError("the SMP has not answered")

    monkeypatch.setattr(smp, "prepare", silent)
    with pytest.raises(ControlPlaneError):
        make_manager(smp).save(1, state)
    smp.offer_last()
    second = make_manager(smp)
    assert second.load(into=state) == 1
    assert second.save(2, state).skipped and second.save(3, state).skipped
    assert "has not answered; training continues unprotected" in caplog.text
    with second.fence():
        pass
    second.close()


def test_a_layout_that_is_planned_anew_covers_what_trains(smp: FakeSmp) -> None:
    """A parameter that joins the optimizer, and is in no module of the mapping, is never missed."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "more": torch.zeros(2)}
    manager = make_manager(smp)
    assert capture(smp, manager, state).captured.result(WAIT)
    late = torch.nn.Parameter(torch.ones(300))
    optimizer.add_param_group({"params": [late]})
    state["more"] = torch.zeros(3)
    assert not capture(smp, manager, state, 2, 1).captured.result(WAIT)
    assert "tensors that train are in no memory" in str(smp.abandoned_ids)
    state["late"] = late
    assert capture(smp, manager, state, 3, 1).captured.result(WAIT)
    manager.close()


def test_a_sample_does_not_look_behind_the_end_of_a_tensor() -> None:
    """torch would resize the program's storage for it, and so move the tensor."""
    layout = plan_state(MappingState({"moment": torch.ones(20_000)}))
    sampler, shorter = Sampler(layout.entries), torch.ones(3)
    address = shorter.data_ptr()
    for _ in range(20):
        sampler.draw({"moment": shorter})
    assert shorter.untyped_storage().nbytes() == 12 and shorter.data_ptr() == address


def test_a_buffer_that_forward_made_is_named_and_no_other_layout_is_blamed(smp: FakeSmp) -> None:
    model = torch.nn.Linear(8, 8)
    model.register_buffer("seen", torch.ones(3))
    saved(smp, {"model": model})
    with pytest.raises(StateMismatchError, match=r"holds model/seen.* before you load"):
        make_manager(smp).load(into={"model": torch.nn.Linear(8, 8)})


def test_an_optimizer_of_another_class_is_refused_before_it_steps(smp: FakeSmp) -> None:
    model = torch.nn.Linear(8, 8)
    saved(smp, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)})
    fresh: dict[str, Any] = {"model": torch.nn.Linear(8, 8)}
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
    with pytest.raises(StateMismatchError, match="is AdamW, which reads .*betas.*momentum"):
        make_manager(smp).load(into=fresh)
