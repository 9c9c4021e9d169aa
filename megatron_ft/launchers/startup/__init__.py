"""What runs in a trainer before its script: the folder that goes first on PYTHONPATH.

Python's ``site`` imports ``sitecustomize`` in every interpreter at its start, so the script
needs no edit, and neither do a ``torchrun`` in the command and the processes it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent


def before_script(environment: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """``environment`` with ``folder``, which holds a ``sitecustomize.py``, first on PYTHONPATH.

    A folder that is there already is moved to the front.
    """
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    # An empty entry would mean the current folder.
    kept = [entry for entry in given if entry and entry != str(folder)]
    return {**environment, "PYTHONPATH": os.pathsep.join([str(folder), *kept])}
