"""Text that every machine has: the Python standard library's own sources, as a corpus.

One document per ``.py`` file, one token per byte (0 to 255) and an end-of-document token
after each, written with megatron-core's own IndexedDatasetBuilder as ``<prefix>.bin`` and
``<prefix>.idx``.  Nothing is downloaded, and the order of files is fixed, so two runs on
one machine read the same tokens.

    python -m megatron_ft.cli.demo.stdlib_corpus DIRECTORY
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron_ft.core.errors import MissingEnvironmentError

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
DEFAULT_MAX_BYTES = 4 << 20

_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}


def documents(max_bytes: int, library: Path | None = None) -> Iterator[bytes]:
    """Contents of the library's non-empty sources by path, at most ``max_bytes`` in all.

    Its tests and installed packages are left out.  A file that does not fit into what is left
    is cut there, so the bound is exact.
    """
    root, left = library or Path(sysconfig.get_path("stdlib")), max_bytes
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if left > 0 and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            content = path.read_bytes()[:left]
            if content:
                yield content
                left -= len(content)


def build(directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Path:
    """Write the corpus in this process and return its prefix, as ``--data-path`` takes it.

    Imports megatron-core; see :func:`prepare` for callers that must not.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    directory.mkdir(parents=True, exist_ok=True)
    prefix = directory / "stdlib"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCABULARY_SIZE))
    for content in documents(max_bytes):
        tokens = torch.tensor([*content, END_OF_DOCUMENT])
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def prepare(directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Path:
    """Like :func:`build`, but in a process of its own.

    For supervisors and tests, which import neither torch nor Megatron.  Raises
    MissingEnvironmentError with the child's last words if it fails.
    """
    command = [sys.executable, "-m", __spec__.name, str(directory), "--max-bytes", str(max_bytes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MissingEnvironmentError(
            f"the corpus could not be built in {directory}; is megatron-core installed? "
            f"The builder said:\n{done.stderr[-2000:]}"
        )
    return Path(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="where to keep the .bin and .idx files")
    parser.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES)
    options = parser.parse_args()
    from megatron_ft.cli.demo import cpu_device

    if cpu_device.needed():
        cpu_device.install(megatron=False)
    print(build(options.directory, options.max_bytes))


if __name__ == "__main__":
    main()
