"""Hooks for an unedited script, installed when it imports Megatron's training loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.megatron.hooks import install


def install_for_script(argv: Sequence[str] | None = None) -> None:
    """Install the hooks in a script that did not ask for them itself.

    Raises UnsupportedVersionError only if ``argv`` (this process's by default) asks for snapshots.
    Any other program that imports this Megatron under a supervisor continues without them, and a
    message says so.
    """
    try:
        install()
    except UnsupportedVersionError as error:
        if any(word.startswith("--inmem-") for word in (sys.argv if argv is None else argv)):
            raise
        print(f"megatron-ft: {error}", file=sys.stderr)
