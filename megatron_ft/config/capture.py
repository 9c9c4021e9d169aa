"""How tensors are cut up to be captured."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.config.declare import whole


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """Sizes from which, and into which, tensors are split."""

    replicated_split_bytes: int = whole(
        65536,
        "Replicated tensors of at least this size are split over data-parallel ranks.",
        0,
        "bytes",
    )
    copy_piece_bytes: int = whole(
        16 << 20, "Device-to-host copies are cut in pieces of this size.", 1, "bytes"
    )
