"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.disk.durable import Disk


@contextmanager
def whole_folder(folder: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to write to, which gets the name ``folder`` when the block has ended well.

    ``check`` is called before that, and may still refuse.  What was written is durable if the
    block has synced its files.  After an error nothing is left of it.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        check()
        disk = Disk()
        disk.sync_folder(partial)
        disk.rename(partial, folder)
        disk.sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
