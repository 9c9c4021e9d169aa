"""The job's summary as an SMP holds it: JSON objects by name, each known by its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_DIGEST_BYTES = 8
"""Long enough to tell a part from the one before it; nothing is proved with it."""


def digest(part: bytes) -> bytes:
    """What a node says of a part that it has, so that it is not sent again."""
    return hashlib.blake2b(part, digest_size=_DIGEST_BYTES).digest()


def digests(parts: Mapping[str, bytes]) -> dict[str, bytes]:
    """``digest`` of each part, by name."""
    return {name: digest(part) for name, part in parts.items()}


def merged(parts: Mapping[str, bytes]) -> bytes:
    """The members of all parts as one JSON object; empty if there are no parts."""
    members: dict[str, Any] = {}
    for part in parts.values():
        members |= json.loads(part)
    return json.dumps(members).encode() if parts else b""
