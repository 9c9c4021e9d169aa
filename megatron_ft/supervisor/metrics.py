"""Prometheus metrics of a job: gauges from its status, counters and histograms from its events.

Every number is one that ``megatron-ft status``, the events or the ledger give, too.  The names
follow Prometheus' conventions: base units, ``_total`` for counters.  The label ``run`` of each is
the name of the job: ``job`` is Prometheus' own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ft import __version__
from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import (
    KINDS,
    AbortedEvent,
    CommittedEvent,
    DroppedEvent,
    EndedEvent,
    JobEvent,
    RecoveredEvent,
    SnapshotEvent,
)
from megatron_ft.supervisor.exposure_alarm import iteration_seconds, lost_iterations
from megatron_ft.supervisor.heartbeats import PARTS
from megatron_ft.supervisor.ledger import LedgerWriter

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "megatron_ft_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LEVELS = ("committed", "protected", "durable")
LEDGER_SECONDS = 10.0
"""Interval at which the ledger's sums are taken anew: they cost more with each snapshot."""


class Metric(NamedTuple):
    """One metric as Prometheus declares it; ``kind`` names a class of prometheus_client."""

    kind: str
    name: str
    text: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("Info", "build", "Release of megatron-ft, and the name of the job."),
    Metric("Gauge", "iteration", "Last iteration that any rank has ended."),
    Metric("Gauge", "iteration_seconds", "Usual time of one iteration."),
    Metric("Gauge", "incarnation", "Number of the present start of the job."),
    Metric("Gauge", "snapshot_iteration", "Iteration of the newest snapshot.", ("level",)),
    Metric(
        "Gauge",
        "snapshot_age_iterations",
        "Iterations since the newest snapshot of this level.",
        ("level",),
    ),
    Metric(
        "Gauge",
        "snapshot_age_seconds",
        "Seconds since the newest snapshot reached this level.",
        ("level",),
    ),
    Metric(
        "Gauge",
        "exposure_iterations",
        "Iterations that the loss of a trainer, of a usual node or of the worst node would cost.",
        ("loss",),
    ),
    Metric(
        "Gauge",
        "exposure_seconds",
        "Seconds of training that this loss would cost.",
        ("loss",),
    ),
    Metric("Gauge", "exposed", "1 while a loss would cost more than --exposed-iterations."),
    Metric("Gauge", "nodes", "Nodes that train, and nodes that are spares.", ("role",)),
    Metric("Gauge", "encoders_up", "1 if encoders run, 0 if new snapshots get no parity."),
    Metric("Gauge", "paused", "1 if snapshots are paused by command."),
    Metric("Gauge", "damaged_shards", "Shards in memory that count as lost."),
    Metric("Gauge", "ettr", "Share of wall time in which new iterations were made."),
    Metric("Counter", "wall_seconds", "Wall time of the job by category.", ("category",)),
    Metric(
        "Counter",
        "snapshots",
        "Snapshots that were committed, by level, and those that were not, by reason.",
        ("outcome",),
    ),
    Metric("Counter", "snapshots_skipped", "Captures skipped because no slot was free."),
    Metric("Counter", "events", "Events by kind.", ("kind",)),
    Metric("Counter", "failures", "Failures that ended an incarnation."),
    Metric("Counter", "failures_by_cause", "The same by cause.", ("cause",)),
    Metric("Counter", "rank_starts", "Starts of ranks after failures by rung.", ("rung",)),
    Metric("Histogram", "stall_seconds", "Time for which a snapshot held training."),
    Metric("Histogram", "recovery_seconds", "Time of recoveries by part.", ("part",)),
)
"""Every metric; docs/reference/metrics.md is generated from this table."""


