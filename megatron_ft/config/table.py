"""Every setting, in the order of the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron_ft.config.capture import CaptureSettings
from megatron_ft.config.failures import FailureSettings
from megatron_ft.config.keeping import KeepingSettings
from megatron_ft.config.setting import Setting
from megatron_ft.config.snapshots import SnapshotSettings

SWITCH = "--inmem-snapshot"
SWITCH_HELP = "Keep snapshots of the training state in host memory and restore from them."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(CaptureSettings, FailureSettings, KeepingSettings, SnapshotSettings):
    """The values of all settings, not checked.  Fields come from the last base to the first."""


SETTINGS: Mapping[str, Setting] = {
    f.name: dataclasses.replace(f.metadata["setting"], name=f.name)
    for f in dataclasses.fields(Settings)
}
"""Every setting by its name, in the order of the documentation."""
