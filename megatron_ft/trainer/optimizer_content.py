"""The state_dict of an optimizer with the optimizer's own tensors in it, whatever gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ft.trainer.coverage import numbers_of, tensors_in

_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def optimizer_content(optimizer: Any) -> Any:
    """What ``state_dict`` gives; copies in the place of tensors of the state are taken out again.

    Hooks and overriding methods may clone, cast or gather them.  Where these answer in another
    form than torch's, what they give is given: the check by address finds what is missing.
    """
    content = optimizer.state_dict()
    kept = getattr(optimizer, "state", None)
    if _is_stock(optimizer) or not isinstance(kept, Mapping) or not isinstance(content, Mapping):
        return content
    given = {id(tensor) for _, tensor in tensors_in("", content)}
    if all(id(tensor) in given for _, tensor in tensors_in("", kept)):
        return content
    numbers = numbers_of(optimizer)
    own = {numbers.get(id(key), key): value for key, value in kept.items()}
    if not _same_form(own, content.get("state")):
        return content
    return {**content, "state": own}


def _is_stock(optimizer: Any) -> bool:
    plain: Any = torch.optim.Optimizer.state_dict
    same = getattr(type(optimizer), "state_dict", None) is plain
    hooked = any(getattr(optimizer, name, None) for name in _HOOKS)
    return same and "state_dict" not in vars(optimizer) and not hooked


def _same_form(own: Any, given: Any) -> bool:
    """True if both hold values under the same keys, tensors where the other has one."""
    if isinstance(own, Mapping):
        same = isinstance(given, Mapping) and own.keys() == given.keys()
        return same and all(_same_form(value, given[key]) for key, value in own.items())
    return isinstance(own, torch.Tensor) == isinstance(given, torch.Tensor)
