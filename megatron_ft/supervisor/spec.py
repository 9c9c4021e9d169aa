"""The job that ``megatron-ft run`` is asked for, and what it needs of this machine.

Both are checked before anything is started.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError, ProtectionError
from megatron_ft.core.identity import SHRINK
from megatron_ft.core.scheme import Scheme, largest_scheme
from megatron_ft.erasure.stripes import Domains
from megatron_ft.supervisor.failures import RestartBudget
from megatron_ft.supervisor.orders import Sizes, Timing


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job: its command, its nodes, its settings, and where it starts from.

    With ``trainer_per_node`` the command is started once on each node, and starts the node's
    ranks itself, as torchrun does.  ``nodes`` is how many the job begins with.
    ``from_scratch`` allows a start from nothing when neither memory nor disk has a state;
    ``restore_from`` is a drained checkpoint, perhaps another job's, to start from then.
    ``environment`` is for trainers, beside the variables of the settings.
    ``domains`` is the failure domain of each node; a node that is not named is one of its own.
    Spares import ``warm_modules`` while they wait.  ``budget`` is how often training may be
    started again without progress, and how long is waited before.  ``place_seconds`` is when the
    place itself ends the job (0: never).  ``own_timing`` replaces, for tests, the waits that
    follow from the setting ``lease_seconds``.
    ConfigError for numbers that make no sense, ProtectionError for a scheme that needs
    more nodes than there are.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    spares: int = 0
    ranks_per_node: int = 1
    trainer_per_node: bool = False
    settings: SnapshotConfig = field(default_factory=SnapshotConfig)
    sizes: Sizes = field(default_factory=Sizes)
    from_scratch: bool = False
    restore_from: Path | None = None
    log_dir: Path = Path("megatron-ft-logs")
    environment: Mapping[str, str] = field(default_factory=dict)
    domains: Domains = field(default_factory=dict)
    warm_modules: tuple[str, ...] = ()
    budget: RestartBudget = field(default_factory=RestartBudget)
    place_seconds: float = 0.0
    own_timing: Timing | None = None

    def __post_init__(self) -> None:
        _ = self.timing  # Made now, so that a lease that is too short is refused now.
        for name, least in (("nodes", 1), ("spares", 0), ("ranks_per_node", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; give a number >= {least}"
                )
        if not self.command:
            raise ConfigError(
                "no training command; write it after `--`: megatron-ft run -- python ..."
            )
        exports = self.settings.drain_export_dir
        if self.settings.on_no_spare == SHRINK and self.checkpoint_dir != exports:
            raise ConfigError(
                f"--checkpoint-dir is {self.checkpoint_dir}, but --on-no-spare shrink has the "
                f"training command load {exports} (--drain-export-dir): drop "
                "--checkpoint-dir, or give the same folder in both"
            )
        if self.scheme.kind != "none" and self.nodes < self.scheme.members:
            raise ProtectionError(
                f"--protect {self.scheme} needs {self.scheme.members} nodes, there are "
                f"{self.nodes} (spares do not count); the largest that can be met is "
                f"{largest_scheme(self.scheme, self.nodes)}"
            )

    @cached_property
    def scheme(self) -> Scheme:
        """The redundancy over nodes."""
        return Scheme.parse(self.settings.protect)

    @cached_property
    def timing(self) -> Timing:
        """The waits of the control plane."""
        lease = self.settings.lease_seconds
        return self.own_timing or Timing(lease=lease, node_timeout=1.5 * lease)

    @property
    def checkpoint_dir(self) -> Path | None:
        """Folder of the training command's own checkpoints, None if it is not known."""
        given = self.settings.checkpoint_dir
        shrinks = self.settings.on_no_spare == SHRINK
        return self.settings.drain_export_dir if shrinks and given is None else given

    @property
    def time_limit_seconds(self) -> float:
        """Seconds from the start of the job until it will be killed; 0: never."""
        return self.settings.time_limit_seconds or self.place_seconds

    @property
    def trainer_environment(self) -> dict[str, str]:
        """The variables that trainers find beside those of this process."""
        return {**self.settings.job_variables(), **self.environment}


_ALWAYS, _A_NODE, _A_PROCESS = 48, 5, 3
"""Descriptors, some more than a supervisor opened: 20, 4 for a node's SMP, 2 for a trainer."""


def open_files_needed(spec: JobSpec) -> int:
    """Descriptors that the supervisor of a job opens at most; no other process needs more."""
    trainers = spec.nodes * (1 if spec.trainer_per_node else spec.ranks_per_node)
    return _ALWAYS + _A_NODE * (spec.nodes + spec.spares) + _A_PROCESS * trainers


def raise_open_files(count: int) -> None:
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
