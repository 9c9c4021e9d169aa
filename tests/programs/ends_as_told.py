"""Ends as its first argument says: with a status, a text, by a signal, an error, or not at all."""

import os
import signal
import sys

how = sys.argv[1]
if how == "wait":
    signal.pause()
if how == "raise":
    raise KeyError("this")
if how.startswith("-"):
    os.kill(os.getpid(), -int(how))
sys.exit(int(how) if how.isdecimal() else how)
