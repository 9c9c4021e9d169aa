"""A trainer of a test's job: ``python placed_trainer.py NETWORK GATE SCRIPT ...`` or ``-m MODULE``.

All nodes of a test fork their trainers from one host.  So each enters the network namespace of its
node (the file ``NETWORK``, or none), and has the search path and ``sitecustomize`` of its own
``PYTHONPATH``.  It begins once the file ``GATE`` exists, if one is named.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from tests.support.namespaces import enter_namespace

WAIT_SECONDS = 250.0


def main() -> None:
    _, network, gate, *words = sys.argv
    if network:
        enter_namespace(network)
    deadline = time.monotonic() + WAIT_SECONDS
    while gate and not os.path.exists(gate):
        assert time.monotonic() < deadline, f"nobody has made {gate}"
        time.sleep(0.01)
    _customise()
    module = words[0] == "-m"
    sys.argv = words[module:]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _customise() -> None:
    """What ``site`` does for a started process."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    new = [folder for folder in given if folder not in sys.path]
    sys.path[:0] = new
    files = (Path(folder, "sitecustomize.py") for folder in new)
    if (first := next((file for file in files if file.is_file()), None)) is not None:
        runpy.run_path(str(first), run_name="sitecustomize")


if __name__ == "__main__":
    main()
