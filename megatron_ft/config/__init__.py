"""Every setting, once: flags, environment variables, JSON keys and docs come from here.

A new setting is a new field of ``SnapshotConfig`` in ``settings``.
"""

from megatron_ft.config.settings import (
    SETTINGS,
    SWITCH,
    SWITCH_HELP,
    SnapshotConfig,
    Source,
    differences,
    environment_source,
    nearest,
    refuse,
    resolve,
)

__all__ = [
    "SETTINGS",
    "SWITCH",
    "SWITCH_HELP",
    "SnapshotConfig",
    "Source",
    "differences",
    "environment_source",
    "nearest",
    "refuse",
    "resolve",
]
