"""Everything that a process keeps for all of its code and a training may change: one table.

A setting is a name, how to read it and how to put it back.  Where it cannot be put back it is only
compared.  The table is read anew each time: modules that a training has imported add to it.
"""

from __future__ import annotations

import builtins
import copy
import gc
import locale
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.data

from megatron_ft.rpc.heartbeat_page import DUMP_SIGNAL
from megatron_ft.trainer.interrupt import INTERRUPT_SIGNAL

NOTHING = object()


class ProcessSetting(NamedTuple):
    """One setting: ``put`` makes ``get`` give a value again that it gave before.

    ``new`` is the value of one that did not exist then; NOTHING if any will do.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any] | None = None
    new: Any = NOTHING


def settings() -> Iterator[ProcessSetting]:
    yield from _of_torch()
    yield from _of_modules()
    yield from _of_python()
    yield from _of_system()


def read(setting: ProcessSetting) -> Any:
    """The present value; the error's name where torch raises because two APIs were mixed."""
    try:
        return setting.get()
    except Exception as error:
        return "unreadable", type(error).__name__


def refill(container: Any, content: Any) -> None:
    """Give a container other content; names that stay are there at any moment."""
    if isinstance(container, dict):
        for name in [name for name in container if name not in content]:
            del container[name]
        container.update(content)
        if [*container] != [*content]:
            for name in content:
                container[name] = container.pop(name)
        return
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(content)


def _attributes(owner: Any, *names: str) -> Iterator[ProcessSetting]:
    for name in names:
        of = f"{owner.__name__}.{name}"
        yield ProcessSetting(of, partial(getattr, owner, name), partial(setattr, owner, name))


def _contents(owner: Any, containers: dict[str, Any]) -> Iterator[ProcessSetting]:
    for name, one in containers.items():
        of = f"{owner.__name__}.{name}"
        yield ProcessSetting(of, partial(copy.copy, one), partial(refill, one))


def _pairs(owner: Any, *names: str) -> Iterator[ProcessSetting]:
    """Settings that a module, if it is loaded, has ``get<name>`` and ``set<name>`` for."""
    for name in names if owner is not None else ():
        put = partial(_call, getattr(owner, f"set{name}"))
        yield ProcessSetting(f"{owner.__name__}.{name}", getattr(owner, f"get{name}"), put)


def _call(setter: Callable[..., Any], value: Any) -> None:
    """Some getters give several arguments of the setter."""
    if isinstance(value, dict):
        setter(**value)
    elif isinstance(value, tuple):
        setter(*value)
    else:
        setter(value)


# torch's own.

_ELSEWHERE = frozenset(
    ("default_device", "default_dtype", "dispatch_mode", "deterministic_algorithms", "grad_enabled",
     "tensor_metadata", "torch_function_state", "tracing_state", "value_trace", "thread_name",
     "schema", "graph_exec_group")
)  # fmt: skip
"""Pairs of torch._C that are not settings, or have a public pair in this table."""

_OPERATIONS = ("all", "matmul", "conv", "rnn")
"""Those with a precision of their own (torch.backends.*.fp32_precision)."""


