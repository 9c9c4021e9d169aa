"""The warning of long shards whose parity travels over encrypted TCP."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.supervisor.encoder_processes import EncoderStarter

GB = 10**9


def stripe(data_bytes: int, parity: int = 1) -> StripeState:
    return StripeState("xor", 3, parity, data_bytes, ("a", "b", "c", "d"), 4096)


def said(stripes: list[StripeState], wish: str = "tcp") -> str:
    starter = EncoderStarter(cast(Launcher, None), wish)
    return starter.slow(stripes, {f"s{n}": f"n{n // 2}" for n in range(8)})


def test_the_longest_shard_is_named_with_rate_time_and_remedy() -> None:
    text = said([stripe(2 * GB), stripe(9 * GB)])
    assert "0.9 GB/s a node: 2 ranks of 9.0 GB" in text and " 20 s " in text and "mpi4py" in text


@pytest.mark.parametrize(
    ("stripes", "wish"),
    [([stripe(GB)], "tcp"), ([stripe(9 * GB)], "auto"), ([stripe(9 * GB, 0)], "tcp"), ([], "tcp")],
)
def test_short_shards_mpi_and_no_parity_need_no_warning(stripes: Any, wish: str) -> None:
    assert said(stripes, wish) == ""


def test_a_job_says_it_once() -> None:
    starter = EncoderStarter(cast(Launcher, None), "tcp")
    first, second = (starter.slow([stripe(9 * GB)], {"s": "n"}) for _ in range(2))
    assert first and not second
