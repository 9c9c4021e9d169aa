"""What a rank of a test runs: the demo's training program, with an SMP that the test plays."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ft.config import SnapshotConfig
from tests.support import megatron_host
from tests.support.late_capture import RESHAPE_FROM, ArenaManager, ReshapingManager

PLUGINS = "TEST_PLUGINS"
"""Functions to call before training, "module:function", separated by blanks."""


def _weights(state: Any) -> Iterator[torch.Tensor]:
    for chunk in state._model:
        yield from chunk.parameters()


def make_manager(config: SnapshotConfig) -> ArenaManager:
    from megatron_ft.megatron.run import place_of_rank

    kind = ReshapingManager if RESHAPE_FROM in os.environ else ArenaManager
    return kind(config, place_of_rank(), _weights)


def preload() -> None:
    """Import everything that ranks need, in the process that they are forked from."""
    megatron_host.install()
    for module in (
        "megatron.core.models.mimo",
        "megatron.core.datasets.helpers",
        "megatron.core.tokenizers.text.models.gpt_tokenizer",
        "megatron.training.training",
        "megatron.training.models",
        "megatron.training.yaml_arguments",
        "megatron_ft.megatron.hooks",
        "megatron_ft.megatron.run",
        "megatron_ft.megatron.own_checkpoints",
        "megatron_ft.megatron.fewer_ranks",
        "megatron_ft.cli.demo.gpt_training",
        "megatron_ft.cli.demo.megatron_trace",
        "megatron_ft.cli.demo.pretrain_gpt",
        "torch.utils.serialization.config",
    ):
        importlib.import_module(module)
    _read_help_once()


def _read_help_once() -> None:
    """Parsers of flags are made from the source of Megatron's classes, in every rank."""
    from megatron.training.arguments import add_megatron_arguments

    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    ast.parse = functools.cache(ast.parse)  # type: ignore[assignment]
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def train() -> None:
    """Train as ``sys.argv`` says."""
    from megatron_ft.cli.demo import pretrain_gpt
    from megatron_ft.megatron import install

    for plugin in os.environ.get(PLUGINS, "").split():
        module, _, function = plugin.partition(":")
        getattr(importlib.import_module(module), function)()
    install(make_manager)
    if "--save" in sys.argv:
        _fork_result_queue()
    pretrain_gpt.main()
    # The first rank serves the store that the others may still ask.
    torch.distributed.barrier()


def _fork_result_queue() -> None:
    """Of checkpoint writers: Megatron spawns its process otherwise, which imports torch anew."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue(mp_mode="fork")


if __name__ == "__main__":
    preload()
    train()
