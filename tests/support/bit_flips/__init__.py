"""Random bits of real arenas are flipped: is each found?

``python -m tests.support.bit_flips --flips 1000000`` prints a table.
"""
