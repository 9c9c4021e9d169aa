"""Loads DeepSpeed and its Adam operators, for the server that forks workers of DeepSpeed's tests.

Each worker would take seconds for it.  An operator that cannot be built fails in its tests.
"""

from contextlib import suppress

from deepspeed.accelerator import get_accelerator

for builder in ("CPUAdamBuilder", "FusedAdamBuilder"):
    with suppress(Exception):
        get_accelerator().create_op_builder(builder).load()
