"""Copies with the package's own library, and without it."""

from __future__ import annotations

import pytest

from megatron_ft.core import copy_crc


@pytest.fixture(params=["one pass", "two passes"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and digests are made in one pass, and as where the library is not built."""
    if request.param == "two passes":
        monkeypatch.setattr(copy_crc, "find", lambda: "left out by a test")
    elif copy_crc.load() is None:
        pytest.skip(copy_crc.describe())
