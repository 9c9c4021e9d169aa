"""transformers.Trainer: an unedited script resumes from memory, all state of the Trainer included.

The Trainer computes what to skip before it makes its engine, from files of its own checkpoint.  So
what memory offers is asked first, a checkpoint without weights is written for it, and the engine
answers the load of that from memory.  A snapshot is taken where the Trainer's own state is of the
engine's step: as the next step or the next pass over the data begins, behind logs, evaluation and
saves.  What its checkpoints lack is restored by a callback: sums of losses that were not
logged, states of callbacks, the order of a pass.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, __version__
from transformers import trainer as library
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint, has_length

from deepspeed_ext import attachment
from deepspeed_ext.client_state import CLIENT, set_client_state
from deepspeed_ext.hooks import run_of
from deepspeed_ext.start import EarlyStart
from deepspeed_ext.state import RANDOM
from deepspeed_ext.state_parts import RandomStates
from megatron_ft.config import environment_source, resolve
from megatron_ft.config.json_section import Section
from megatron_ft.core.environment import NODE_DIR
from megatron_ft.core.errors import UnencodableError
from megatron_ft.core.identity import shard_id
from megatron_ft.core.objects import encode
from megatron_ft.trainer.loader_order import READERS, OwnState, samplers_of
from megatron_ft.trainer.state import drawn

log = logging.getLogger(__name__)

NAME = "transformers.Trainer"
NUMBERS = (
    *("_total_loss_scalar", "_globalstep_last_logged", "current_flos"),
    *("_initial_global_step", "_initial_num_input_tokens_seen"),
)
"""Attributes of a Trainer, that its checkpoints do not hold, without the sum of losses."""

KNOWN_SAMPLERS = frozenset(
    (
        "BatchSampler BatchSamplerShard SeedableRandomSampler SequentialSampler "
        "SkipBatchSampler _InfiniteConstantSampler"
    ).split()
)
"""Classes whose order follows from the epoch alone."""

ENTRY_BYTES = 128
"""Half of an entry of the Trainer's log, at most: twice of what there is fits into memory."""


@contextmanager
def start(trainer: Any, section: Section, wanted: str | bool | None) -> Iterator[str | bool | None]:
    """The checkpoint to resume from: ``wanted``, or one that stands for the snapshot in memory.

    With a release of other inner names it is ``wanted`` always, and no snapshot will serve.
    """
    if not hasattr(trainer, "get_batch_samples"):
        log.warning("the Trainer of transformers %s restarts from checkpoints alone", __version__)
        yield wanted
        return
    rank, config = torch.distributed.get_rank(), resolve(section.source, environment_source())
    place = {"shard_id": shard_id(dp=rank), "rank": rank, "coordinates": (0, 0, 0)}
    early = EarlyStart(attachment.manager_at(config, place), place)
    newest = get_last_checkpoint(trainer.args.output_dir) if wanted is True else wanted
    found = early.entries(NAME)
    problem = _objection(trainer, found) if found else ""
    serves = early.decide(NAME, str(newest) if newest else None, problem)
    feeder = Feeder(trainer, {**found, RANDOM: early.objects[RANDOM]} if serves else None)
    try:
        with tempfile.TemporaryDirectory(prefix="trainer-", dir=os.environ.get(NODE_DIR)) as at:
            yield _written(found, Path(at)) if serves else wanted
    finally:
        feeder.end()
        if EarlyStart.claim() is early:
            early.manager.close()


def _batches(trainer: Any) -> list[int]:
    return [trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps]


def _objection(trainer: Any, found: Mapping[str, Any] | None = None) -> str:
    """Reason why a Trainer would continue with other batches, '' if none is known.

    ``found`` is the state in a snapshot, if it is to continue from that.
    """
    if found is not None and found["batches"] != (now := _batches(trainer)):
        return f"batch size and accumulation were {found['batches']} and are {now} now"
    if trainer.args.ignore_data_skip:
        return "ignore_data_skip has the Trainer begin its data anew"
    if trainer.args.auto_find_batch_size:
        return "auto_find_batch_size changes the batches"
    generators = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    own = getattr(trainer.data_collator, "__dict__", {})
    if own.get("mlm") or any(isinstance(one, generators) for one in own.values()):
        return f"{type(trainer.data_collator).__name__} makes random batches"
    return ""


def _has_stopped(callback: Any) -> bool:
    """True for an EarlyStoppingCallback out of patience: training is at its end, by its plan."""
    patience = getattr(callback, "early_stopping_patience", None)
    return patience is not None and callback.early_stopping_patience_counter >= patience


def _written(found: Mapping[str, Any], folder: Path) -> str:
    """A checkpoint of the Trainer in ``folder``, without weights and random states."""
    trainer_state = {**json.loads(found["state"]), "log_history": json.loads(found["log"])}
    checkpoint = folder / f"checkpoint-{trainer_state['global_step']}"
    # The Trainer looks for this before it has the engine load.
    (checkpoint / f"global_step{trainer_state['global_step']}").mkdir(parents=True)
    (checkpoint / library.TRAINER_STATE_NAME).write_text(json.dumps(trainer_state))
    if found["scheduler"] is not None:
        torch.save(found["scheduler"], checkpoint / library.SCHEDULER_NAME)
    return str(checkpoint)


