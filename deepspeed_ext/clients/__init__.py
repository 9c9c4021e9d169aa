"""Adapters for libraries that train through DeepSpeed: one module each, every one optional.

An adapter brings the library's own counters, schedules, data position and random states into
snapshots, and back.  Nothing here imports a library that the user's process has not imported.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ft.config.json_section import Section, read_section
from megatron_ft.core.frameworks import Function, wrap
from megatron_ft.core.startup.sitecustomize import after_import

TRAINER_MODULE = "transformers.trainer"


def install_after_import() -> None:
    """Hook the libraries of this process now if they were imported, else behind their import."""
    after_import(TRAINER_MODULE, _hook_trainer)


def _hook_trainer() -> None:
    wrap(sys.modules[TRAINER_MODULE].Trainer, "train", _from_memory)


def _from_memory(original: Function) -> Function:
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        section = _section_of(self) if trial is None else None
        if section is None or not section.enabled:
            return original(self, resume_from_checkpoint, trial, *args, **kwargs)
        # It imports what trains: no other program of transformers needs that.
        from deepspeed_ext.clients.trainer import start

        with start(self, section, resume_from_checkpoint) as path:
            return original(self, path, trial, *args, **kwargs)

    return train


def _section_of(trainer: Any) -> Section | None:
    """Its section, if this rank's place is known without an engine."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    config = {} if plugin is None else plugin.hf_ds_config.config
    return None if "tensor_parallel" in config else read_section(config)
