"""Copies that several threads make, and how many of them."""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena import digest
from megatron_ft.core.cores import MOST_THREADS
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.trainer import copier, fill
from megatron_ft.trainer.copier import Bytes, CopyItem, spare_threads
from megatron_ft.trainer.fill import BlockRanges, VerifiedCopy, copy_in_threads

BLOCK = 512

lengths = st.lists(st.integers(0, 9_000), max_size=8)


def sealed(contents: list[bytes], padding: int) -> tuple[Bytes, SealedRecord, list[int]]:
    """A region that holds these with gaps between them, and where each begins."""
    starts = [0, *accumulate(len(one) + padding for one in contents)]
    region = np.full(starts[-1] + 20_000, 9, np.uint8)
    for at, content in zip(starts, contents, strict=False):
        region[at : at + len(content)] = np.frombuffer(content, np.uint8)
    record = digest.seal(
        region,
        shard_id="s",
        snapshot=SnapshotId(1, 1),
        iteration=1,
        tensor_bytes=starts[-1],
        meta=b"objects",
        layout_hash=bytes(32),
        block_bytes=BLOCK,
    )
    return region, record, starts[:-1]


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 99), st.integers(1, 3_000), st.integers(1, 6), st.data())
def test_what_is_copied_was_verified_and_all_else_is_named(
    cut: list[int], padding: int, chunk: int, threads: int, data: st.DataObject
) -> None:
    contents = [bytes([1 + n % 100]) * length for n, length in enumerate(cut)]
    region, record, starts = sealed(contents, padding)
    blocks = digest.table_entries(record.tensor_bytes, BLOCK)
    places = st.integers(0, max(0, min(blocks * BLOCK, record.digest_offset) - 1))
    flipped = data.draw(st.sets(places, max_size=3)) if blocks else set()
    for at in flipped:
        region[at] ^= 128
    targets = [np.zeros(length, np.uint8) for length in cut]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "CHUNK_BYTES", chunk)
        patch.setattr(fill, "spare_threads", lambda: threads)
        check = digest.BlockCheck(region, record, BLOCK)
        order = data.draw(st.permutations(range(len(cut))))
        cuts = BlockRanges.of([starts[n] for n in order], [cut[n] for n in order], blocks, BLOCK)
        copying = VerifiedCopy(region, check, cuts, [targets[n].ctypes.data for n in order])
        bad = copying.run()
    assert bad == sorted({at // BLOCK for at in flipped})
    looked_at = [cuts.blocks_of(chunk) for chunk in cuts.chunks]
    assert [*chain(*looked_at)] == [*range(blocks)]
    spoilt = {*chain(*(some for some in looked_at if {*bad} & {*some}))}
    for content, target, start in zip(contents, targets, starts, strict=True):
        for at in range(len(content)):
            left_out = (start + at) // BLOCK in spoilt
            assert target[at] == (0 if left_out else content[at])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=8), st.integers(2_000, 200_000), st.integers(1, 6))
def test_every_tensor_arrives_whatever_the_pieces_and_threads(
    lengths: list[int], piece: int, threads: int
) -> None:
    sources = [torch.arange(n, dtype=torch.int32) + n for n in lengths]
    targets = [torch.full((n,), -1, dtype=torch.int32) for n in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "PIECE_BYTES", piece)
        patch.setattr(fill, "spare_threads", lambda: threads)
        copy_in_threads(CopyItem(*pair) for pair in zip(sources, targets, strict=True))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_strided_and_tracked_targets_are_filled_too() -> None:
    weight = torch.zeros(300, 300, requires_grad=True)
    strided = torch.zeros(300, 300).t()
    stored = torch.rand(300, 300)
    copy_in_threads([CopyItem(stored, weight.detach()), CopyItem(stored, strided)])
    assert torch.equal(weight, stored) and torch.equal(strided, stored)


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:3")


def test_what_a_device_still_does_is_finished_before_its_tensors_are_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies run in threads, whose streams do not wait for that of their caller."""
    plain, target = torch.zeros(9), torch.zeros(9).as_subclass(OnDevice)
    awaited: list[int | None] = []

    def finish(device: torch.device) -> None:
        """What had been begun there: first values."""
        awaited.append(device.index)
        target.fill_(7.0)

    monkeypatch.setattr(torch.cuda, "synchronize", finish)
    copy_in_threads([CopyItem(torch.ones(9), plain), CopyItem(torch.ones(9), target)])
    assert awaited == [3]
    assert plain.all() and bool((target == 1.0).all())


def test_a_copy_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        copy_in_threads([CopyItem(torch.zeros(3), torch.zeros(4))])


def test_more_threads_than_help_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (12, 12), (128, MOST_THREADS)):
        monkeypatch.setattr(copier, "own_cores", lambda n=cores: n)
        assert spare_threads() == threads
