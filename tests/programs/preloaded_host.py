"""The product's trainer host, after a test's imports: ``preloaded_host.py HOST SOCKET MODULE``.

``HOST`` is the file of the trainer host, which is no module here: children of some tests import
another copy of the package.  Without a ``MODULE`` to preload it has torch, as for any script.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from importlib import import_module
from types import SimpleNamespace

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until killed, or until the test that started this ends; fork what is asked for."""
    file, path, module = sys.argv[1:]
    trainer_host = SimpleNamespace(**runpy.run_path(file))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    environment = dict(os.environ)
    # See the main of the trainer host.
    os.environ.clear()
    os.environ.update(environment)
    host = trainer_host.Host(path, environment)
    import_module(module).preload()
    assert not (why := trainer_host.unfit()), f"{module} {why}: OMP_NUM_THREADS=1?"
    host.preload([])
    trainer_host.Child(host.serve(), host.changes()).run()


if __name__ == "__main__":
    main()
