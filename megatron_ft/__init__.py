"""In-memory fault tolerance for LLM pretraining.

The public names are loaded on first use: processes that must stay small, the SMP
above all, import parts of this package without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_ft.config import SnapshotConfig
    from megatron_ft.core.identity import RankRule
    from megatron_ft.core.object_classes import register_class
    from megatron_ft.trainer.accelerator_state import InMemoryState
    from megatron_ft.trainer.manager import SnapshotManager
    from megatron_ft.trainer.optimizer_classes import register_optimizer
    from megatron_ft.trainer.resilient import run_resilient
    from megatron_ft.trainer.resumable_loader import ResumableLoader
    from megatron_ft.trainer.state import RngState

__all__ = [
    "InMemoryState",
    "RankRule",
    "ResumableLoader",
    "RngState",
    "SnapshotConfig",
    "SnapshotManager",
    "__version__",
    "register_class",
    "register_optimizer",
    "run_resilient",
]

_HOME = {
    "InMemoryState": "megatron_ft.trainer.accelerator_state",
    "RankRule": "megatron_ft.core.identity",
    "ResumableLoader": "megatron_ft.trainer.resumable_loader",
    "RngState": "megatron_ft.trainer.state",
    "SnapshotConfig": "megatron_ft.config",
    "SnapshotManager": "megatron_ft.trainer.manager",
    "register_class": "megatron_ft.core.object_classes",
    "register_optimizer": "megatron_ft.trainer.optimizer_classes",
    "run_resilient": "megatron_ft.trainer.resilient",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
