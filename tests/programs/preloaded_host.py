"""The product's trainer host, after a test's imports: ``preloaded_host.py HOST SOCKET MODULE``.

``HOST`` is the file of the trainer host, which is no module here: children of some tests import
another copy of the package.  Without a ``MODULE`` to preload it has torch, as for any script.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import NoReturn

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
    end_at_once(trainer_host.Child(host.serve(), host.changes()).run)


def end_at_once(run: Callable[[], None]) -> NoReturn:
    """Run a forked process to its end, as Python does but for one thing: no module is freed.

    Freeing torch takes twenty times the processor time of the fork, and more than most of these
    processes need for their work.
    """
    code: object = None
    try:
        run()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        raise  # Python then ends itself by the signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
