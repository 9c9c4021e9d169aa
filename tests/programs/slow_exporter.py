"""An exporter that writes on request, and a supervisor that starts one.

``python slow_exporter.py export PLAN``, or ``supervise FOLDER HOLDER PLAN``, where the supervisor
holds the folder meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.checkpoint import export_drained as drained
from megatron_ft.checkpoint.drain import run_step
from megatron_ft.checkpoint.native import checkpoint_folder, point_tracker


class Framework:
    folder_of, announce = staticmethod(checkpoint_folder), staticmethod(point_tracker)

    @staticmethod
    def export(shards: Any, folder: Path) -> None:
        print("writes", flush=True)
        sys.stdin.readline()
        folder.mkdir()


def supervise(folder: str, holder: str, plan: str) -> None:
    with drained.hold(Path(folder), msgspec.json.decode(holder, type=drained.Holder)):
        argv = [sys.executable, __file__, "export", plan]
        subprocess.run(argv, start_new_session=True)


def main() -> int:
    if sys.argv[1] == "supervise":
        supervise(*sys.argv[2:])
        return 0
    frameworks: Any = drained
    frameworks.format_of = frameworks.writer_of = lambda of: Framework
    return run_step({"export": drained.export}, "exporter")


if __name__ == "__main__":
    sys.exit(main())
