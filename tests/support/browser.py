"""A real browser without a screen: Chromium, as Debian's package chromium has it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or ""
MISSING = "" if CHROMIUM else "needs chromium (on Debian: apt-get install chromium)"

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--enable-logging=stderr", "--window-size=1120,900"),
)
_SECONDS = 60


@dataclass(frozen=True)
class Visit:
    """The document that a page became, and what the browser's console said about it."""

    document: str
    complaints: list[str]


def visit(page: Path, target: Path, kind: str = "screenshot", *, dark: bool = False) -> Visit:
    """Open a page and write its ``screenshot`` or its ``print-to-pdf`` to ``target``."""
    profile = target.with_suffix(".profile")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", scheme, f"--{kind}={target}"]
    # In a group of its own, so that helpers of a browser that hangs end with it.
    process = subprocess.Popen(
        [*command, "--dump-dom", page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        document, said = process.communicate(timeout=_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said
    return Visit(document, re.findall(r":CONSOLE[:(]\d+.*", said))
