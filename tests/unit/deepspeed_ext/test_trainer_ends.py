"""The end of a Trainer's loop: at its last step, by its own rule, or before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from deepspeed_ext.clients.trainer import Feeder

pytestmark = pytest.mark.deepspeed


class Said:
    """The run of an engine, as far as its end is concerned."""

    def __init__(self) -> None:
        self.finished: list[bool] = []

    def plan_ended(self, finished: bool) -> None:
        """Keep what was said."""
        self.finished.append(finished)


@pytest.mark.parametrize(
    ("step", "worse", "finished"), [(20, 0, True), (12, 0, False), (12, 1, False), (12, 2, True)]
)
def test_the_plan_is_done_at_the_last_step_or_without_patience(
    step: int, worse: int, finished: bool
) -> None:
    stops = EarlyStoppingCallback(early_stopping_patience=2)
    stops.early_stopping_patience_counter = worse
    arguments = SimpleNamespace(eval_on_start=False)
    handler = SimpleNamespace(callbacks=[stops])
    trainer: Any = SimpleNamespace(args=arguments, callback_handler=handler, get_batch_samples=None)
    feeder, said = Feeder(trainer, None), Said()
    feeder._run = said
    state = TrainerState(global_step=step, max_steps=20)
    feeder.on_train_end(arguments, state, TrainerControl(should_training_stop=True))
    assert said.finished == [finished]
