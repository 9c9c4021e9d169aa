"""In-memory snapshots for DeepSpeed.

A job that runs under ``megatron-ft run`` with ``"inmem_snapshot": {"enabled": true,
"follows_engine": true}`` in its DeepSpeed JSON needs nothing else, if the last is true of it.
``import deepspeed_ext`` does the same where the training command drops PYTHONPATH, and
``deepspeed_ext.attach(engine)`` needs no JSON.

Importing this imports neither torch nor deepspeed; the hook goes in behind the import of
DeepSpeed's engine, or at once if that was imported before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_ext import clients
from deepspeed_ext.hooks import attach, install_after_import

if TYPE_CHECKING:
    from deepspeed_ext.clients.accelerator import in_memory_state as InMemoryState
    from megatron_ft.trainer.resumable_loader import ResumableLoader

__all__ = ["InMemoryState", "ResumableLoader", "attach", "set_client_state"]

install_after_import()
clients.install_after_import()


def set_client_state(engine: Any, provider: Callable[[], Mapping[str, Any]]) -> None:
    """Have each snapshot hold the script's own state; see client_state.set_client_state."""
    from deepspeed_ext.client_state import set_client_state as set_provider

    set_provider(engine, provider)


def __getattr__(name: str) -> Any:
    # Classes that need torch or accelerate, without importing those for who does not use them.
    if name == "ResumableLoader":
        from megatron_ft.trainer.resumable_loader import ResumableLoader

        return ResumableLoader
    if name == "InMemoryState":
        from deepspeed_ext.clients.accelerator import in_memory_state

        return in_memory_state
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
