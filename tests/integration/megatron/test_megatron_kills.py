"""Jobs of Megatron under the supervisor that lose a trainer, in layouts that talk in many ways.

The supervisor has calls of torch.distributed recorded, which ranks without one do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_fewer import NO_DROPOUT, program
from tests.support.megatron_jobs import LONG_JOB, check_identical
from tests.support.megatron_layouts import DISTRIBUTED, EP2, MORE, OVERLAPPED, PP2, TP2, VPP

pytestmark = LONG_JOB

SENT_EARLY = ("--overlap-p2p-communication-warmup-flush",)
LAYOUTS = {
    "tp2": (*TP2, *DISTRIBUTED, *OVERLAPPED),
    "pp2": (*PP2, *DISTRIBUTED),  # sends in batches, which interleaved stages do not
    "vpp": (*VPP, *DISTRIBUTED, *OVERLAPPED),
    "vpp-sent-early": (*VPP, *DISTRIBUTED, *OVERLAPPED, *SENT_EARLY),
    "ep2": (*EP2, *DISTRIBUTED),
    **{layout.name: layout.flags for layout in MORE if layout.name != "validated-and-evaluated"},
}
"""Megatron itself ends with SIGABRT now and then after it has evaluated (0.19.2, torchrun)."""


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_a_killed_trainer_changes_nothing(
    tmp_path: Path, megatron_corpus: Path, flags: tuple[str, ...]
) -> None:
    check_identical(program(), megatron_corpus, tmp_path, *NO_DROPOUT, *flags)
