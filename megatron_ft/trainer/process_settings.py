"""Everything that a process keeps for all of its code and a training may change: one table.

A setting is a name, how to read it and how to put it back.  Where it cannot be put back it is only
compared.  The table is read anew each time: modules that a training has imported add to it.
"""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.data

from megatron_ft.rpc.heartbeat_page import DUMP_SIGNAL
from megatron_ft.trainer.interrupt import INTERRUPT_SIGNAL

Put = Callable[[Any], Any]


class ProcessSetting(NamedTuple):
    """One setting: ``put`` makes ``get`` give a value again that it gave before."""

    name: str
    get: Callable[[], Any]
    put: Put | None = None


class Unreadable(NamedTuple):
    """The value of a setting whose ``get`` raises: torch's do where two APIs were mixed."""

    kind: str


def settings() -> Iterator[ProcessSetting]:
    """All settings of this process, in the order in which they are put back."""
    yield from _of_torch()
    yield from _of_modules()
    yield from _of_python()
    yield from _of_system()


def read(setting: ProcessSetting) -> Any:
    """The present value of a setting; Unreadable where asking for it raises."""
    try:
        return setting.get()
    except Exception as error:
        return Unreadable(type(error).__name__)


def attribute(owner: Any, name: str) -> ProcessSetting:
    """An attribute as a setting."""
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    return ProcessSetting(where, partial(getattr, owner, name), partial(setattr, owner, name))


def content(name: str, container: list[Any] | dict[Any, Any] | set[Any]) -> ProcessSetting:
    """What a container holds, by identity; the container itself stays."""
    if isinstance(container, dict):
        return ProcessSetting(name, lambda: _Same(container.items()), partial(_refill, container))
    return ProcessSetting(name, lambda: _Same(container), partial(_refill, container))


class _Same:
    """Objects that are equal to others if they are the same ones: ``==`` of theirs may be slow."""

    def __init__(self, objects: Any) -> None:
        self.objects = list(objects)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._identities() == other._identities()

    def _identities(self) -> list[Any]:
        pairs = [one if isinstance(one, tuple) else (one,) for one in self.objects]
        return [tuple(map(id, pair)) for pair in pairs]


def _refill(container: Any, value: _Same) -> None:
    if isinstance(container, dict):
        # Never empty in between: Python's own names are in such a one.
        for name in [name for name in container if name not in dict(value.objects)]:
            del container[name]
        container.update(value.objects)
        return
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(value.objects)


# torch's own.

_SWITCHES = {
    "flash_sdp_enabled": "sdp_use_flash",
    "mem_efficient_sdp_enabled": "sdp_use_mem_efficient",
    "math_sdp_enabled": "sdp_use_math",
    "cudnn_sdp_enabled": "sdp_use_cudnn",
    "overrideable_sdp_enabled": "sdp_use_overrideable",
    "fa3_sdp_enabled": "sdp_use_fa3",
}
"""Getters of torch._C to setters of another name; all others have the same one."""

_ELSEWHERE = frozenset(
    ("default_device", "default_dtype", "dispatch_mode", "deterministic_algorithms", "grad_enabled",
     "tensor_metadata", "torch_function_state", "tracing_state", "value_trace", "thread_name",
     "schema", "graph_exec_group")
)  # fmt: skip
"""Pairs of torch._C that are no settings, or have a public pair in this table."""

_PRECISIONS = [
    (backend, part)
    for backend, parts in {
        "generic": ("all",),
        "cuda": ("all", "matmul", "conv", "rnn"),
        "mkldnn": ("all", "matmul", "conv", "rnn"),
    }.items()
    for part in parts
]
"""Backends and operations with a precision of their own (torch.backends.*.fp32_precision)."""


