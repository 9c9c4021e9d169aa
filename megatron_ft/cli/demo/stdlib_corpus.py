"""Text that every machine has: the Python standard library's own sources, as a corpus.

One document per ``.py`` file, one token per byte (0 to 255) and an end-of-document token
after each, written with megatron-core's own IndexedDatasetBuilder as ``<prefix>.bin`` and
``<prefix>.idx``.  Nothing is downloaded, and the order of files is fixed, so two runs on
one machine read the same tokens.

    python -m megatron_ft.cli.demo.stdlib_corpus DIRECTORY
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_ft.core.errors import MissingEnvironmentError

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
DEFAULT_MAX_BYTES = 4 << 20

_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}


def source_files(library: Path | None = None) -> list[Path]:
    """The library's ``.py`` files without its tests and installed packages, sorted by path."""
    root = library or Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in files if not _SKIPPED_FOLDERS.intersection(path.parts))
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def documents(max_bytes: int, library: Path | None = None) -> Iterator[bytes]:
    """Contents of the non-empty source files, in order, at most ``max_bytes`` in all.

    A file that does not fit into what is left is cut there, so the bound is exact.
    """
    left = max_bytes
    for path in source_files(library):
        content = path.read_bytes()[:left]
        if content:
            yield content
            left -= len(content)
        if left <= 0:
            return


def corpus_prefix(directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Path:
    """The path of this interpreter's corpus of a size, as ``--data-path`` takes it."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return directory / f"python-{version}-stdlib-{max_bytes}"


def build(directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Path:
    """Write the corpus in this process unless it is there, and return its prefix.

    Imports megatron-core; see :func:`prepare` for callers that must not.  The index is
    renamed into place last, so a reader never finds half a corpus.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = corpus_prefix(directory, max_bytes)
    if prefix.with_name(prefix.name + ".idx").exists():
        return prefix
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        half = Path(scratch) / "corpus"
        builder = IndexedDatasetBuilder(f"{half}.bin", dtype=DType.optimal_dtype(VOCABULARY_SIZE))
        for content in documents(max_bytes):
            tokens = torch.tensor([*content, END_OF_DOCUMENT])
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{half}.idx")
        for suffix in (".bin", ".idx"):
            os.replace(f"{half}{suffix}", f"{prefix}{suffix}")
    return prefix


def prepare(directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Path:
    """Like :func:`build`, but in a process of its own when there is something to build.

    For supervisors and tests, which import neither torch nor Megatron.  Raises
    MissingEnvironmentError with the child's last words if it fails.
    """
    prefix = corpus_prefix(directory, max_bytes)
    if not prefix.with_name(prefix.name + ".idx").exists():
        command = [sys.executable, "-m", __spec__.name, str(directory), "--max-bytes"]
        done = subprocess.run([*command, str(max_bytes)], capture_output=True, text=True)
        if done.returncode:
            raise MissingEnvironmentError(
                f"the corpus could not be built in {directory}; is megatron-core installed? "
                f"The builder said:\n{done.stderr[-2000:]}"
            )
    return prefix


def main(argv: list[str] | None = None) -> None:
    """Build the corpus and print its prefix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="where to keep the .bin and .idx files")
    parser.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES)
    options = parser.parse_args(argv)
    from megatron_ft.cli.demo import cpu_device

    if cpu_device.needed():
        cpu_device.install(megatron=False)
    print(build(options.directory, options.max_bytes))


if __name__ == "__main__":
    main()