class JobMetrics:
    """The metrics of one job.

    ``page`` may be called from any thread.  Raises MissingEnvironmentError without
    prometheus_client.
    """

    def __init__(self, job: str) -> None:
        prometheus = _library()
        self._job = job
        self._choose = prometheus.exposition.choose_encoder
        self._registry: CollectorRegistry = prometheus.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for kind, name, text, labels in METRICS:
            more = {"buckets": SECONDS} if kind == "Histogram" else {}
            self._metrics[name] = getattr(prometheus, kind)(
                PREFIX + name, text, ("run", *labels), registry=self._registry, **more
            )
        self._of("build").info({"version": __version__})
        # Prometheus sees no increase in a counter that begins with 1.
        self._of("failures")
        for kind in KINDS:
            self._of("events", kind)
        for outcome in ("local", "protected", AbortedEvent.kind, DroppedEvent.kind):
            self._of("snapshots", outcome)
        self._ledger, self._settles = LedgerWriter(), 0.0
        self._began: float | None = None
        self._newest = dict.fromkeys(LEVELS, (-1, 0.0))
        self._raised: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()
        self._pages: dict[str, bytes] = {}

    def observe(self, event: JobEvent) -> None:
        """Count one event."""
        with self._lock:
            self._account(event)
            self._of("events", event.kind).inc()
            facts = event.facts
            if isinstance(facts, SnapshotEvent):
                level = facts.level if isinstance(facts, CommittedEvent) else event.kind
                self._of("snapshots", level).inc()
                self._of("stall_seconds").observe(facts.stall)
            elif isinstance(facts, EndedEvent) and not facts.asked:
                self._of("failures").inc()
                self._of("failures_by_cause", facts.cause).inc()
            elif isinstance(facts, RecoveredEvent):
                for part in PARTS:
                    self._of("recovery_seconds", part).observe(getattr(facts, part))
                for rung, ranks in facts.starts.items():
                    self._of("rank_starts", rung).inc(len(ranks))

    def _account(self, event: JobEvent) -> None:
        self._began = event.monotonic if self._began is None else self._began
        logged = LoggedEvent(0.0, event.monotonic, "", 0, event.kind, event.text, event.facts)
        self._ledger.take(event.monotonic - self._began, logged)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics as of the last update, and their content type.

        ``accept`` is an HTTP header: OpenMetrics for those that ask for it, else Prometheus' text.
        """
        encode, content_type = self._choose(accept)
        with self._lock:
            if content_type not in self._pages:
                self._pages[content_type] = encode(self._registry)
            return self._pages[content_type], content_type

    def update(self, status: Mapping[str, Any]) -> None:
        """Take the job's status, which the supervisor makes anew every second."""
        with self._lock:
            self._pages = {}
            self._update(status)

    def _update(self, status: Mapping[str, Any]) -> None:
        iteration, seconds = status["iteration"], iteration_seconds(status)
        self._of("iteration").set(iteration)
        self._of("iteration_seconds").set(seconds)
        self._of("incarnation").set(status["incarnation"])
        self._of("encoders_up").set(status["encoders"] == "up")
        self._of("paused").set(bool(status["paused"]))
        self._of("exposed").set(status["exposed"])
        self._of("damaged_shards").set(status["damaged_shards"])
        self._of("nodes", "spare").set(len(status["spares"]))
        self._of("nodes", "training").set(len(status["nodes"]) - len(status["idle"]))
        self._update_levels(status, iteration)
        for loss, lost in lost_iterations(status).items():
            self._of("exposure_iterations", loss).set(lost)
            self._of("exposure_seconds", loss).set(lost * seconds)
        self._raise("snapshots_skipped", (), status["skipped"])
        if (now := time.monotonic()) >= self._settles:
            self._settles, ledger = now + LEDGER_SECONDS, self._ledger.ledger
            self._of("ettr").set(ledger.ettr)
            for category, spent in ledger.seconds().items():
                self._raise("wall_seconds", (category,), spent)

    def _update_levels(self, status: Mapping[str, Any], iteration: int) -> None:
        now = time.monotonic()
        for level in LEVELS:
            if status[level] is None:
                continue
            newest = status[level]["iteration"]
            if newest != self._newest[level][0]:
                self._newest[level] = newest, now
            self._of("snapshot_iteration", level).set(newest)
            self._of("snapshot_age_iterations", level).set(max(0, iteration - newest))
            self._of("snapshot_age_seconds", level).set(now - self._newest[level][1])

    def _of(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._job, *labels)

    def _raise(self, name: str, labels: tuple[str, ...], total: float) -> None:
        """Raise a counter to a total that somebody else counts."""
        key = (name, *labels)
        more = total - self._raised.get(key, 0.0)
        if more > 0:
            self._of(*key).inc(more)
            self._raised[key] = total


def _library() -> Any:
    try:
        import prometheus_client
        import prometheus_client.exposition
    except ImportError as error:
        raise MissingEnvironmentError(
            "--metrics needs prometheus_client, which is not installed: "
            "pip install 'megatron-ft[metrics]'"
        ) from error
    return prometheus_client
