"""A Megatron program that may continue with fewer ranks."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

from tests.support.megatron_jobs import Program, packaged

ITERATIONS = 40
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
"""On the CPU, Megatron's data loaders draw from the generator of dropout before it is restored."""


def program() -> Program:
    megatron = Path(str(distribution("megatron-core").locate_file("")))
    return replace(packaged(megatron), iterations=ITERATIONS)
