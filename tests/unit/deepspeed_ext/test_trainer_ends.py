"""The end of a Trainer's loop: at its last step, by its own rule, or before."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.warm_host import WarmHost

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        None in map(find_spec, ("transformers", "deepspeed", "lightning")),
        reason="needs the clients of deepspeed",
    ),
]


class Said:
    """The run of an engine, as far as its end is concerned."""

    def __init__(self) -> None:
        self.finished: list[bool] = []

    def plan_ended(self, finished: bool) -> None:
        self.finished.append(finished)


def test_the_plan_is_done_at_the_last_step_or_without_patience(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    clients_server.call(f"{__name__}:require_ends", tmp_path)


def require_ends() -> None:
    """In a process that has imported transformers."""
    for step, worse, finished in [(20, 0, True), (12, 0, False), (12, 1, False), (12, 2, True)]:
        assert said_at_the_end(step, worse) == [finished], (step, worse)


def said_at_the_end(step: int, worse: int) -> list[bool]:
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

    from deepspeed_ext.clients.trainer import Feeder

    stops = EarlyStoppingCallback(early_stopping_patience=2)
    stops.early_stopping_patience_counter = worse
    arguments = SimpleNamespace(eval_on_start=False)
    handler = SimpleNamespace(callbacks=[stops])
    trainer: Any = SimpleNamespace(args=arguments, callback_handler=handler, get_batch_samples=None)
    feeder, said = Feeder(trainer, None), Said()
    feeder._run = said
    state = TrainerState(global_step=step, max_steps=20)
    feeder.on_train_end(arguments, state, TrainerControl(should_training_stop=True))
    return said.finished