def _of_torch() -> Iterator[ProcessSetting]:
    c: Any = torch._C
    dtypes = ("cpu", "cuda")
    yield ProcessSetting("torch.is_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled)
    yield ProcessSetting("torch.default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield ProcessSetting("torch.default_device", torch.get_default_device, _set_device)
    yield ProcessSetting("torch.deterministic_algorithms", _deterministic, _set_deterministic)
    yield ProcessSetting("torch.autograd.anomaly", _anomaly, _set_anomaly)
    yield ProcessSetting("torch.num_threads", torch.get_num_threads, torch.set_num_threads)
    yield ProcessSetting("torch.flush_denormal", _flushes, torch.set_flush_denormal)
    yield ProcessSetting("torch.inference_mode", torch.is_inference_mode_enabled)
    for kind in dtypes:
        get, put = torch.get_autocast_dtype, torch.set_autocast_dtype
        yield ProcessSetting(
            f"torch.autocast_dtype({kind})", partial(get, kind), partial(put, kind)
        )
        on, switch = torch.is_autocast_enabled, torch.set_autocast_enabled
        yield ProcessSetting(f"torch.autocast({kind})", partial(on, kind), partial(switch, kind))
    cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield ProcessSetting("torch.autocast_cache", *cache)
    for found in dir(c):
        name = found.removeprefix("_get_")
        setter = getattr(c, f"_set_{_SWITCHES.get(name, name.removesuffix('_enabled'))}", None)
        setter = getattr(c, f"_set_{name}", setter)
        if found != name and name not in _ELSEWHERE and setter is not None:
            yield ProcessSetting(f"torch._C.{name}", getattr(c, found), partial(_call, setter))
    if precision := getattr(c, "_get_fp32_precision_getter", None):
        # Behind the older switches, which these contain.
        for pair in _PRECISIONS:
            put = partial(c._set_fp32_precision_setter, *pair)
            name = "torch.backends.{}.{}.fp32_precision".format(*pair)
            yield ProcessSetting(name, partial(precision, *pair), put)
    for name in ("dispatch", "function"):
        if length := getattr(c, f"_len_torch_{name}_stack", None):
            yield ProcessSetting(f"torch's {name} modes", length)


def _call(setter: Callable[..., Any], value: Any) -> None:
    """Some getters give a tuple of what the setter takes."""
    setter(*value) if isinstance(value, tuple) else setter(value)


def _set_device(device: torch.device) -> None:
    # None is what a process begins with; "cpu" would look at every tensor that is made.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


def _flushes() -> bool:
    """True if numbers below the smallest normal one are zero; torch has no function for that."""
    return not (torch.tensor([1e-310], dtype=torch.float64) * 0.5).item()


_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


def _of_modules() -> Iterator[ProcessSetting]:
    """Settings in variables of modules that are loaded."""
    module: Any = torch.nn.modules.module
    optimizer: Any = sys.modules[torch.optim.Optimizer.__module__]
    for owner in (module, optimizer):
        for name, value in vars(owner).items():
            if name.startswith("_global") and isinstance(value, dict):
                yield content(f"{owner.__name__}.{name}", value)
    yield attribute(module, "_global_is_full_backward_hook")
    for name in _CONFIGS:
        if (config := sys.modules.get(name)) is not None and hasattr(config, "get_config_copy"):
            yield ProcessSetting(name, config.get_config_copy, config.load_config)
    # Set once: a loader of the next entry would take the handler of SIGCHLD for installed.
    yield attribute(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set")
    torch_mp: Any = torch.multiprocessing
    start = partial(torch_mp.get_start_method, allow_none=True)
    yield ProcessSetting("multiprocessing start method", start, _set_start_method)
    sharing = torch_mp.get_sharing_strategy, torch_mp.set_sharing_strategy
    yield ProcessSetting("torch.multiprocessing sharing strategy", *sharing)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield ProcessSetting("numpy.errstate", numpy.geterr, lambda value: numpy.seterr(**value))


def _set_start_method(value: str | None) -> None:
    torch.multiprocessing.set_start_method(value, force=True)


def _of_python() -> Iterator[ProcessSetting]:
    # Each init_process_group puts another hook around the one before.
    for name in ("excepthook", "unraisablehook", "displayhook", "stdin", "stdout", "stderr"):
        yield attribute(sys, name)
    yield attribute(threading, "excepthook")
    yield content("sys.path", sys.path)
    yield content("sys.argv", sys.argv)
    yield content("builtins", vars(builtins))
    yield ProcessSetting("sys.recursionlimit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield ProcessSetting("sys.switchinterval", sys.getswitchinterval, sys.setswitchinterval)
    yield ProcessSetting("sys.settrace", sys.gettrace, sys.settrace)
    yield ProcessSetting("sys.setprofile", sys.getprofile, sys.setprofile)
    yield ProcessSetting("gc.threshold", gc.get_threshold, lambda value: gc.set_threshold(*value))
    yield ProcessSetting("gc.enabled", gc.isenabled, lambda on: gc.enable() if on else gc.disable())
    yield ProcessSetting("gc.debug", gc.get_debug, gc.set_debug)
    yield content("gc.callbacks", gc.callbacks)
    yield ProcessSetting("warnings.filters", lambda: list(warnings.filters), _set_filters)
    yield attribute(warnings, "showwarning")
    timeout = socket.getdefaulttimeout, socket.setdefaulttimeout
    yield ProcessSetting("socket.defaulttimeout", *timeout)
    place = partial(locale.setlocale, locale.LC_ALL)
    yield ProcessSetting("locale", place, place)
    yield attribute(logging.root.manager, "disable")
    yield ProcessSetting("logging", _Loggers, _set_loggers)


def _set_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


class _Loggers:
    """Level, handlers and switches of all loggers.

    What an imported package has made of its own loggers is no difference: the import is not
    repeated.
    """

    Changed = tuple[int, _Same, bool, bool]
    UNCHANGED: Changed = (logging.NOTSET, _Same([]), True, False)

    def __init__(self) -> None:
        every = logging.root.manager.loggerDict.items()
        named = {name: one for name, one in every if isinstance(one, logging.Logger)}
        self.states: dict[str, _Loggers.Changed] = {
            name: (one.level, _Same(one.handlers), one.propagate, one.disabled)
            for name, one in {**named, "": logging.root}.items()
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Loggers):
            return False
        return not (self.differing(other) or other.differing(self))

    def differing(self, other: _Loggers) -> dict[str, Changed]:
        """States here of the loggers that have another one there."""
        found = {name: self.states.get(name, self.UNCHANGED) for name in other.states}
        return {
            name: state
            for name, state in found.items()
            if state != other.states[name] and (name in self.states or not _is_imported(name))
        }


def _is_imported(logger: str) -> bool:
    package = logger.partition(".")[0]
    return package in sys.modules and package != "__main__"


def _set_loggers(value: _Loggers) -> None:
    for name, state in value.differing(_Loggers()).items():
        logger = logging.getLogger(name or None)
        level, handlers, logger.propagate, logger.disabled = state
        logger.setLevel(level)
        logger.handlers[:] = handlers.objects


# The operating system's.

_OURS = (DUMP_SIGNAL, INTERRUPT_SIGNAL, signal.SIGKILL, signal.SIGSTOP)
"""Signals whose handlers are ours, or nobody's."""


def _of_system() -> Iterator[ProcessSetting]:
    yield ProcessSetting("os.environ", os.environ.copy, _set_environment)
    yield ProcessSetting("the working directory", os.getcwd, os.chdir)
    yield ProcessSetting("umask", _umask, os.umask)
    for number in signal.valid_signals() - {*_OURS}:
        get, put = partial(signal.getsignal, number), partial(signal.signal, number)
        yield ProcessSetting(f"the handler of signal {int(number)}", get, put)
    mask = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ())
    yield ProcessSetting(
        "the signal mask", mask, partial(signal.pthread_sigmask, signal.SIG_SETMASK)
    )
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        yield ProcessSetting(f"timer {timer}", partial(_timer, timer), partial(_stop_timer, timer))
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limit = getattr(resource, name)
            limits = partial(resource.getrlimit, limit), partial(resource.setrlimit, limit)
            yield ProcessSetting(name, *limits)
    nice = partial(os.getpriority, os.PRIO_PROCESS, 0)
    yield ProcessSetting("nice", nice, partial(os.setpriority, os.PRIO_PROCESS, 0))
    yield ProcessSetting("the scheduler", partial(os.sched_getscheduler, 0), _set_scheduler)
    affinity = partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
    yield ProcessSetting("the processors", *affinity)
    score = Path("/proc/self/oom_score_adj")
    yield ProcessSetting("oom_score_adj", score.read_text, score.write_text)
    yield ProcessSetting("user and group", lambda: (os.getresuid(), os.getresgid(), os.getgroups()))
    yield ProcessSetting("the session", lambda: (os.getsid(0), os.getpgrp()))


def _set_environment(value: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(value)
    time.tzset()


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def _timer(timer: int) -> tuple[bool, float]:
    left, interval = signal.getitimer(timer)
    return left > 0, interval


def _stop_timer(timer: int, value: tuple[bool, float]) -> None:
    """Stop it; one that was running has another rest by now, and stays different."""
    if not value[0]:
        signal.setitimer(timer, 0)


def _set_scheduler(policy: int) -> None:
    os.sched_setscheduler(0, policy, os.sched_getparam(0))
