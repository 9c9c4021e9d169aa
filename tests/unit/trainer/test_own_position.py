"""Loaders that keep a position themselves, right and wrong ones: it is checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer import own_position
from tests.support.loader_runs import Run, continued, uninterrupted

PER_PASS = 6


class Own:
    """A loader with a position, as torchdata's StatefulDataLoader over a stream."""

    def __init__(self) -> None:
        self.at, self.number, self.begins = 0, 0, 0

    def order(self) -> list[int]:
        return [int(i) for i in np.random.default_rng(self.number).permutation(PER_PASS)]

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins = self.begins, 0
        while self.at < PER_PASS:
            self.at += 1
            yield torch.tensor([self.number, self.order()[self.at - 1]])
        self.end()

    def end(self) -> None:
        self.at, self.number = 0, self.number + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins, self.number = state["at"], state["number"]


class Ended(Own):
    """Its state behind a pass is that at the end of it: loaded, the pass is empty."""

    def end(self) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "number": self.number - (self.at == PER_PASS)}


class Stands(Own):
    """As a stream of Hugging Face whose position does not advance."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0, "number": self.number}


class Late(Own):
    """Its position is that of some batches ago."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": max(0, self.at - 2), "number": self.number}


class Early(Own):
    """It counts what it has read ahead."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": min(PER_PASS, self.at + 2) if self.at else 0, "number": self.number}


class Ignores(Own):
    """It begins where it pleases, whatever is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Live(Own):
    """It gives its live state, which changes later."""

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


class Raises(Own):
    """It knows no position in the middle of a pass."""

    def state_dict(self) -> dict[str, Any]:
        if 0 < self.at < PER_PASS:
            raise RuntimeError("no position here")
        return super().state_dict()


RIGHT, WRONG = (Own, Live), (Stands, Late, Early, Ignores, Raises)


@pytest.mark.parametrize("often", [True, False])
@pytest.mark.parametrize("stop", [1, 4, PER_PASS, 8, 2 * PER_PASS])
@pytest.mark.parametrize("kind", [*RIGHT, *WRONG, Ended])
def test_the_samples_are_those_of_a_run_without_stop(
    kind: Callable[[], Any],
    stop: int,
    often: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(own_position, "OWN_STATE_PART", 1e9 if often else 1e-12)
    with caplog.at_level(logging.WARNING):
        assert continued(kind, stop, 9, stops=2) == uninterrupted(kind, stop + 18)
    told = "its state_dict leads to other batches" in caplog.text
    assert not told or kind not in RIGHT
    if kind in WRONG and often and stop % PER_PASS > 2:
        assert told


def test_a_loader_that_gives_other_batches_is_refused() -> None:
    run = Run(Own)
    run.train(4)
    snapshot = run.snapshot()

    class Other(Own):
        def order(self) -> list[int]:
            return super().order()[::-1]

    with pytest.raises(LayoutMismatchError, match="the first 4 batches of its pass are others"):
        Run(Other).restored(snapshot).train(1)
