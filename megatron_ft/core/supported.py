"""Which releases of the frameworks work; read without importing any of them."""

from __future__ import annotations

from typing import NamedTuple


class Releases(NamedTuple):
    """One framework: its name, its distribution, the oldest release, and those tested.

    Newer ones are tried if they have the names that are used.
    """

    name: str
    distribution: str
    oldest: tuple[int, ...]
    working: str


MEGATRON = Releases("Megatron", "megatron-core", (0, 17), "megatron-core 0.17.1, 0.18.2 and 0.19.2")
DEEPSPEED = Releases("DeepSpeed", "deepspeed", (0, 18, 1), "deepspeed 0.18.9 and 0.19.8")
