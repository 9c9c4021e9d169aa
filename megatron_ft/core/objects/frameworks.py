"""Classes of Megatron and DeepSpeed that their own state dicts hold.

Named here so that reading imports these and nothing else: of modules in ENUMERATIONS only
enumerations, of CLASSES only what is listed.
"""

from __future__ import annotations

import importlib
import sys
from enum import Enum
from typing import Any

from megatron_ft.core.objects.registry import KnownClass, name_of, usual_way

ENUMERATIONS = frozenset(
    {
        "deepspeed.runtime.config",
        "deepspeed.runtime.zero.config",
        "deepspeed.runtime.zero.offload_config",
        "megatron.core.enums",
        "megatron.core.rerun_state_machine",
        "megatron.core.transformer.enums",
        "megatron.training.checkpointing",
    }
)
"""Modules whose enumerations occur in arguments, configurations and the rerun machine."""

CLASSES = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler:LossScaler",
        "deepspeed.utils.tensor_fragment:fragment_address",
        "megatron.core.dist_checkpointing.mapping:LocalNonpersistentObject",
        "megatron.core.dist_checkpointing.mapping:ShardedObject",
        "megatron.core.dist_checkpointing.mapping:ShardedTensor",
        "megatron.core.rerun_state_machine:Call",
        "megatron.core.rerun_state_machine:Caller",
        "megatron.core.rerun_state_machine:QuickStats",
    }
)
"""What forms of checkpoints are made of, loss scalers, and results that a rerun compares."""


def framework_class(cls: type) -> KnownClass | None:
    """How instances of a class of the tables are stored; None for any other."""
    name = name_of(cls)
    if name in CLASSES or (cls.__module__ in ENUMERATIONS and issubclass(cls, Enum)):
        return KnownClass(name, *(usual_way(cls) or (_attributes, _Maker(cls))))
    return None


def framework_name(name: str) -> KnownClass | None:
    """The same by name; imports the framework's module, ImportError if it is not there."""
    module, _, qualified = name.partition(":")
    if name not in CLASSES and module not in ENUMERATIONS:
        return None
    loaded = sys.modules.get(module) or importlib.import_module(module)
    cls = vars(loaded).get(qualified)
    # A name that the module has from elsewhere would be another class under this one's name.
    return framework_class(cls) if isinstance(cls, type) and name_of(cls) == name else None


def _attributes(value: Any) -> dict[str, Any]:
    return dict(vars(value))


class _Maker:
    """An instance with the attributes that another had."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __call__(self, attributes: dict[str, Any]) -> Any:
        made: Any = object.__new__(self._cls)
        vars(made).update(attributes)
        return made
