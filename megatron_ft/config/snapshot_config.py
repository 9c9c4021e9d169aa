"""A job's settings together: made from what is given, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.problems import refuse
from megatron_ft.config.sources import Source, environment_source, first_given
from megatron_ft.config.table import SETTINGS, Settings
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fewer_ranks import SHRINK

DRAIN_ONLY = (
    "drain_interval",
    "drain_keep",
    "drain_keep_every",
    "drain_bandwidth_mib",
    "drain_export_dir",
    "drain_stop_seconds",
    "export_on_failure",
    "time_limit_seconds",
)
"""Settings that do nothing without drain_dir."""


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig(Settings):
    """Settings of a job's snapshots; immutable, checked when it is made.

    Megatron flags are ``--inmem-<name with dashes>``; environment variables are
    ``MEGATRON_FT_<NAME>``.  Values out of range raise one ConfigError that lists all of them.
    """

    def __post_init__(self) -> None:
        problems = []
        for name, setting in SETTINGS.items():
            try:
                object.__setattr__(self, name, setting.parse(getattr(self, name), name))
            except ConfigError as error:
                problems.append(str(error))
        refuse(problems + self._without_effect())

    def _without_effect(self) -> list[str]:
        """Settings of a drain without folder or interval: whoever gave them expects files."""
        if self.on_no_spare == SHRINK and None in (self.drain_dir, self.drain_export_dir):
            return [
                "on_no_spare is shrink, which goes on from an export: give drain_dir, "
                "drain_interval and drain_export_dir, the folder that the training command loads"
            ]
        if self.drain_dir is not None:
            never = f"drain_dir is {self.drain_dir}, but drain_interval is 0: nothing is written"
            return [] if self.drain_interval else [f"{never}; give both"]
        return [
            f"{name} is {getattr(self, name)}, but there is no drain_dir to write to; give both"
            for name in DRAIN_ONLY
            if getattr(self, name) != SETTINGS[name].default
        ]

    @property
    def fixed_interval(self) -> int:
        """Iterations between snapshots, 0 where the job finds it out."""
        return 0 if isinstance(self.snapshot_interval, str) else self.snapshot_interval

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SnapshotConfig:
        """Settings from names and values, text converted to each setting's type.

        Raises ConfigError for unknown names (with the nearest right ones) and for values
        that do not convert, all at once.
        """
        return resolve(Source(values, str))

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> SnapshotConfig:
        """Settings from ``MEGATRON_FT_<NAME>`` variables; what is not set keeps its default."""
        return resolve(environment_source(environment))

    def job_variables(self) -> dict[str, str]:
        """The environment variables by which trainers learn what the supervisor uses."""
        values = {s.variable: getattr(self, s.name) for s in SETTINGS.values() if s.job}
        return {name: "" if value is None else str(value) for name, value in values.items()}


def resolve(*sources: Source) -> SnapshotConfig:
    """Each setting from the first source that gives it, else its default.

    Raises one ConfigError that lists every unknown name and every bad value, with the
    place where it stands.
    """
    return SnapshotConfig(**first_given(*sources))
