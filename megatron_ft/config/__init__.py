"""Every setting, once: flags, environment variables, JSON keys and docs come from here.

Settings are declared in the modules ``snapshots``, ``keeping``, ``failures`` and ``capture``.
"""

from megatron_ft.config.settings import SETTINGS, SWITCH, SWITCH_HELP
from megatron_ft.config.snapshot_config import (
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
