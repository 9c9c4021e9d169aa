"""The demo's training program with writers that keep what is logged, and no hurry.

Stand-ins take the places of the tensorboard and wandb packages, so Megatron makes its
writers as it does for users.  Every capture has come to its end one iteration later.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron_ft.cli.demo import cpu_device
from megatron_ft.config import SnapshotConfig
from megatron_ft.trainer.ticket import Ticket

RECORDS = "TEST_LOG_RECORDS"
OUTCOME_SECONDS = 60


def _keep(writer: str, name: str, value: float, step: int) -> None:
    with Path(os.environ[RECORDS], f"{writer}.jsonl").open("a") as file:
        file.write(json.dumps([os.environ["RANK"], name, float(value), step]) + "\n")


class SummaryWriter:
    """Of tensorboard what Megatron and we use."""

    def __init__(self, log_dir: str, max_queue: int) -> None:
        pass

    def add_scalar(self, name: str, value: float, step: int) -> None:
        _keep("tensorboard", name, value, step)

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        pass

    def flush(self) -> None:
        pass


def log_to_wandb(values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        _keep("wandb", name, value, step)


def install_writers() -> None:
    tensorboard: Any = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter
    wandb: Any = ModuleType("wandb")
    wandb.init, wandb.log, wandb.finish = lambda **kwargs: None, log_to_wandb, lambda: None
    wandb.config = SimpleNamespace(update=lambda values: None)
    wandb.run = SimpleNamespace(dir=".")
    sys.modules.update({"torch.utils.tensorboard": tensorboard, "wandb": wandb})


def make_patient_manager(config: SnapshotConfig) -> Any:
    from megatron_ft.megatron.run import make_manager

    manager: Any = make_manager(config)
    save = manager.save

    pending: list[Ticket] = []

    def wait_and_save(iteration: int, state: Any) -> Any:
        # Not in the iteration of the capture: a rank that missed it says so only in its next
        # call, which it could not reach while another waits for the outcome.
        while pending:
            pending.pop().committed.result(OUTCOME_SECONDS)
        pending.append(save(iteration, state))
        return pending[-1]

    manager.save = wait_and_save
    return manager


def main() -> None:
    cpu_device.install()
    install_writers()
    from megatron_ft.cli.demo import pretrain_gpt
    from megatron_ft.megatron import install

    install(make_patient_manager)
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
