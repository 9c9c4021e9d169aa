"""Small objects of a training state as bytes, and back, without running anything they name.

``encode`` writes plain values, arrays, tensors and registered classes; ``decode`` gives them back,
or an error.  The layout of the bytes is in format.py and docs/arena-format.md.
"""

from __future__ import annotations

from megatron_ft.core.objects.decode import decode
from megatron_ft.core.objects.encode import encode
from megatron_ft.core.objects.registry import register_class, register_standard_classes

register_standard_classes()

__all__ = ["decode", "encode", "register_class"]
