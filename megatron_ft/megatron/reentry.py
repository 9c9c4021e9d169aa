"""Enters Megatron's ``pretrain`` again in a process that has trained before.

Megatron 0.19 parses its arguments before ``pretrain``, older releases in it.  Training changes
them, and puts its optimizer and model into the configuration that ``pretrain`` gets.  So each
entry has copies of both, and what the caller holds stays as it was.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron_ft.core.frameworks import Function, wrap
from megatron_ft.trainer.package_state import PackageState
from megatron_ft.trainer.resilient import RestartClient
from megatron_ft.trainer.teardown import on_entry, on_teardown

log = logging.getLogger(__name__)

RunResilient = Callable[[Callable[[], Any]], Any]


def install(run_resilient: RunResilient) -> None:
    """Have ``run_resilient`` call ``pretrain``, also in scripts that import it by name later."""
    from megatron.training import training

    wrap(training, "pretrain", partial(_resilient, run_resilient))
    # The package has it by name too, and may not have finished its own import.
    sys.modules[training.__package__].pretrain = training.pretrain  # type: ignore[attr-defined]


def _resilient(run_resilient: RunResilient, original: Function) -> Function:
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import global_vars, training

        if (outer := RestartClient.current) is not None:
            # A run_resilient of the script: it would enter again with the variables of this run.
            outer.close()
        if "--async-save" in sys.argv or getattr(global_vars._GLOBAL_ARGS, "async_save", False):
            # Its writer and its queues outlast a teardown: a process that trained twice never ends.
            log.warning("with --async-save training cannot restart in process, but in a new one")
            return original(*args, **kwargs)
        given = (global_vars._GLOBAL_ARGS, args, kwargs)
        try:
            given = copy.deepcopy(given)
        except Exception as error:  # a store, a process group: made outside, once
            log.warning("training cannot restart in process, but in a new one: %r", error)
            return original(*args, **kwargs)
        entered = False

        def enter() -> Any:
            nonlocal entered
            options, copied, keywords = copy.deepcopy(given)
            if entered and options is not None:
                global_vars.set_global_variables(options)
            entered = True
            return original(*copied, **keywords)

        with ExitStack() as registered:

            def note() -> None:
                packages = [PackageState(name) for name in ("megatron", "transformer_engine")]
                times = dict(getattr(training, "_STARTUP_TIMESTAMPS", {}))
                reset = partial(_reset, packages, times)
                registered.callback(on_teardown(reset))

            registered.callback(on_entry(note))
            return run_resilient(enter)

    return pretrain


def _reset(before: list[PackageState], times: dict[str, Any]) -> None:
    """Leave the modules of packages as they were ``before``, but without arguments."""
    from megatron.training import global_vars, training

    if writer := global_vars._GLOBAL_TENSORBOARD_WRITER:
        writer.close()
    training.destroy_global_state()
    for package in before:
        package.restore()
    # A time that a new process does not have would be reduced by the survivors alone.
    getattr(training, "_STARTUP_TIMESTAMPS", {}).update(times)
    # Their values of the first entry, where arguments were parsed before it.
    training.destroy_global_state()
