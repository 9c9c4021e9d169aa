"""The snapshot manager of one rank of a DeepSpeed job."""

from __future__ import annotations

from typing import Any

from deepspeed_ext.place import place_of
from megatron_ft.capture.manager import SnapshotManager
from megatron_ft.capture.manager_protocol import Manager
from megatron_ft.config import SnapshotConfig


def make_manager(config: SnapshotConfig, engine: Any) -> Manager:
    """The manager of this rank, named by its place in DeepSpeed's parallel groups.

    Raises NotUnderSupervisorError outside ``megatron-ft run``.
    """
    return SnapshotManager(config, **place_of(engine))
