"""The folder that goes first on a trainer's PYTHONPATH, and the hooks that run from there.

Python's ``site`` imports ``sitecustomize`` in every interpreter at its start, so the script
needs no edit, and neither do a ``torchrun`` in the command and the processes it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent

LOOP = "megatron.training.training"
DEEPSPEED = "deepspeed"
"""The whole package: what its engine's module needs is complete only after all of it."""

REFUSED = 78
"""Exit code of a trainer after an error that says ``lasting``; EX_CONFIG of sysexits.h."""

UNAVAILABLE = 69
"""Exit code of a trainer whose script or a module of it cannot be imported; EX_UNAVAILABLE."""

AFTER_IMPORT = "MEGATRON_FT_AFTER_IMPORT"
"""The environment variable with the hooks: ``watched=module:function``, separated by commas."""

HOOKS = {
    LOOP: "megatron_ft.megatron.hooks:install_for_script",
    DEEPSPEED: "deepspeed_ext.hooks:install",
}
"""Called behind the import of a module.

Names, not imports: they are resolved in the trainer's interpreter, which may be another one.
"""


def before_script(environment: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """``environment`` with ``folder``, which holds a ``sitecustomize.py``, first on PYTHONPATH.

    A folder that is there already is moved to the front.  ``FOLDER`` gets the hooks as well.
    """
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    # An empty entry would mean the current folder.
    kept = [entry for entry in given if entry and entry != str(folder)]
    hooks = ",".join(f"{watched}={hook}" for watched, hook in HOOKS.items())
    return {
        **environment,
        **({AFTER_IMPORT: hooks} if folder == FOLDER else {}),
        "PYTHONPATH": os.pathsep.join([str(folder), *kept]),
    }
