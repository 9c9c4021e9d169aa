"""The layout of encoded values: a magic number and one MessagePack value.

``None``, bools, ints of 64 bits, floats, texts and bytes are those of MessagePack.  Everything else
is an array that begins with one of the tags below; maps and extension types do not occur.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = b"MFTO\x01"
"""Four letters and the version of this layout."""

MOST_DEPTH = 64
"""Containers in containers, at most; deeper would come near the interpreter's own stack."""

MOST_BYTES = 1 << 30
"""Of one encoded value."""

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values are written as they are."""


class Tag(IntEnum):
    """First element of an array; what follows it.

    Those that can be referred to are numbered from 0 in the order in which they begin.
    """

    LIST = 0
    """Array of items; numbered."""
    TUPLE = 1
    """Array of items."""
    DICT = 2
    """Array of keys, array of values, in order; numbered."""
    SET = 3
    """Array of items; numbered."""
    FROZENSET = 4
    """Array of items."""
    BYTEARRAY = 5
    """Bytes; numbered."""
    INT = 6
    """Two's complement, little-endian; for what 64 bits do not hold."""
    COMPLEX = 7
    """Real part, imaginary part."""
    TEXT = 8
    """UTF-8 in which surrogates are encoded as well, for texts that are none otherwise."""
    ARRAY = 9
    """Of numpy: data type, shape, bytes in C order; numbered."""
    SCALAR = 10
    """Of numpy: data type, bytes."""
    TENSOR = 11
    """Data type, shape, type of device, flags (1 a Parameter, 2 requires_grad), bytes; numbered."""
    TORCH_DTYPE = 12
    """Its name."""
    TORCH_SIZE = 13
    """Array of lengths."""
    TORCH_DEVICE = 14
    """As text."""
    OBJECT = 15
    """Name of a registered class, and what its values are made from; numbered."""
    REFERENCE = 16
    """Number of something that began before."""
    PART = 17
    """What stands for a part that is stored elsewhere."""
