"""The job that ``megatron-ft run`` is asked for, checked before anything is started."""

from __future__ import annotations

import resource
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError, ProtectionError
from megatron_ft.core.scheme import Scheme, largest_scheme
from megatron_ft.erasure.stripes import Domains
from megatron_ft.supervisor.budget import RestartBudget
from megatron_ft.supervisor.orders import Timing

Shapes = Mapping[int, tuple[str, ...] | None]
"""Further arguments of a training command by number of nodes, None where it must not train."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job: its command, its nodes, its settings, and where it starts from.

    With ``trainer_per_node`` the command is started once on each node, and starts the node's
    ranks itself, as torchrun does.  With ``warm_start`` trainers are forked from a trainer host
    of their node, if the command can be.  ``nodes`` is how many the job begins with.
    ``from_scratch`` allows a start from nothing when neither memory nor disk has a state;
    ``free_on_exit`` takes every end with 0 for the planned one.
    ``restore_from`` is a drained checkpoint, perhaps another job's, to start from then.
    ``environment`` is for trainers, in addition to the variables of the settings.
    ``domains`` is the failure domain of each node; a node that is not named is one of its own.
    ``shapes`` are for when it continues with fewer nodes.
    ``health_command`` votes on nodes before each start, "" for none, within ``health_seconds``.
    ``budget`` is how often training may be
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
    warm_start: bool = False
    settings: SnapshotConfig = field(default_factory=SnapshotConfig)
    block_bytes: int = BLOCK_BYTES
    from_scratch: bool = False
    free_on_exit: bool = False
    restore_from: Path | None = None
    log_dir: Path = Path("megatron-ft-logs")
    environment: Mapping[str, str] = field(default_factory=dict)
    domains: Domains = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    budget: RestartBudget = field(default_factory=RestartBudget)
    place_seconds: float = 0.0
    health_command: str = ""
    health_seconds: float = 30.0
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
        if self.scheme.kind != "none" and self.nodes < self.scheme.members:
            raise ProtectionError(
                f"--protect {self.scheme} needs {self.scheme.members} nodes, there are "
                f"{self.nodes} (spares do not count); the largest that can be met is "
                f"{largest_scheme(self.scheme, self.nodes)}"
            )

    @cached_property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.settings.protect)

    @cached_property
    def timing(self) -> Timing:
        lease = self.settings.lease_seconds
        return self.own_timing or Timing(lease=lease, node_timeout=1.5 * lease)

    def arguments_for(self, nodes: int) -> tuple[str, ...]:
        """Further arguments of the training command on this number of nodes; none on all."""
        return self.shapes.get(nodes) or ()

    def shape_note(self, nodes: int) -> str:
        """The arguments of --shapes with which ranks train, as the end of a sentence."""
        words = shlex.join(self.arguments_for(nodes))
        return f" with {words}, which --shapes gives for {nodes} nodes" if words else ""

    @property
    def checkpoint_dir(self) -> Path | None:
        """Folder of the training command's own checkpoints, None if it is not known."""
        return self.settings.checkpoint_dir

    @property
    def time_limit_seconds(self) -> float:
        """Seconds from the start of the job until it will be killed; 0: never."""
        return self.settings.time_limit_seconds or self.place_seconds

    @property
    def trainer_environment(self) -> dict[str, str]:
        """The variables that trainers find beside those of this process."""
        settings = self.settings
        if self.trainer_per_node:
            # The ranks are children of torchrun, which would have to start those that are gone.
            settings = replace(settings, restart="new-process")
        return {**settings.job_variables(), **self.environment}


MOST_OPEN_FILES = 1 << 16
"""A supervisor of 2,048 nodes with 8 ranks each opens fewer: 5 for a node, 3 for a trainer."""


def raise_open_files() -> None:
    """Raise this process's limit of open files, which its children inherit, as far as it may be.

    Not beyond MOST_OPEN_FILES: some programs close every number up to the limit at their start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
