"""The corpus is bounded, ordered, and what Megatron's own reader reads."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ft.cli.demo import stdlib_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in {
        "b.py": "bb",
        "a.py": "aaa",
        "empty.py": "",
        "a/z.py": "zz",
        "test/x.py": "tests are left out",
        "site-packages/y.py": "so are installed packages",
        "data.txt": "not a source",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_documents_are_sorted_source_files(library: Path) -> None:
    assert list(stdlib_corpus.documents(100, library)) == [b"aaa", b"zz", b"bb"]


@pytest.mark.parametrize(("bound", "lengths"), [(0, []), (3, [3]), (4, [3, 1]), (7, [3, 2, 2])])
def test_the_bound_is_exact(library: Path, bound: int, lengths: list[int]) -> None:
    assert [len(text) for text in stdlib_corpus.documents(bound, library)] == lengths


def test_this_machine_has_enough(tmp_path: Path) -> None:
    assert sum(map(len, stdlib_corpus.documents(2 << 20))) == 2 << 20


_READ_BACK = """
import sys
from megatron_ft.cli.demo import cpu_device, stdlib_corpus
cpu_device.install(megatron=False)
from megatron.core.datasets.indexed_dataset import IndexedDataset
data = IndexedDataset(sys.argv[1])
wanted = [[*text, stdlib_corpus.END_OF_DOCUMENT] for text in stdlib_corpus.documents(30000)]
assert [list(data[i]) for i in range(len(data))] == wanted
assert len(data.document_indices) == len(wanted) + 1
"""


@pytest.mark.all_layouts
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_reads_back_every_byte(tmp_path: Path) -> None:
    prefix = stdlib_corpus.prepare(tmp_path / "corpus", max_bytes=30000)
    done = subprocess.run(
        [sys.executable, "-c", _READ_BACK, str(prefix)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
