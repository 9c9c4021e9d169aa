"""Run in a forked process: pytest on a copy of the package.

The server that forks has imported what tests need, but nothing of the package.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

COPY = "TEST_PLANTED_COPY"
OPTIONS = ["-q", "-x", "--no-header", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider"]


def preload() -> None:
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import zmq.asyncio  # noqa: F401

    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    loaded = [name for name in sys.modules if name.startswith("megatron_ft")]
    assert not loaded, f"the package itself must come from the copy: {loaded}"


def main() -> None:
    import pytest
    from hypothesis import Phase, settings

    copy = Path(os.environ[COPY])
    os.chdir(copy)
    sys.path[:] = [str(copy), *sys.path]
    sys.dont_write_bytecode = True
    # The first example that fails is enough, and it should be the same one every time.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("planted", phases=phases, derandomize=True)
    settings.load_profile("planted")
    from megatron_ft.launchers import virtual

    # A root of its own: what other jobs of this machine leave in theirs is no error of these tests.
    with tempfile.TemporaryDirectory(prefix="mft-", dir="/dev/shm") as root:
        virtual.default_root = lambda: Path(root)
        sys.exit(pytest.main([*OPTIONS, *sys.argv[1:]]))
