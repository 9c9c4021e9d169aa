"""Every setting, once: flags, environment variables, JSON keys and docs come from here.

Settings are declared in the modules ``snapshots``, ``keeping``, ``failures`` and ``capture``.
"""

from megatron_ft.config.problems import nearest, refuse
from megatron_ft.config.snapshot_config import SnapshotConfig, resolve
from megatron_ft.config.sources import Source, differences, environment_source
from megatron_ft.config.table import SETTINGS, SWITCH, SWITCH_HELP

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
