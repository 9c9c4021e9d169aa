"""Copies that several threads make, and how many of them."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.capture import fill
from megatron_ft.capture.copier import CopyItem
from megatron_ft.capture.fill import Copies, Span, copy_in_threads
from megatron_ft.capture.threads import MOST, spare_threads

lengths = st.lists(st.integers(0, 70_000), max_size=8)
large = st.tuples(lengths, st.integers(2_000, 200_000))
tiny = st.tuples(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 1_000))


@settings(max_examples=30, deadline=None)
@given(large | tiny, st.integers(1, 6))
def test_every_byte_arrives_whatever_the_pieces_and_threads(
    cut: tuple[list[int], int], threads: int
) -> None:
    lengths, piece = cut
    sources = [torch.arange(n, dtype=torch.int32) + n for n in lengths]
    targets = [torch.full((n,), -1, dtype=torch.int32) for n in lengths]
    plain = [torch.full((n,), -1, dtype=torch.int32) for n in lengths]
    items = [CopyItem(*pair) for pair in zip(sources, targets, strict=True)]
    spans = [
        Span(t.data_ptr(), s.data_ptr(), s.nbytes) for s, t in zip(sources, plain, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "PIECE_BYTES", piece)
        patch.setattr(fill, "spare_threads", lambda: threads)
        for half in Copies(spans, items).halves():
            copy_in_threads(half)
    for source, target, other in zip(sources, targets, plain, strict=True):
        assert torch.equal(source, target) and torch.equal(source, other)


def test_strided_and_tracked_targets_are_filled_too() -> None:
    weight = torch.zeros(300, 300, requires_grad=True)
    strided = torch.zeros(300, 300).t()
    stored = torch.rand(300, 300)
    items = [CopyItem(stored, weight.detach()), CopyItem(stored, strided)]
    copy_in_threads(Copies([], items))
    assert torch.equal(weight, stored) and torch.equal(strided, stored)


def test_a_copy_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        copy_in_threads(Copies([], [CopyItem(torch.zeros(3), torch.zeros(4))]))


def test_ranks_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, threads in (
        (2, "1", 2),
        (128, "8", MOST),
        (16, "8", 2),
        (2, "8", 1),
        (3, "", 3),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert spare_threads({"LOCAL_WORLD_SIZE": ranks}) == threads
