"""The functions of ``torch.cuda`` that Megatron calls, answered without a device."""

from __future__ import annotations

import collections
import os
import time
import types
from typing import Any

import torch

_PRETENDED_BYTES = 1 << 34


class NullContext:
    """A context manager that does nothing, whatever it is made from."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> NullContext:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


class Event:
    """An event that is complete as soon as it is recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time; all earlier host work is already done."""
        self._recorded_at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to ``other``."""
        return 1000.0 * (other._recorded_at - self._recorded_at)


class Stream(NullContext):
    """Host operations finish in program order, so a stream has nothing to do."""

    device = torch.device("cpu")
    cuda_stream = 0
    stream_id = 0

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Always idle."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """One priority."""
        return (0, 0)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _device_count() -> int:
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _local_rank() + 1)


def replace_devices() -> None:
    """Pretend one device per local rank, as the launcher's variables count them.

    They are read at each call: a process may learn its rank after this, in a fork.
    """
    properties = types.SimpleNamespace(
        name="host memory stand-in",
        major=8,
        minor=0,
        total_memory=_PRETENDED_BYTES,
        multi_processor_count=1,
        warp_size=32,
        uuid="host",
    )
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda.device_count = _device_count
    cuda.current_device = _local_rank
    cuda.set_device = lambda device=None: None
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.get_device_name = lambda device=None: properties.name
    cuda.device = NullContext


def hide_accelerators() -> None:
    """There is none for ``torch.accelerator``, which optimizers ask before each step.

    A CUDA build would find the pretended devices available, and then ask CUDA for a stream.
    """
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: None


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def replace_memory() -> None:
    """Memory statistics are zeros, free memory is a fixed figure."""
    cuda: Any = torch.cuda
    for name in (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
        "device_memory_used empty_cache reset_peak_memory_stats ipc_collect"
    ).split():
        setattr(cuda, name, _zero)
    cuda.memory_stats = lambda device=None: collections.defaultdict(int)
    cuda.mem_get_info = lambda device=None: (_PRETENDED_BYTES, _PRETENDED_BYTES)


def replace_streams() -> None:
    """One stream and its events, all of them always idle."""
    cuda: Any = torch.cuda
    stream = Stream()
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event = Event
    cuda.stream = NullContext
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.set_stream = lambda stream: None
    cuda.synchronize = lambda device=None: None
    cuda.is_current_stream_capturing = lambda: False
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
