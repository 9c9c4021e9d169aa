"""What a user asks ``megatron-ft run`` for, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.core.affinity import BACKGROUND_CPUS
from megatron_ft.core.errors import ConfigError, ProtectionError
from megatron_ft.core.fewer_ranks import SHRINK, STOP
from megatron_ft.core.scheme import Scheme, largest_scheme
from megatron_ft.erasure.stripes import Domains
from megatron_ft.supervisor.failures import RestartBudget
from megatron_ft.supervisor.orders import Sizes, Timing
from megatron_ft.supervisor.watch.hangs import HangSettings


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job: its command, its nodes, its protection, and what to do when all is lost.

    With ``trainer_per_node`` the command is started once on each node, and starts the node's
    ranks itself, as torchrun does.
    ``checkpoint_dir`` is where the training command writes its own checkpoints;
    ``from_scratch`` allows a start from nothing when neither memory nor disk has a state;
    ``restore_from`` is a drained checkpoint, perhaps another job's, to start from then.
    Every ``drain_interval`` iterations (0: never) a committed snapshot is written to
    ``drain_dir``, which all nodes must share; the newest ``drain_keep`` stay, and one in every
    ``drain_keep_every`` iterations (0: none); each node writes at most ``drain_bandwidth_mib``
    MiB/s (0: no cap), and sends at most ``encode_bandwidth_mib`` while parity is made.
    SMPs, encoders and drains run on the ``background_cpus`` of their node (None: on any).
    ``drain_stop_seconds`` is the longest last drain of a job that is told to stop,
    ``time_limit_seconds`` when it will be killed (0: never).  In ``drain_export_dir`` each
    drained snapshot becomes a checkpoint of the training framework's own (None: it does not).
    A snapshot from which training fails twice within ``quarantine_iterations`` (0: no matter)
    is not used again.  The scrub uses ``scrub_percent`` of one core of each node (0: no scrub).
    Snapshots whose interval is found by the job take at most ``overhead_percent`` of its time;
    ``expected_mtbf_hours`` are counted on between failures before some were seen.
    ``transport`` is what encoders use, one of world_starter.TRANSPORTS.
    ``domains`` is the failure domain of each node; a node that is not named is one of its own.
    Training that makes no progress for longer than ``hang`` says is restarted, or with
    ``on_hang`` "report" only reported; a rank ``straggler_percent`` slower than its peers is
    named (0: none is).  When trainers cannot come back, the last snapshot becomes a checkpoint
    of the framework's own in ``export_on_failure`` (None: it does not).  ``on_no_spare`` is
    what follows when a node is lost and no spare is left: with "shrink" the job goes on with
    fewer nodes than ``nodes``, which is how many it begins with.  Spares import
    ``warm_modules`` while they wait.  ``budget`` is how often training may be started again without
    progress, and how long is waited before.
    ConfigError for numbers that make no sense, ProtectionError for a scheme that needs
    more nodes than there are.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    spares: int = 0
    ranks_per_node: int = 1
    trainer_per_node: bool = False
    scheme: Scheme = field(default_factory=lambda: Scheme("rs", 3, 1))
    sizes: Sizes = field(default_factory=Sizes)
    checkpoint_dir: Path | None = None
    from_scratch: bool = False
    restore_from: Path | None = None
    log_dir: Path = Path("megatron-ft-logs")
    environment: Mapping[str, str] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    budget: RestartBudget = field(default_factory=RestartBudget)
    register_timeout: float = 600.0
    drain_dir: Path | None = None
    drain_interval: int = 0
    drain_keep: int = 2
    drain_keep_every: int = 0
    drain_bandwidth_mib: float = 0.0
    drain_export_dir: Path | None = None
    encode_bandwidth_mib: float = 0.0
    background_cpus: str | None = None
    drain_stop_seconds: float = 25.0
    time_limit_seconds: float = 0.0
    scrub_percent: float = 1.0
    quarantine_iterations: int = 10
    overhead_percent: float = 1.0
    expected_mtbf_hours: float = 3.0
    transport: str = "auto"
    domains: Domains = field(default_factory=dict)
    on_hang: str = "restart"
    hang: HangSettings = field(default_factory=HangSettings)
    straggler_percent: float = 5.0
    export_on_failure: Path | None = None
    on_no_spare: str = STOP
    warm_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("nodes", 1),
            ("spares", 0),
            ("ranks_per_node", 1),
            ("quarantine_iterations", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; give a number >= {least}"
                )
        self._check_drain()
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

    @property
    def background_variables(self) -> dict[str, str]:
        """What processes beside training find in their environment."""
        return {BACKGROUND_CPUS: self.background_cpus or ""}

    def _check_drain(self) -> None:
        for name, least in (("interval", 0), ("keep", 1), ("keep_every", 0), ("bandwidth_mib", 0)):
            value = getattr(self, f"drain_{name}")
            if value < least:
                flag = f"--drain-{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {value}; give a number >= {least}")
        if not 0 <= self.scrub_percent <= 100:
            raise ConfigError(f"--scrub-percent is {self.scrub_percent}; give a number 0 to 100")
        if self.drain_interval and self.drain_dir is None:
            raise ConfigError("--drain-interval needs --drain-dir: the folder to drain to")
        if self.on_no_spare == SHRINK and self.checkpoint_dir != self.drain_export_dir:
            raise ConfigError(
                f"--checkpoint-dir is {self.checkpoint_dir}, but --on-no-spare shrink has the "
                f"training command load {self.drain_export_dir} (--drain-export-dir): drop "
                "--checkpoint-dir, or give the same folder in both"
            )
