"""Every setting, once: flags, environment variables, JSON keys and docs come from here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megatron_ft.errors import ConfigError

ENVIRONMENT_PREFIX = "MEGATRON_FT_"


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Settings of one trainer's snapshots; immutable, checked when it is made.

    Megatron flags are ``--inmem-<name with dashes>``; environment variables are
    ``MEGATRON_FT_<NAME>``.  A value out of range raises ConfigError.
    """

    snapshot_interval: int = _setting(
        2, "Iterations between snapshots. One that is due before the last is committed is skipped."
    )
    fence_timeout_seconds: float = _setting(
        30.0, "Longest wait before optimizer.step() for a running capture; then it is abandoned."
    )
    register_timeout_seconds: float = _setting(
        600.0, "Longest wait at start-up for all ranks to register and for arenas to be made."
    )
    replicated_split_bytes: int = _setting(
        65536, "Replicated tensors of at least this size are split over data-parallel ranks."
    )
    copy_piece_bytes: int = _setting(
        16 << 20, "Device-to-host copies are cut in pieces of this size."
    )

    def __post_init__(self) -> None:
        for name in ("snapshot_interval", "copy_piece_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a whole number >= 1")
        for name in ("fence_timeout_seconds", "register_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds > 0")
        if self.replicated_split_bytes < 0:
            raise ConfigError("replicated_split_bytes is negative; give bytes >= 0")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SnapshotConfig:
        """Settings from names and values, text converted to each field's type.

        Raises ConfigError for an unknown name (with the nearest right one) or a
        value that does not convert.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        converted: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting {name!r}{hint}")
            wanted: Any = type(known[name].default)
            try:
                converted[name] = wanted(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name}={value!r} is not {wanted.__name__}") from error
        return cls(**converted)

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> SnapshotConfig:
        """Settings from ``MEGATRON_FT_<NAME>`` variables; what is not set keeps its default."""
        source = os.environ if environment is None else environment
        names = {f.name: ENVIRONMENT_PREFIX + f.name.upper() for f in dataclasses.fields(cls)}
        return cls.from_mapping({n: source[v] for n, v in names.items() if v in source})
