"""Run by ``site`` before a trainer: notes when it has imported torch."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from benchmarks.restart.noted_imports import NOTES, PACE_SECONDS
from megatron_ft.cli.chaos.trace import VARIABLE
from megatron_ft.core.startup import DEEPSPEED
from megatron_ft.core.startup.sitecustomize import AfterImport, run_hidden


def note() -> None:
    """Append this process to the notes of the job."""
    folder = os.environ[VARIABLE]
    os.makedirs(folder, exist_ok=True)
    line = json.dumps({"pid": os.getpid(), "at": time.monotonic()}) + "\n"
    descriptor = os.open(f"{folder}/{NOTES}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def pace() -> None:
    """Make the steps of DeepSpeed's engine, which was imported, last longer."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    step = DeepSpeedEngine.step

    def paced(engine: Any, *rest: Any, **keywords: Any) -> Any:
        time.sleep(PACE_SECONDS)
        return step(engine, *rest, **keywords)

    DeepSpeedEngine.step = paced


if __name__ == "sitecustomize":
    if VARIABLE in os.environ and "torch" not in sys.modules:
        AfterImport("torch", note).install()
    AfterImport(DEEPSPEED, pace).install()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
