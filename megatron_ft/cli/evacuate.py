"""Move the ranks of a node to a spare, so that the node can be taken away; no iteration is lost.

  megatron-ft evacuate NODE --job NAME

The next iteration boundary is captured, and training waits until a spare has the node's place.
Without a spare a job with --on-no-spare shrink continues with fewer nodes.
Afterwards the node is not a spare, until `megatron-ft evacuate NODE --undo`.  Run it on any node of
the job.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ft.cli import common
from megatron_ft.cli.status import written
from megatron_ft.core.errors import ControlPlaneError, UntrustedFileError
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask, sockets

EXIT_REFUSED = 1
EXIT_CODES: Mapping[int, str] = {
    EXIT_REFUSED: "the node was not evacuated; the message says why, and training continues"
}
LOOK_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="its name, as `megatron-ft status` shows it")
    common.add_job_name(parser)
    parser.add_argument(
        "--undo", action="store_true", help="let a node that was evacuated be a spare again"
    )
    parser.add_argument(
        "--if-unhealthy",
        action="store_true",
        help="run the job's --health-command there now, and move the ranks only if it fails",
    )
    parser.add_argument(
        "--wait-seconds",
        type=float,
        default=600.0,
        help="how long to wait for the end of the move (default: %(default)g)",
    )
    common.add_folders(parser)


def main(arguments: argparse.Namespace) -> int:
    """Ask an SMP of the job, which passes it to the supervisor, and wait for the outcome."""
    if arguments.undo and common.change_notes(
        arguments,
        lambda record: {"evacuated": tuple(n for n in record.evacuated if n != arguments.node)},
    ):
        print(f"{arguments.node} may train when the job is run again")
        return 0
    reason = m.IF_UNHEALTHY if arguments.if_unhealthy else m.ON_REQUEST
    request = m.Evacuate(arguments.node, uuid.uuid4().hex, reason, arguments.undo)
    path = _asked(list(sockets(common.root_of(arguments), arguments.job)), request, arguments.job)
    deadline = time.monotonic() + arguments.wait_seconds
    while time.monotonic() < deadline:
        found = _move(path, request)
        if found.get("state") in ("moved", "undone", "refused"):
            print(found["text"])
            return EXIT_REFUSED if found["state"] == "refused" else 0
        time.sleep(LOOK_SECONDS)
    raise ControlPlaneError(
        f"the move has not ended in {arguments.wait_seconds:g} s; `megatron-ft status` shows it"
    )


def _asked(paths: list[Path], request: m.Evacuate, job: str) -> Path:
    """The socket of the first SMP that took the request; ControlPlaneError if none did."""
    reasons = []
    for path in paths:
        try:
            answer = ask(path, request)
        except (ControlPlaneError, UntrustedFileError) as error:
            reasons.append(f"{path.parent.name}: {error}")
            continue
        if not isinstance(answer, m.Refused):
            return path
        reasons.append(f"{path.parent.name}: {answer.reason}")
    raise ControlPlaneError("; ".join(reasons) or f"no SMP of job {job!r} runs here")


def _move(path: Path, request: m.Evacuate) -> dict[str, Any]:
    """Entry of this request in the job's status; {} if there is none yet."""
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, UntrustedFileError):
        file = ask(path, m.StatusRequest()).status_file
        found = written(Path(file))["summary"]["moves"][request.node]
    return found if found.get("number") == request.number else {}
