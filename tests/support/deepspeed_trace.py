"""Makes DeepSpeed's engines write a trace, and their whole state at the end.

Lines are those of cli/chaos/trace.py.  Losses are those given to ``backward``, summed over the
micro-batches of a step, and of a pipeline what ``train_batch`` returns.  A sample is named by the
CRC-32 of its first tensor: DeepSpeed's loader reads ahead in processes of its own, so an index
that was read says little.  Imports torch, so only training processes import it.
"""

from __future__ import annotations

import functools
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from megatron_ft.cli.chaos.trace import TraceWriter, final_path
from megatron_ft.cli.demo import final_state
from megatron_ft.cli.demo.final_state import plain

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

# Lists of the flat fp32 partitions, by class of optimizer; where none of them is there, the inner
# optimizer's parameters are what it updates.
_FLAT_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
)
_ATTRIBUTE = "_megatron_ft_trace"


class EngineTrace:
    """The trace of one engine, and what that has done since its last step."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._rank = directory, torch.distributed.get_rank()
        self._writer = TraceWriter(directory, self._rank)
        self._started: float | None = None
        self._loss: float | None = None
        self._steps = -1

    @classmethod
    def of(cls, engine: Any, directory: Path) -> EngineTrace:
        """The trace of an engine; made when it is first asked for."""
        if not hasattr(engine, _ATTRIBUTE):
            setattr(engine, _ATTRIBUTE, cls(directory))
        found: EngineTrace = getattr(engine, _ATTRIBUTE)
        return found

    def begin(self, steps: int) -> None:
        """A micro-batch begins, and ``steps`` steps are done."""
        if self._started is None:
            self._started, self._steps = time.perf_counter(), steps

    def read(self, samples: Any) -> None:
        for row in samples.detach().cpu().contiguous():
            self._writer.observe(zlib.crc32(row.numpy().tobytes()))

    def add_loss(self, loss: float) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def end(self, steps: int) -> None:
        """``steps`` steps are done now: write a line if that is one more."""
        if self._started is not None and steps > self._steps:
            self._writer.record(steps, self._loss, self._started)
            self._started = self._loss = None

    def write_final(self, engine: Any) -> None:
        final_state.write(final_path(self._directory, self._rank), collect(engine))


def install(directory: Path) -> None:
    """Wrap DeepSpeed's engine classes to write into ``directory``."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    def forward(engine: Any, original: Any, *inputs: Any, **keywords: Any) -> Any:
        if not engine.pipeline_parallelism and engine.module.training:
            trace = EngineTrace.of(engine, directory)
            trace.begin(engine.global_steps)
            trace.read(inputs[0] if inputs else keywords["input_ids"])
        return original(engine, *inputs, **keywords)

    def backward(engine: Any, original: Any, loss: Any, *rest: Any, **keywords: Any) -> Any:
        if not engine.pipeline_parallelism:
            EngineTrace.of(engine, directory).add_loss(float(loss.detach()))
        return original(engine, loss, *rest, **keywords)

    def step(engine: Any, original: Any, *rest: Any, **keywords: Any) -> Any:
        result = original(engine, *rest, **keywords)
        if not engine.pipeline_parallelism:
            EngineTrace.of(engine, directory).end(engine.global_steps)
        return result

    def destroy(engine: Any, original: Any) -> None:
        if hasattr(engine, _ATTRIBUTE):
            EngineTrace.of(engine, directory).write_final(engine)
            delattr(engine, _ATTRIBUTE)
        original(engine)

    for traced in (forward, backward, step, destroy):
        original = getattr(DeepSpeedEngine, traced.__name__)
        setattr(DeepSpeedEngine, traced.__name__, functools.partialmethod(traced, original))
    _install_pipeline(directory)


def _install_pipeline(directory: Path) -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    train, read = PipelineEngine.train_batch, PipelineEngine._next_batch

    @functools.wraps(train)
    def train_batch(engine: Any, *rest: Any, **keywords: Any) -> Any:
        trace = EngineTrace.of(engine, directory)
        trace.begin(engine.global_steps)
        loss = train(engine, *rest, **keywords)
        trace.add_loss(float(loss))
        trace.end(engine.global_steps)
        return loss

    @functools.wraps(read)
    def next_batch(engine: Any) -> Any:
        batch = read(engine)
        if batch is not None:
            EngineTrace.of(engine, directory).read(batch[0])
        return batch

    PipelineEngine.train_batch, PipelineEngine._next_batch = train_batch, next_batch


def collect(engine: Any) -> dict[str, Any]:
    """Copy everything: weights and buffers, optimizer, random states, schedule, counters."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    scheduler, module = engine.lr_scheduler, engine.module
    # Of a parameter that ZeRO-3 has cut up, this rank's part.
    weights = {name: plain(getattr(p, "ds_tensor", p)) for name, p in module.named_parameters()}
    device, tracker = get_accelerator().get_rng_state(), get_cuda_rng_tracker().get_states()
    return {
        "weights": {**weights, **{name: plain(b) for name, b in module.named_buffers()}},
        "optimizer": _optimizer(engine.optimizer),
        "scheduler": None if scheduler is None else plain(scheduler.state_dict()),
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "random": final_state.random_states(device, tracker),
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    inner = getattr(optimizer, "optimizer", optimizer)
    scaler, groups = getattr(optimizer, "loss_scaler", None), inner.param_groups
    masters = [parameter for group in groups for parameter in group["params"]]
    flat = next((name for name in _FLAT_MASTERS if hasattr(optimizer, name)), None)
    if flat is not None:
        masters = list(getattr(optimizer, flat))
    return {
        "main": plain(masters),
        "state": [plain(dict(sorted(inner.state[master].items()))) for master in masters],
        "groups": [plain({k: v for k, v in g.items() if k != "params"}) for g in groups],
        "loss_scaler": plain(vars(scaler)) if hasattr(scaler, "__dict__") else plain(scaler),
        "overflow": plain(getattr(optimizer, "overflow", None)),
    }
