"""What the ranks of test_warm_host do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def preload() -> None:
    """Nothing to import."""


def succeed() -> None:
    print("argument", sys.argv[1], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")


def wait_for_ever_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)


def interrupt_the_test() -> None:
    if os.environ["RANK"] == "1":
        print(os.getpid(), flush=True)
        os.kill(int(sys.argv[1]), signal.SIGUSR1)
        time.sleep(600)
