"""Puts the stand-in for CUDA in place when it is imported, where the machine has no device.

A trainer host imports it as it imports all that a script names, and Megatron after it.
"""

from __future__ import annotations

from megatron_ft.cli.demo import cpu_device

if cpu_device.needed():
    cpu_device.install()
