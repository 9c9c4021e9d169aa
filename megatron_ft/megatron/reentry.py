"""Enters Megatron's ``pretrain`` again in a process that has trained before.

Megatron 0.19 parses its arguments before ``pretrain``, older releases in it.  Training changes
them, and the configuration that ``pretrain`` gets; so each entry has a copy of both.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_ft.core.frameworks import Function, wrap
from megatron_ft.trainer.teardown import on_teardown

log = logging.getLogger(__name__)

RunResilient = Callable[[Callable[[], Any]], Any]


def install(run_resilient: RunResilient) -> None:
    """Have ``run_resilient`` call ``pretrain``, also in scripts that import it by name later."""
    from megatron.training import training

    wrap(training, "pretrain", partial(_resilient, run_resilient))
    # The package has it by name too, and may be in the midst of its own import.
    sys.modules[training.__package__].pretrain = training.pretrain  # type: ignore[attr-defined]
    on_teardown(reset)


def _resilient(run_resilient: RunResilient, original: Function) -> Function:
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import global_vars

        try:
            pristine = copy.deepcopy((global_vars._GLOBAL_ARGS, args, kwargs))
        except Exception as error:  # a store, a process group: made outside, once
            log.warning("training cannot restart in process, but in a new one: %r", error)
            return original(*args, **kwargs)
        entries = 0

        def enter() -> Any:
            nonlocal entries
            entries += 1
            if entries == 1:
                return original(*args, **kwargs)
            options, again, keywords = copy.deepcopy(pristine)
            if options is not None:
                global_vars.set_global_variables(options)
            return original(*again, **keywords)

        return run_resilient(enter)

    return pretrain


def reset() -> None:
    """Bring Megatron's modules to the state that an import leaves, wherever training ended."""
    global_vars: Any = sys.modules.get("megatron.training.global_vars")
    training: Any = sys.modules.get("megatron.training.training")
    if global_vars is None or training is None:
        return
    if writer := global_vars._GLOBAL_TENSORBOARD_WRITER:
        writer.close()
    training.destroy_global_state()
