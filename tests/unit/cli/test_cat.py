"""``megatron-ft cat``: one tensor of the unsharded model, from memory and from disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.cli import main as cli
from megatron_ft.core.identity import SnapshotId
from tests.support.disk_drains import drain
from tests.support.disk_samples import BLOCK, Memory, content

WIDTH = 20_000
"""Rows of ``weight``, of 12 bytes: hundreds of blocks."""


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path / "shm", width=WIDTH)
    memory.commit(1, 10)
    memory.commit(2, 20)
    return memory


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, memory: Memory, tmp_path: Path) -> list[str]:
    """The flags that name a source."""
    if request.param == "disk":
        return ["--from", str(drain(memory, tmp_path / "disk", 20))]
    return ["--job", memory.job, "--arena-dir", str(memory.root)]


def cat(place: Sequence[str], *words: str) -> int:
    return cli.main(["cat", *place, *words])


def test_all_names_are_listed(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cat(place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "part  int64[11]" in lines and f"dp0:weight  float32[{WIDTH}, 3]" in lines
    assert "dp1:weight" in " ".join(lines) and "weight" not in [ln.split()[0] for ln in lines]


def test_a_tensor_of_two_shards_is_put_together(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each captured the half of all that the layout of this sample gives to its first part."""
    assert cat(place, "dp1:half", "--to", str(tmp_path / "half.pt")) == 0
    stored = content("dp1half", SnapshotId(1, 2), 14)
    expected = torch.from_numpy(stored).view(torch.bfloat16)
    found = torch.load(tmp_path / "half.pt")
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    said = capsys.readouterr().out
    assert "dp1:half  bfloat16[7]" in said and "iteration 20" in said and "14 bytes read" in said
    assert cat(place, "dp1:half", "--to", str(tmp_path / "half.pt")) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_part_that_no_shard_holds_is_named(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(place, "part") == 2
    assert "no shard that is left holds part[0:5]" in capsys.readouterr().err


def test_an_unknown_name_is_answered_with_those_that_are_near(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(place, "dp0:weigth") == 2
    assert "did you mean dp0:weight" in capsys.readouterr().err
    assert cat(place, "--to", "file.pt") == 2
    assert "--to needs the name" in capsys.readouterr().err


def test_damage_counts_only_where_it_is_read(
    memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--job", memory.job, "--arena-dir", str(memory.root)]
    entry = memory.layout.by_name()["weight"]
    memory.flip("dp0", 2, entry.offset + 100 * BLOCK)
    assert cat(place, "dp0:half") == 0
    assert cat(place, "dp1:weight") == 0
    capsys.readouterr()
    assert cat(place, "dp0:weight") == 2
    assert "1 of its blocks of 1024 bytes do not match" in capsys.readouterr().err


def test_damage_on_disk_counts_only_where_it_is_read(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    file = folder / "dp0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert cat(["--from", str(folder)], "dp0:half") == 0
    assert cat(["--from", str(folder)], "dp0:weight") == 2
    assert "1 of its blocks of 1024 bytes do not match" in capsys.readouterr().err


def test_of_a_checkpoint_only_the_ranges_are_read(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = drain(memory, tmp_path / "disk", 20), 0

    def counted(self: DiskCalls, descriptor: int, buffer: memoryview, at: int) -> int:
        nonlocal read
        read += len(buffer)
        return os.preadv(descriptor, [buffer], at)

    monkeypatch.setattr(DiskCalls, "read", counted)
    assert cat(["--from", str(folder)], "dp0:half") == 0
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert files > 2 * 12 * WIDTH and read < files / 8
