"""Drives Megatron-LM's real training loop on a machine without CUDA.

Call :func:`install` before the first ``import megatron``.  Megatron's files are not edited: the
process pretends to have CUDA devices whose memory is host memory.  Every request for a "cuda"
device is answered with a CPU tensor, streams and events are empty (host operations are already
in order), and the host random generator plays the device's.  Collectives need no help: gloo has
all that Megatron's data, tensor, pipeline and expert parallel paths call.

``.cuda()`` and ``.cpu()`` do not copy here, so races, pinned memory and overlap need a real device.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import logging
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_ft.megatron import versions

_PRETENDED_BYTES = 1 << 34

# torch and torch.Tensor, torch.cuda and others are changed in ways that their types forbid.
_cuda: Any = torch.cuda
_tensor: Any = torch.Tensor


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) or (isinstance(device, torch.device) and device.type == "cuda")


def _on_host(function: Callable[..., Any], device_at: int | None = None) -> Callable[..., Any]:
    """``function`` with "cpu" for a cuda device, given as keyword or at one position."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        # An int is a device only at that position; later ones are non_blocking and copy.
        if device_at is not None and len(args) > device_at and _is_cuda(args[device_at]):
            args = (*args[:device_at], torch.device("cpu"), *args[device_at + 1 :])
        return function(*args, **kwargs)

    return call


def replace_tensors() -> None:
    for name in (
        "tensor as_tensor empty zeros ones full rand randn randint randperm arange linspace eye "
        "empty_strided empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
    ).split():
        setattr(torch, name, _on_host(getattr(torch, name)))
    for name in "new_tensor new_empty new_zeros new_ones new_full new_empty_strided".split():
        setattr(_tensor, name, _on_host(getattr(_tensor, name)))
    module: Any = torch.nn.Module
    _tensor.to, module.to = _on_host(_tensor.to, device_at=1), _on_host(module.to, device_at=1)
    _tensor.cuda = _tensor.pin_memory = module.cuda = lambda self, *args, **kwargs: self


def replace_type_names() -> None:
    """Answer ``tensor.type()`` with the cuda name: Megatron's optimizers branch on that text."""
    tensor_type = _tensor.type

    @functools.wraps(tensor_type)
    def type_(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, non_blocking, **kwargs)

    _tensor.type = type_
    for kind in "Float Half BFloat16 Double Int Long Byte".split():
        name = f"{kind}Tensor"  # isinstance(t, torch.cuda.FloatTensor) and the like
        setattr(_cuda, name, getattr(torch, name))


class _Idle:
    """A stream, an event, or the context of a stream or device: everything is done already."""

    device = torch.device("cpu")
    cuda_stream = stream_id = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def _return_self(self, *_args: Any, **_kwargs: Any) -> _Idle:
        return self

    record = record_event = query = wait = _return_self
    synchronize = wait_stream = wait_event = _return_self

    def elapsed_time(self, other: _Idle) -> float:
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
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
    _cuda.is_available = _cuda.is_initialized = lambda: True
    _cuda._lazy_init = lambda: None
    _cuda.device_count, _cuda.current_device = _device_count, _local_rank
    _cuda.set_device = lambda device=None: None
    _cuda.get_device_properties = lambda device=None: properties
    _cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    _cuda.get_device_name = lambda device=None: properties.name
    for name in (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
        "device_memory_used empty_cache reset_peak_memory_stats ipc_collect"
    ).split():
        setattr(_cuda, name, lambda *args, **kwargs: 0)
    _cuda.memory_stats = lambda device=None: collections.defaultdict(int)
    _cuda.mem_get_info = lambda device=None: (_PRETENDED_BYTES, _PRETENDED_BYTES)
    # Optimizers ask before each step; a CUDA build would then ask CUDA for a stream.
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: None


def replace_streams() -> None:
    stream = _Idle()
    _cuda.Stream = _cuda.ExternalStream = _cuda.Event = _cuda.stream = _cuda.device = _Idle
    _cuda.current_stream = _cuda.default_stream = lambda device=None: stream
    _cuda.set_stream = lambda stream: None
    _cuda.synchronize = lambda device=None: None
    _cuda.is_current_stream_capturing = lambda: False
    _tensor.record_stream = lambda self, stream: None


class _OneGenerator:
    """A list whose every element is the host generator; the number of devices may change."""

    def __getitem__(self, device: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return _device_count()


def replace_generators() -> None:
    """Answer every ``torch.cuda`` random function from the default host generator.

    Random operations on host tensors draw from it.  So Megatron's tracker forks and restores
    what dropout really uses, and a resumed run repeats it bit for bit.
    """
    generator = torch.default_generator
    _cuda.default_generators = _OneGenerator()
    answers: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        # Functions of our own: torch's compiler refuses to see a built-in under two names.
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
        "initial_seed": lambda: generator.initial_seed(),
    }
    for module in (_cuda, _cuda.random):
        for name, answer in answers.items():
            setattr(module, name, answer)
    _cuda._lazy_call = lambda callable_, **kwargs: callable_()
    # Megatron warns when the host generator moves inside a fork of the device's: here it must.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def find_dataset_helper() -> None:
    """Use the built dataset helper of the installed megatron-core instead of running ``make``.

    The package holds no Makefile: with a device it needs this, too.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        _module("megatron.core.datasets.utils").compile_helpers = lambda: None


def skip_jit_warmup() -> None:
    """Skip the warm-up, whose number of random draws depends on the parallel layout.

    With a real device it does not touch the generator that initialises weights.
    """
    _module("megatron.training.initialize")._warmup_jit_function = lambda *args, **kwargs: None


TORCH_PARTS = (
    replace_tensors,
    replace_type_names,
    replace_devices,
    replace_streams,
    replace_generators,
    versions.supply_typing_override,
    versions.stub_triton,
)
"""Touch only torch and the import table."""

MEGATRON_PARTS: dict[str, Callable[[], None]] = {
    "megatron.core.datasets.utils": find_dataset_helper,
    "megatron.training.initialize": skip_jit_warmup,
}
"""Fill what Megatron lacks without CUDA extensions; by the module behind whose import each goes."""


def needed() -> bool:
    """True if this machine has no CUDA device, real or pretended."""
    return not torch.cuda.is_available()


def install(*, megatron: bool = True) -> None:
    """Put the stand-in in place in this process.

    ``megatron=False`` leaves Megatron unimported, for processes that only read
    what a training process sent them.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for part in (*TORCH_PARTS, *(MEGATRON_PARTS.values() if megatron else ())):
        part()
