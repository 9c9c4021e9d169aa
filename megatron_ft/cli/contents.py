"""The rule of what snapshots hold, in a line: before training no model is known.

The first start says it again with numbers (trainer/notices.py).
"""

from __future__ import annotations

_MEGATRON = (
    "captured: masters, moments, frozen parameters, buffers, schedule, random states, counters; "
    "derived in a restore: weights that are their masters rounded; left out: nothing of the model"
)
_DEEPSPEED = (
    "captured: masters, moments, parameters of no optimizer, buffers, schedules, random states, "
    "client_state, positions of watched loaders; derived in a restore: weights that are their "
    "masters rounded; left out: other objects of the script"
)
_MAPPING = (
    "captured: all that the script's state mapping names, modules and optimizers whole; derived in "
    "a restore: nothing; left out: what `leave_out` names, and objects in no mapping"
)


def rule(*, megatron: bool, deepspeed: bool) -> str:
    """The rule for a training command that switches on one of these, or neither."""
    return _MEGATRON if megatron else _DEEPSPEED if deepspeed else _MAPPING
