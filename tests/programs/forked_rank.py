"""A rank of a test's run: ``python forked_rank.py MODULE:FUNCTION ARGUMENTS``.

The function finds its arguments in ``sys.argv``.  A rank that hangs is asked for its stacks by
SIGUSR1.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback


def main() -> None:
    """Call the function; end without what imported libraries do at exit."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    del sys.argv[0]
    module, _, function = sys.argv[0].partition(":")
    code = 1
    try:
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
