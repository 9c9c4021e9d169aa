"""A rank that enters Megatron's ``pretrain`` many times in one process.

Run by tests/unit/trainer/test_teardown.py: ``train`` takes Megatron's flags.
"""

from __future__ import annotations

import os

from tests.programs.megatron_program import preload as preload  # noqa: PLC0414
from tests.support.reentries import ENTRIES, Reentries


def train() -> None:
    """Train so many times as the environment says, each time into a folder of its own."""
    from megatron_ft.cli.demo import pretrain_gpt
    from megatron_ft.megatron import install, reentry
    from tests.programs.megatron_program import make_manager

    reentries = Reentries(int(os.environ[ENTRIES]))
    reentry.install(reentries.run)
    install(make_manager)
    pretrain_gpt.main()