def _of_torch() -> Iterator[ProcessSetting]:
    c: Any = torch._C
    yield from _pairs(torch, "_default_dtype", "_num_threads", "_num_interop_threads")
    yield from starmap(
        ProcessSetting,
        (
            ("torch.grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
            ("torch.default_device", torch.get_default_device, _set_device),
            ("torch.deterministic_algorithms", _deterministic, _set_deterministic),
            ("torch.autograd.anomaly", _anomaly, partial(_call, c.set_anomaly_enabled)),
            ("torch.flush_denormal", _flushes, torch.set_flush_denormal),
            ("torch.inference_mode", torch.is_inference_mode_enabled),
            ("torch.sparse checks", torch.sparse.check_sparse_tensor_invariants.is_enabled, _check),
            ("torch.autocast_cache", c.is_autocast_cache_enabled, c.set_autocast_cache_enabled),
            ("torch's dispatch modes", c._len_torch_dispatch_stack),
            ("torch's function modes", c._len_torch_function_stack),
        ),
    )
    for kind in ("cpu", "cuda"):
        get, put = partial(c.get_autocast_dtype, kind), partial(c.set_autocast_dtype, kind)
        yield ProcessSetting(f"torch.autocast_dtype({kind})", get, put)
        get, put = partial(c.is_autocast_enabled, kind), partial(c.set_autocast_enabled, kind)
        yield ProcessSetting(f"torch.autocast({kind})", get, put)
    for found in filter(re.compile("_(get|is)_").match, dir(c)):
        name = found.split("_", 2)[2]
        short = re.sub(r"(\w+)_sdp_enabled", r"sdp_use_\1", name).removesuffix("_enabled")
        setter = getattr(c, f"_set_{name}", getattr(c, f"_set_{short}", None))
        if name not in _ELSEWHERE and setter is not None:
            yield ProcessSetting(f"torch._C.{name}", getattr(c, found), partial(_call, setter))
    if precision := getattr(c, "_get_fp32_precision_getter", None):
        # Behind the older switches, which these contain.
        for pair in [("generic", "all"), *product(("cuda", "mkldnn"), _OPERATIONS)]:
            put = partial(c._set_fp32_precision_setter, *pair)
            name = "torch.backends.{}.{}.fp32_precision".format(*pair)
            yield ProcessSetting(name, partial(precision, *pair), put)


def _set_device(device: torch.device) -> None:
    # None is what a process begins with; "cpu" would intercept every tensor that is made.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _check(on: bool) -> None:
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    (checks.enable if on else checks.disable)()


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _flushes() -> bool:
    """True if numbers below the smallest normal one are zero; torch has no function for that."""
    return not (torch.tensor([1e-310], dtype=torch.float64) * 0.5).item()


_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


def _of_modules() -> Iterator[ProcessSetting]:
    hooks: Any = torch.nn.modules.module
    for owner in (hooks, sys.modules[torch.optim.Optimizer.__module__]):
        every = [(name, one) for name, one in vars(owner).items() if name.startswith("_global")]
        yield from _contents(owner, {name: one for name, one in every if isinstance(one, dict)})
    yield from _attributes(hooks, "_global_is_full_backward_hook")
    for name in _CONFIGS:
        if (config := sys.modules.get(name)) is not None and hasattr(config, "get_config_copy"):
            yield ProcessSetting(name, config.get_config_copy, config.load_config)
    # Set once: a loader of the next entry would take the handler of SIGCHLD for installed.
    yield from _attributes(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set")
    torch_mp: Any = torch.multiprocessing
    start = partial(torch_mp.get_start_method, allow_none=True)
    set_start = partial(torch_mp.set_start_method, force=True)
    yield ProcessSetting("multiprocessing start method", start, set_start)
    yield from _pairs(torch_mp, "_sharing_strategy")
    yield from _pairs(sys.modules.get("numpy"), "err")


def _of_python() -> Iterator[ProcessSetting]:
    # Each init_process_group puts another hook around the one before.
    yield from _attributes(sys, "excepthook", "unraisablehook", "displayhook")
    yield from _attributes(sys, "stdin", "stdout", "stderr", "dont_write_bytecode")
    yield from _attributes(threading, "excepthook")
    yield from _attributes(warnings, "showwarning")
    yield from _contents(sys, {"path": sys.path, "argv": sys.argv})
    yield from _contents(gc, {"callbacks": gc.callbacks})
    yield from _contents(builtins, {"names": vars(builtins)})
    yield from _pairs(sys, "recursionlimit", "switchinterval", "trace", "profile", "dlopenflags")
    yield from _pairs(threading, "trace", "profile")
    yield from _pairs(gc, "_threshold", "_debug")
    yield from _pairs(socket, "defaulttimeout")
    place = partial(locale.setlocale, locale.LC_ALL)
    yield from starmap(
        ProcessSetting,
        (
            ("gc.enabled", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
            ("threading.stack_size", threading.stack_size, threading.stack_size),
            ("warnings.filters", lambda: list(warnings.filters), _set_filters),
            ("locale", place, place),
            ("logging.disable", lambda: logging.root.manager.disable, logging.disable),
        ),
    )
    yield from _loggers()


def _set_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _loggers() -> Iterator[ProcessSetting]:
    for name, one in {"": logging.root, **logging.root.manager.loggerDict}.items():
        if isinstance(one, logging.Logger):
            # What an imported package makes of its own loggers stays: the import is not repeated.
            package = name.partition(".")[0]
            imported = package in sys.modules and package != "__main__"
            new = NOTHING if imported else (logging.NOTSET, [], True, False)
            row = partial(_logger_state, one), partial(_set_logger, one), new
            yield ProcessSetting(f"logger {name or 'root'}", *row)


def _logger_state(one: logging.Logger) -> tuple[int, list[logging.Handler], bool, bool]:
    return one.level, [*one.handlers], one.propagate, one.disabled


def _set_logger(one: logging.Logger, state: Any) -> None:
    level, one.handlers[:], one.propagate, one.disabled = state
    one.setLevel(level)


# The operating system's.

_OURS = (DUMP_SIGNAL, INTERRUPT_SIGNAL, signal.SIGKILL, signal.SIGSTOP)
"""Signals with our own handlers, and those that take none."""


def _of_system() -> Iterator[ProcessSetting]:
    mask = partial(signal.pthread_sigmask, signal.SIG_SETMASK)
    nice = partial(os.getpriority, os.PRIO_PROCESS, 0)
    score = Path("/proc/self/oom_score_adj")
    yield from starmap(
        ProcessSetting,
        (
            ("os.environ", os.environ.copy, _set_environment),
            ("the working directory", os.getcwd, os.chdir),
            ("umask", _umask, os.umask),
            ("the signal mask", partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), mask),
            ("nice", nice, partial(os.setpriority, os.PRIO_PROCESS, 0)),
            ("the scheduler", partial(os.sched_getscheduler, 0), _set_scheduler),
            ("the processors", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)),
            ("oom_score_adj", score.read_text, score.write_text),
            ("user and group", lambda: (os.getresuid(), os.getresgid(), os.getgroups())),
            ("the session", lambda: (os.getsid(0), os.getpgrp())),
        ),
    )
    for number in signal.valid_signals() - {*_OURS}:
        handler = partial(signal.getsignal, number), partial(signal.signal, number)
        yield ProcessSetting(f"the handler of signal {int(number)}", *handler)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        yield ProcessSetting(f"timer {timer}", partial(_timer, timer), partial(_stop_timer, timer))
    for name, limit in vars(resource).items():
        if name.startswith("RLIMIT_"):
            limits = partial(resource.getrlimit, limit), partial(resource.setrlimit, limit)
            yield ProcessSetting(name, *limits)


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
    """Stop a timer that did not run before; one that ran has other seconds left, and differs."""
    if not value[0]:
        signal.setitimer(timer, 0)


def _set_scheduler(policy: int) -> None:
    os.sched_setscheduler(0, policy, os.sched_getparam(0))
