"""What a rank takes from its environment under ``megatron-ft run``: number, SMP and watch."""

from __future__ import annotations

import os

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc.client import TrainerClient
from megatron_ft.trainer.client_protocol import SnapshotClient
from megatron_ft.trainer.watch.trainer import TrainerWatch


def number(name: str, default: int) -> int:
    """The environment variable ``name``, such as RANK; ``default`` where it is not set."""
    return int(os.environ.get(name, default))


def connect(rank: int) -> SnapshotClient:
    """The connection to the node's SMP; NotUnderSupervisorError if there is no supervisor."""
    return TrainerClient(ProcessEnvironment.from_env(), rank, number("LOCAL_RANK", 0))


def watch(rank: int, gradients: bool) -> TrainerWatch:
    """The watch of this process, which follows its gradients if asked to; errors as ``connect``."""
    return TrainerWatch.begin(ProcessEnvironment.from_env(), rank, gradients)
