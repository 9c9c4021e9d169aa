"""Modules that the processes of whole jobs import: the example's trainers, and all others."""

from __future__ import annotations

import torch
import torch.distributed
import torch.distributed.fsdp
import torch.nn.parallel

import megatron_ft.checkpoint.drain
import megatron_ft.checkpoint.export_drained
import megatron_ft.checkpoint.load
import megatron_ft.cli.chaos.trace
import megatron_ft.erasure.rebuild
import megatron_ft.erasure.worker
import megatron_ft.smp.__main__
import megatron_ft.supervisor.supervisor
import megatron_ft.trainer.cpu
import megatron_ft.trainer.manager
import megatron_ft.trainer.state  # noqa: F401


def preload() -> None:
    """Making an optimizer imports as much again as torch itself."""
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
