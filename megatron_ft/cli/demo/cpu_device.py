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
import copy
import filecmp
import functools
import importlib.util
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron_ft.megatron import versions

_PRETENDED_BYTES = 1 << 34
_HELPER = "megatron.core.datasets.helpers_cpp"

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
    """Make and move tensors on the host where a cuda device is asked for."""
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
        self._recorded_at = 0.0

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self._recorded_at = time.perf_counter()

    def record_event(self, event: _Idle | None = None) -> _Idle:
        event = event or _Idle()
        event.record()
        return event

    def elapsed_time(self, other: _Idle) -> float:
        """Milliseconds from this event to ``other``."""
        return 1000.0 * (other._recorded_at - self._recorded_at)

    def query(self) -> bool:
        return True

    def wait(self, other: Any = None) -> None:
        pass

    synchronize = wait_stream = wait_event = wait

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
    """One stream and its events, all of them always idle."""
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


def keep_data_loader_off_the_generator() -> None:
    """Keep the generator where it is when a data loader draws its base seed.

    With a real device that is not the generator of dropout, so it must not move here either.
    """
    loader: Any = DataLoader
    iterate, generator = loader.__iter__, torch.default_generator

    @functools.wraps(iterate)
    def iterate_quietly(self: Any) -> Any:
        state = generator.get_state()
        iterator = iterate(self)
        generator.set_state(state)
        return iterator

    loader.__iter__ = iterate_quietly


def _module(name: str) -> Any:
    return importlib.import_module(name)


def find_dataset_helper() -> None:
    """Use the built dataset helper of an installed megatron-core instead of running ``make``.

    The package holds no Makefile, and a checkout's may ask another Python for its headers.
    A checkout without a built helper borrows the package's if both have the same source;
    else Megatron builds it as ever.
    """
    utils = _module("megatron.core.datasets.utils")
    if importlib.util.find_spec(_HELPER) is not None or _borrow_dataset_helper():
        utils.compile_helpers = lambda: None


def _borrow_dataset_helper() -> bool:
    # A checkout and the package are parts of one namespace: the checkout comes first.
    folders = [Path(part) / "core" / "datasets" for part in _module("megatron").__path__]
    sources = [source for folder in folders if (source := folder / "helpers.cpp").is_file()]
    for source in sources:
        if filecmp.cmp(source, sources[0], shallow=False):
            for built in source.parent.glob("helpers_cpp*.so"):
                spec: Any = importlib.util.spec_from_file_location(_HELPER, built)
                sys.modules[_HELPER] = helper = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(helper)
                return True
    return False


def skip_jit_warmup() -> None:
    """Skip the warm-up, whose number of random draws depends on the parallel layout.

    With a real device it does not touch the generator that initialises weights.
    """
    _module("megatron.training.initialize")._warmup_jit_function = lambda *args, **kwargs: None


def allow_sequence_parallel_torch_norm() -> None:
    """Let torch's norm serve under ``--sequence-parallel``.

    Megatron refuses only because nothing marks the norm's weights, whose gradients must be
    summed over the tensor-parallel group; so mark them.
    """
    wrapped = _module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    build = wrapped.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    wrapped.__new__ = new


def fill_torch_adam_state() -> None:
    """Mend Megatron's own checkpoints for torch's AdamW under the distributed optimizer.

    Its state is empty until the first step and holds a ``step`` tensor.  Megatron asserts
    that state exists when it loads, gives every parameter the *same* step tensor (which
    AdamW then advances once for each), shards ``step`` as if it were a flat parameter, and
    copies into leaves that require gradients.  Snapshots do not use that path; exports and
    comparisons with Megatron's own checkpoints do.
    """
    distributed = _module("megatron.core.optimizer.distrib_optimizer")
    if distributed.HAVE_APEX_OR_TE:
        return
    cls = distributed.DistributedOptimizer
    init, load = cls.__init__, cls.load_state_dict
    get_state = cls._get_main_param_and_optimizer_states
    set_state = cls._set_main_param_and_optimizer_states

    @functools.wraps(init)
    def filled_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        inner = self.optimizer
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                if not inner.state[parameter]:
                    zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter))
                    names = ("step", "exp_avg", "exp_avg_sq")
                    inner.state[parameter] |= zip(names, (torch.tensor(0.0), *zeros), strict=True)

    @functools.wraps(load)
    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    @functools.wraps(get_state)
    def get_without_step(self: Any, model_param: Any) -> Any:
        return {k: v for k, v in get_state(self, model_param).items() if k != "step"}

    @functools.wraps(set_state)
    def set_without_step(self: Any, model_param: Any, tensors: Any) -> None:
        with torch.no_grad():
            set_state(self, model_param, {**tensors, "step": None})

    cls.__init__, cls.load_state_dict = filled_init, load_with_own_steps
    cls._get_main_param_and_optimizer_states = get_without_step
    cls._set_main_param_and_optimizer_states = set_without_step


TORCH_PARTS = (
    replace_tensors,
    replace_type_names,
    replace_devices,
    replace_streams,
    replace_generators,
    keep_data_loader_off_the_generator,
    versions.supply_typing_override,
    versions.stub_triton,
)
"""Touch only torch and the import table."""

MEGATRON_PARTS: dict[str, Callable[[], None]] = {
    "megatron.core.datasets.utils": find_dataset_helper,
    "megatron.training.initialize": skip_jit_warmup,
    "megatron.core.transformer.torch_norm": allow_sequence_parallel_torch_norm,
    "megatron.core.optimizer.distrib_optimizer": fill_torch_adam_state,
}
"""Fill what Megatron lacks without CUDA extensions; by the module behind whose import each goes."""

_installed: set[str] = set()


def needed() -> bool:
    """True if this machine has no CUDA device, real or pretended."""
    return not torch.cuda.is_available()


def install(*, megatron: bool = True) -> None:
    """Put the stand-in in place in this process, once; a second call adds only what is missing.

    ``megatron=False`` leaves Megatron unimported, for processes that only read
    what a training process sent them.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    parts: dict[str, Iterable[Callable[[], None]]] = {"torch": TORCH_PARTS}
    if megatron:
        parts["megatron"] = MEGATRON_PARTS.values()
    for name, functions in parts.items():
        if name not in _installed:
            _installed.add(name)
            for function in functions:
                function()
