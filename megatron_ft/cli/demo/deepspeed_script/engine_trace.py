"""Makes DeepSpeed's engines write a trace: see megatron_ft.cli.demo.trace for its lines.

Losses are those given to ``backward``, summed over the micro-batches of a step, and of a
pipeline what ``train_batch`` returns.  A sample is named by the CRC-32 of its first tensor:
DeepSpeed's loader reads ahead in processes of its own, so an index that was read says little.
Imports torch, so it is imported by training processes only.
"""

from __future__ import annotations

import functools
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from megatron_ft.cli.demo import final_state
from megatron_ft.cli.demo.deepspeed_script import engine_state
from megatron_ft.cli.demo.trace import final_path
from megatron_ft.cli.demo.trace_writer import TraceWriter

_ATTRIBUTE = "_testing_trace"


class EngineTrace:
    """What one engine has done since its last step."""

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
        """A batch, one sample a row."""
        for row in samples.detach().cpu().contiguous():
            self._writer.observe(zlib.crc32(row.numpy().tobytes()))

    def add_loss(self, loss: float) -> None:
        """The loss of a micro-batch."""
        self._loss = loss if self._loss is None else self._loss + loss

    def end(self, steps: int) -> None:
        """``steps`` steps are done now: write a line if that is one more."""
        if self._started is not None and steps > self._steps:
            self._writer.record(steps, self._loss, self._started)
            self._started = self._loss = None

    def write_final(self, engine: Any) -> None:
        """Write all that the engine holds."""
        path = final_path(self._directory, self._rank)
        final_state.write(path, engine_state.collect(engine))


def install(directory: Path) -> None:
    """Wrap DeepSpeed's engine classes to write into ``directory``."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    def forward(engine: Any, original: Any, *inputs: Any, **keywords: Any) -> Any:
        if _is_plain(engine) and engine.module.training:
            trace = EngineTrace.of(engine, directory)
            trace.begin(engine.global_steps)
            trace.read(inputs[0])
        return original(engine, *inputs, **keywords)

    def backward(engine: Any, original: Any, loss: Any, *rest: Any, **keywords: Any) -> Any:
        if _is_plain(engine):
            EngineTrace.of(engine, directory).add_loss(float(loss.detach()))
        return original(engine, loss, *rest, **keywords)

    def step(engine: Any, original: Any, *rest: Any, **keywords: Any) -> Any:
        result = original(engine, *rest, **keywords)
        if _is_plain(engine):
            EngineTrace.of(engine, directory).end(engine.global_steps)
        return result

    def destroy(engine: Any, original: Any) -> None:
        if hasattr(engine, _ATTRIBUTE):
            EngineTrace.of(engine, directory).write_final(engine)
            delattr(engine, _ATTRIBUTE)
        original(engine)

    for traced in (forward, backward, step, destroy):
        original = getattr(DeepSpeedEngine, traced.__name__)
        wrapped = functools.partialmethod(traced, original)
        setattr(DeepSpeedEngine, traced.__name__, wrapped)
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


def _is_plain(engine: Any) -> bool:
    return not engine.pipeline_parallelism
