"""Changes what a process keeps, one setting after the other, and has each of them put back.

Prints a JSON object: the name of each change to "restored", "kept" or the error.
"""

from __future__ import annotations

import builtins
import gc
import json
import locale
import logging
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from megatron_ft.core.errors import ProcessChangedError
from megatron_ft.trainer.teardown import ProcessState

Probe = Callable[[], Any]
Change = Callable[[], Any]

matmul: Any = torch.backends.cuda.matmul
cudnn: Any = torch.backends.cudnn
mkldnn: Any = torch.backends.mkldnn
backends: Any = torch.backends


def assign(owner: Any, name: str, value: Any) -> tuple[Probe, Change]:
    return lambda: getattr(owner, name), lambda: setattr(owner, name, value)


def soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def mixed() -> None:
    """Two APIs for one setting: after that torch's getter of the older one raises."""
    matmul.fp32_precision = "tf32"
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return
    raise AssertionError("torch lets the two APIs be mixed")


def in_place(name: str) -> None:
    os.environ[name] = "changed"


def log_handlers() -> list[int]:
    return [logging.root.level, len(logging.root.handlers)]


def add_handler() -> None:
    logging.root.setLevel(logging.DEBUG)
    logging.root.addHandler(logging.StreamHandler())
    logging.getLogger("of-the-training").addHandler(logging.StreamHandler())


def small() -> float:
    return float(torch.tensor(1e-40) * 0.5)


def first_filter() -> list[Any]:
    return list(warnings.filters)


def current_umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


CASES: dict[str, tuple[Probe, Change]] = {
    "fp32_precision": assign(backends, "fp32_precision", "tf32"),
    "fp32_precision of cuda.matmul": assign(matmul, "fp32_precision", "tf32"),
    "fp32_precision of cudnn.conv": assign(cudnn.conv, "fp32_precision", "ieee"),
    "fp32_precision of mkldnn.matmul": assign(mkldnn.matmul, "fp32_precision", "bf16"),
    "allow_tf32 of cuda": assign(matmul, "allow_tf32", True),
    "allow_tf32 of cudnn": assign(cudnn, "allow_tf32", False),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("medium"),
    ),
    "precision by two APIs": (lambda: matmul.fp32_precision, mixed),
    "reduced fp16": assign(matmul, "allow_fp16_reduced_precision_reduction", False),
    "reduced bf16": assign(matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": assign(matmul, "allow_fp16_accumulation", True),
    "flush_denormal": (small, lambda: torch.set_flush_denormal(True)),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", True),
    ),
    "flash": (
        backends.cuda.flash_sdp_enabled,
        lambda: backends.cuda.enable_flash_sdp(False),
    ),
    "math": (backends.cuda.math_sdp_enabled, lambda: backends.cuda.enable_math_sdp(False)),
    "mkldnn": assign(mkldnn, "enabled", False),
    "benchmark": assign(cudnn, "benchmark", True),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "default device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "fill of empty memory": assign(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "module hooks": (
        lambda: len(module_hooks._global_forward_hooks),
        lambda: module_hooks.register_module_forward_hook(lambda *_: None),
    ),
    "start method": (
        lambda: torch.multiprocessing.get_start_method(allow_none=True),
        lambda: torch.multiprocessing.set_start_method("spawn"),
    ),
    "threads of autograd": (
        torch._C._is_multithreading_enabled,
        lambda: torch.autograd.set_multithreading_enabled(False),
    ),
    "checks of sparse tensors": (
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        torch.sparse.check_sparse_tensor_invariants.enable,
    ),
    "order of the kernels for attention": (
        torch._C._get_sdp_priority_order,
        lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4]),
    ),
    "random numbers": (lambda: torch.get_rng_state().sum().item(), lambda: torch.rand(1)),
    "a variable": (lambda: os.environ.get("KNOWN"), lambda: in_place("KNOWN")),
    "a variable that is new": (lambda: os.environ.get("NEW"), lambda: in_place("NEW")),
    "a variable that is removed": (
        lambda: os.environ.get("KNOWN"),
        lambda: os.environ.pop("KNOWN"),
    ),
    "umask": (current_umask, lambda: os.umask(0o007)),
    "a handler": (
        lambda: signal.getsignal(signal.SIGUSR1),
        lambda: signal.signal(signal.SIGUSR1, lambda *_: None),
    ),
    "the mask": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
    ),
    "a timer": (
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda: signal.setitimer(signal.ITIMER_REAL, 1000.0),
    ),
    "a limit": (lambda: resource.getrlimit(resource.RLIMIT_NOFILE), soft_limit),
    "affinity": (
        lambda: os.sched_getaffinity(0),
        lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    ),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    ),
    "warnings": (first_filter, lambda: warnings.simplefilter("error")),
    "gc": (gc.isenabled, gc.disable),
    "gc's thresholds": (gc.get_threshold, lambda: gc.set_threshold(1, 2, 3)),
    "logging": (log_handlers, add_handler),
    "sockets": (socket.getdefaulttimeout, lambda: socket.setdefaulttimeout(3.0)),
    "sys.path": (lambda: list(sys.path), lambda: sys.path.insert(0, "/nowhere")),
    "another sys.path": assign(sys, "path", ["/nowhere", *sys.path]),
    "sys.argv": (lambda: list(sys.argv), lambda: sys.argv.append("--more")),
    "the folder": (os.getcwd, lambda: os.chdir("/")),
    "print": assign(builtins, "print", lambda *_: None),
    "excepthook": assign(sys, "excepthook", lambda *_: None),
    "stdout": assign(sys, "stdout", sys.stderr),
    "recursion": (sys.getrecursionlimit, lambda: sys.setrecursionlimit(4321)),
}

FOR_GOOD: dict[str, Change] = {
    "the process group": lambda: os.setpgid(0, 0),
}
"""What nothing puts back."""


def outcome(probe: Probe, change: Change) -> str:
    state, before = ProcessState(), probe()
    change()
    changed = probe() != before
    try:
        state.restore()
    except ProcessChangedError as error:
        return str(error)
    if not changed:
        return "kept"
    return "restored" if probe() == before else f"{probe()} instead of {before}"


def main() -> None:
    os.environ["KNOWN"] = "before"
    locale.setlocale(locale.LC_ALL, "C")
    result = {name: outcome(*case) for name, case in CASES.items()}
    result |= {name: outcome(lambda: 0, change) for name, change in FOR_GOOD.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
