"""Versions in the evidence of a failure: what trainers have imported, not what is installed."""

from __future__ import annotations

import platform
import sys
from types import ModuleType

import pytest

from megatron_ft.core.frameworks import imported_versions


def test_the_module_that_was_imported_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "deepspeed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    own = ModuleType("megatron.core")
    own.__version__ = "0.20.0+d98e8a6"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core", own)
    expected = {"python": platform.python_version(), "megatron-core": "0.20.0+d98e8a6"}
    assert imported_versions() == expected
