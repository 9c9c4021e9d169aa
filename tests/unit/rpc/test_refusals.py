"""Refused, Unfit: an error that crosses to another process is the same error there."""

from __future__ import annotations

import msgspec
import pytest

from megatron_ft.core.errors import (
    ConfigError,
    ControlPlaneError,
    LayoutMismatchError,
    MegatronFTError,
    NoRoomError,
    PinnedError,
    StaleIncarnationError,
)
from megatron_ft.rpc import messages as m

ERRORS = [ConfigError, LayoutMismatchError, NoRoomError, PinnedError, StaleIncarnationError]


@pytest.mark.parametrize("kind", ERRORS)
def test_refused_brings_an_error_of_its_class_and_text(kind: type[MegatronFTError]) -> None:
    found = m.decode(m.encode(m.Refused(kind("slot 1 is read"))))
    assert type(found.error) is kind and found.reason == "slot 1 is read"


def test_decode_takes_a_class_that_is_not_ours_for_a_refusal() -> None:
    found = m.decode(m.encode(m.Unfit("dp0", type("OtherError", (MegatronFTError,), {})("odd"))))
    assert type(found.error) is ControlPlaneError and str(found.error) == "odd"


@pytest.mark.parametrize("error", ["PinnedError", ["PinnedError"], ["PinnedError", 7], {}, None])
def test_decode_refuses_what_is_no_error(error: object) -> None:
    with pytest.raises(ControlPlaneError, match="unreadable control message"):
        m.decode(msgspec.msgpack.encode({"type": "Refused", "error": error}))
