"""Prepares DeepSpeed for machines without an accelerator.

Started on a CPU, DeepSpeed compiles a shared-memory collective before it joins the job.  That
needs a compiler and ninja, takes minutes without a message, waits for ever for the lock of a build
that was killed, and under DeepSpeed's launcher leaves 69 MB a rank in /dev/shm.  Training never
calls that collective: it serves tensor-parallel inference, which falls back to an all-reduce.
"""

from __future__ import annotations

SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""DeepSpeed's name of the collective, a key of ``deepspeed.ops.__compatible_ops__``."""


def prepare() -> None:
    """On a CPU, keep DeepSpeed from compiling; call it before torch.distributed is started.

    It acts with and without a compiler: both then train with the same collectives, so a job may
    move between such machines.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