class Feeder(TrainerCallback):  # type: ignore[misc]
    """Gives the Trainer's state to snapshots, and has them taken.

    ``resumed`` is the state of the snapshot that training continues from, None without one.
    """

    def __init__(self, trainer: Any, resumed: Mapping[str, Any] | None) -> None:
        self._trainer, self._resumed = trainer, resumed
        self._run: Any = None
        self._begun: dict[str, Any] = {}
        self._in_pass = False
        self._first, self._fetches = 0, 0
        self._log: list[str] = []
        self._evaluates = trainer.args.eval_on_start
        self._original = trainer.get_batch_samples
        trainer.get_batch_samples = self._watched
        # First, so that other callbacks have seen nothing yet of the step that begins.
        trainer.callback_handler.callbacks.insert(0, self)

    def end(self) -> None:
        if self in (callbacks := self._trainer.callback_handler.callbacks):
            callbacks.remove(self)
        vars(self._trainer).pop("get_batch_samples", None)
        self._trainer.args.eval_on_start = self._evaluates

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The engine is made, and loaded if anything was."""
        trainer = self._trainer
        self._run, self._first = run_of(trainer.model_wrapped), state.global_step
        if self._run is None:
            return
        if reason := self._refusal(given["train_dataloader"]):
            self._run.refuse(f"{reason}. A restart begins from the Trainer's own checkpoint")
            return
        set_client_state(trainer.model_wrapped, self._entries)
        if (found := self._resumed) is None:
            return
        # Done before the step of the snapshot.
        args.eval_on_start = False
        trainer._tr_loss = found["loss"].to(args.device)
        for name, value in found["numbers"].items():
            setattr(trainer, name, value)
        for callback, stored in zip(self._stateful(), found["callbacks"], strict=False):
            for name, value in json.loads(stored).get("attributes", {}).items():
                setattr(callback, name, value)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A pass over the data begins: its order is drawn behind this."""
        self._fetches, found = 0, self._resumed
        if found is None:
            self._begun, self._in_pass = RandomStates().state_dict(), False
            self._end_iteration(state)
            return
        args.eval_on_start = self._evaluates
        self._begun = found["begun"]
        RandomStates().load_state_dict(found["begun"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Batches of a step were read, and nothing of it was computed."""
        found, self._resumed = self._resumed, None
        self._in_pass = True
        if found is None:
            self._end_iteration(state)
        elif found["in_pass"]:
            RandomStates().load_state_dict(found[RANDOM])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._run is not None:
            stopped = any(map(_has_stopped, self._trainer.callback_handler.callbacks))
            self._run.plan_ended(finished=state.global_step >= state.max_steps or stopped)

    def _end_iteration(self, state: Any) -> None:
        engine = self._trainer.model_wrapped
        if self._run is None:
            return
        steps, sized = state.global_step, has_length(self._trainer.train_dataset)
        if engine.global_steps != steps:
            self._run.refuse(f"the Trainer is at step {steps}, its engine at {engine.global_steps}")
        elif steps and not self._in_pass and not sized:
            self._run.refuse("its data set has no length, so the steps of a pass are unknown")
        self._run.end_iteration()

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """Read the batches of a step; those that are made by chance cannot be read again."""
        before, self._fetches = drawn(), self._fetches + 1
        batches = self._original(*args, **kwargs)
        # The first one begins the pass, which draws an order.
        if self._fetches > 1 and self._run is not None and drawn() != before:
            self._run.refuse("reading its data draws random numbers in the training process")
        return batches

    def _refusal(self, loader: Any) -> str:
        """Reason why no snapshot can hold all that the Trainer keeps, '' if one can."""
        if lacking := [n for n in ("_tr_loss", *NUMBERS) if not hasattr(self._trainer, n)]:
            return f"the Trainer of transformers {__version__} has no {', '.join(lacking)}"
        names = {type(sampler).__name__ for sampler in samplers_of(loader)}
        if unknown := sorted(names - KNOWN_SAMPLERS):
            return f"the order of its data comes from {', '.join(unknown)}"
        # The Trainer skips without reading, and begins a stream's generators anew.
        if drawn_by := OwnState(loader).generators_of(READERS):
            return (
                f"its data are drawn from {drawn_by[0]}, whose state the Trainer does not restore"
            )
        try:
            encode(self._entries())
        except (UnencodableError, TypeError, ValueError) as error:
            return f"its state cannot be stored: {error}"
        return _objection(self._trainer)

    def _stateful(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]

    def _entries(self) -> dict[str, Any]:
        trainer = self._trainer
        exported = [*self._stateful(), trainer.control]
        own = dataclasses.replace(
            trainer.state,
            log_history=[],
            stateful_callbacks=TrainerState(stateful_callbacks=exported).stateful_callbacks,
        )
        history = trainer.state.log_history
        self._log += map(json.dumps, history[len(self._log) :])
        # Memory is planned in the first step: with room for a log of all steps.
        often = (trainer.state.logging_steps, trainer.state.eval_steps or 0)
        room = sum(ENTRY_BYTES * trainer.state.max_steps // each for each in often if each)
        scheduler = getattr(trainer.model_wrapped, "lr_scheduler", None)
        inner = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        return {
            CLIENT: NAME,
            "batches": _batches(trainer),
            "state": json.dumps(dataclasses.asdict(own)),
            "log": f"[{','.join(self._log)}]",
            "room": bytes(room if trainer.state.global_step == self._first else 0),
            "scheduler": None if inner is scheduler else inner.state_dict(),
            "loss": trainer._tr_loss.detach().cpu().clone(),
            "numbers": {name: getattr(trainer, name) for name in NUMBERS},
            "callbacks": [json.dumps(callback.state()) for callback in self._stateful()],
            "begun": self._begun,
            "in_pass": self._in_pass,
        }
