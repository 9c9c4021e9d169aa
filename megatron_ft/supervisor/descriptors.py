"""Sees to it before a job starts that its processes may open as many files as they will."""

from __future__ import annotations

import resource

from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.supervisor.spec import JobSpec

_ALWAYS, _A_NODE, _A_PROCESS = 48, 5, 3
"""Some more than a supervisor was seen to open: 20, 4 for a node's SMP, 2 for a trainer."""


def needed(spec: JobSpec) -> int:
    """Descriptors that the supervisor of a job opens at most; no other process needs more."""
    trainers = spec.nodes * (1 if spec.trainer_per_node else spec.ranks_per_node)
    return _ALWAYS + _A_NODE * (spec.nodes + spec.spares) + _A_PROCESS * trainers


def provide(count: int) -> None:
    """Raise this process's limit, which its children inherit, to ``count`` if it is lower.

    MissingEnvironmentError if it may not be raised that far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise MissingEnvironmentError(
            f"this job needs {count} open files a process, and the limit is {hard} (`ulimit -n`): "
            f"raise the hard limit (`ulimit -Hn {count}` as root, nofile in "
            "/etc/security/limits.conf, LimitNOFILE of a service, --ulimit of a container), or "
            "take fewer nodes or ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
