"""The snapshot manager of one rank of a DeepSpeed job."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed_ext.place import place_of
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.manager_protocol import Manager

_owner: list[weakref.ref[Any]] = []


def claim(engine: Any) -> None:
    """Have the snapshots of this process be those of ``engine``; ConfigError if they are another's.

    Also of one that is gone: the shards of both would have one name, and the next life would
    restore the one from the other's.
    """
    _owner[:] = _owner or [weakref.ref(engine)]
    if _owner[0]() is not engine:
        raise ConfigError(
            "this process has taken snapshots of another engine, and a job can have those of one "
            'only: leave "inmem_snapshot" out of the config of every engine but one'
        )


def make_manager(config: SnapshotConfig, engine: Any) -> Manager:
    """The manager of this rank, named by its place in DeepSpeed's parallel groups.

    Raises NotUnderSupervisorError outside ``megatron-ft run``.
    """
    return SnapshotManager(config, **place_of(engine))
