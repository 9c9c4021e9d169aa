"""What msgspec raises for bytes that it cannot read."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""One flipped bit in a text makes it no UTF-8, and nesting may be deeper than the stack."""
