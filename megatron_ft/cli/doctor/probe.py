"""One node looks at itself: ``python -m megatron_ft.cli.doctor.probe``, a ProbeRequest on stdin.

It is started as an SMP is: without torch, in a session of its own, with the node's folder
in its environment.  It prints one NodeFacts.
"""

from __future__ import annotations

import os
import platform
import pwd
import resource
import sys
import time
from pathlib import Path

import msgspec

from megatron_ft.cli.doctor.as_trainer import PACKAGES, versions
from megatron_ft.cli.doctor.export_folders import try_folder
from megatron_ft.cli.doctor.facts import NodeFacts, ProbeRequest, say
from megatron_ft.cli.doctor.machine import (
    arena_place,
    code_digest,
    hard_limit,
    lingers,
    machine_id,
    remove_ipc,
    soft_limit,
)
from megatron_ft.cli.doctor.rates import measure_drain, measure_rates
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.procfs import pid_namespace
from megatron_ft.core.scheme import Scheme


def examine(request: ProbeRequest, where: ProcessEnvironment, began: float) -> NodeFacts:
    """All facts of this node.  Files that it makes are named by the request's token."""
    arena = arena_place(Path(request.arena_root), where.node_dir, request.token)
    scheme = Scheme.parse(request.scheme)
    rates = measure_rates(where.node_dir, request.token, scheme, request.rate_bytes)
    drain = None
    if request.drain_dir:
        folder = Path(request.drain_dir)
        drain = measure_drain(folder, request.token, where.node, request.rate_bytes)
    return NodeFacts(
        machine=machine_id(),
        host=platform.node(),
        user=os.geteuid(),
        python=platform.python_version(),
        packages=versions(PACKAGES),
        code=code_digest(),
        cpus=len(os.sched_getaffinity(0)),
        began=began,
        ended=time.time(),
        locked_memory=soft_limit(resource.RLIMIT_MEMLOCK),
        descriptors=soft_limit(resource.RLIMIT_NOFILE),
        descriptors_hard=hard_limit(resource.RLIMIT_NOFILE),
        remove_ipc=remove_ipc(),
        lingers=lingers(_user_name()),
        cgroup=Path("/proc/self/cgroup").read_text(),
        arena=arena,
        rates=rates,
        drain=drain,
        pid_namespace=pid_namespace(),
        exports={
            folder: try_folder(Path(folder), request.token, where.node)
            for folder in request.export_dirs
        },
    )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # A container may run under a number that has no name.
        return str(os.geteuid())


def main() -> None:
    """Read the request, look, answer."""
    began = time.time()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    say(examine(request, ProcessEnvironment.from_env(), began))


if __name__ == "__main__":
    main()
