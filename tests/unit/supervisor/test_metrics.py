"""Metrics say what the status, the events and the ledger say, in Prometheus' own form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core.errors import MissingEnvironmentError
from megatron_ft.supervisor import metrics as module
from megatron_ft.supervisor.events import (
    AbortedEvent,
    CommittedEvent,
    EndedEvent,
    EventFacts,
    JobEvent,
    RecoveredEvent,
    TrainingEvent,
)
from megatron_ft.supervisor.metrics import METRICS, PREFIX, JobMetrics

parser = pytest.importorskip("prometheus_client.openmetrics.parser")

MONITORING = Path(__file__).parents[3] / "configs" / "monitoring"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SUFFIX = {"Counter": ("_total",), "Info": ("_info",), "Histogram": ("_bucket", "_sum", "_count")}
STATUS: dict[str, Any] = {
    "iteration": 120,
    "watch": {"iteration_seconds": 0.5},
    "interval": 10,
    "incarnation": 3,
    "encoders": "up",
    "paused": [],
    "exposed": True,
    "damaged_shards": 1,
    "nodes": ["n0", "n1", "n2"],
    "idle": ["n2"],
    "spares": ["n2"],
    "skipped": 4,
    "committed": {"iteration": 110, "snapshot": "s", "level": "local"},
    "protected": {"iteration": 100, "snapshot": "s"},
    "durable": None,
    "crash": 110,
    "any_node": {"iteration": 100, "source": "memory"},
    "some_nodes": [{"iteration": 90, "source": "memory", "nodes": ["n1"]}],
}


def event(facts: EventFacts, at: float) -> JobEvent:
    return JobEvent(facts.kind, "text", monotonic=at, facts=facts)


def samples(metrics: JobMetrics) -> dict[str, float]:
    """Values by name and labels but for ``run``."""
    page, content_type = metrics.page(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    found = {}
    for family in parser.text_string_to_metric_families(page.decode()):
        for one in family.samples:
            assert one.labels.pop("run") == "job1"
            labels = ",".join(one.labels.values())
            found[f"{one.name.removeprefix(PREFIX)} {labels}".strip()] = one.value
    return found


def test_gauges_are_those_of_the_status() -> None:
    metrics = JobMetrics("job1")
    metrics.update(STATUS)
    found = samples(metrics)
    assert found["iteration"] == 120
    assert found["snapshot_age_iterations committed"] == 10
    assert found["snapshot_iteration protected"] == 100
    assert "snapshot_iteration durable" not in found
    assert found["exposure_iterations trainer"] == 10
    assert found["exposure_iterations worst_node"] == 30
    assert found["exposure_seconds node"] == 10.0
    assert (found["nodes training"], found["nodes spare"]) == (2, 1)
    assert (found["exposed"], found["encoders_up"], found["paused"]) == (1, 1, 0)


def test_counters_never_fall() -> None:
    metrics = JobMetrics("job1")
    for skipped in (4, 6, 5):
        metrics.update({**STATUS, "skipped": skipped})
    assert samples(metrics)["snapshots_skipped_total"] == 6


def test_events_are_counted() -> None:
    metrics = JobMetrics("job1")
    parts = {"detect": 0.25, "kill": 0.0, "decide": 0.0, "rebuild": 0.0, "iterate": 0.0}
    for at, facts in enumerate(
        [
            TrainingEvent(iteration=0),
            CommittedEvent(iteration=10, stall=0.002, level="protected"),
            AbortedEvent(iteration=20, stall=0.0),
            EndedEvent(reached=25, cause="a node was lost", node="n1"),
            RecoveredEvent(
                total=1.0, start=0.75, starts={"in process": [0, 1], "cold": [2]}, **parts
            ),
            EndedEvent(reached=25, cause="a rewind", asked=True),
        ]
    ):
        metrics.observe(event(facts, float(at)))
    metrics.update(STATUS)
    found = samples(metrics)
    assert (found["snapshots_total protected"], found["snapshots_total aborted"]) == (1, 1)
    assert found["failures_total"] == found["failures_by_cause_total a node was lost"] == 1
    assert "failures_by_cause_total a rewind" not in found
    assert (found["rank_starts_total in process"], found["rank_starts_total cold"]) == (2, 1)
    assert found["recovery_seconds_sum start"] == 0.75
    assert found["stall_seconds_count"] == 2
    assert found["events_total incarnation_ended"] == 2
    # Detection is taken out of the three seconds of training.
    assert found["wall_seconds_total productive"] == pytest.approx(2.75 - 0.002)
    assert found["ettr"] == pytest.approx((2.75 - 0.002) / 5)


def test_a_page_is_made_once_for_each_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand scrapes a second cost no more than one."""
    metrics = JobMetrics("job1")
    metrics.update(STATUS)
    first = metrics.page()
    metrics.observe(event(TrainingEvent(), 0.0))
    assert metrics.page()[0] is first[0]
    metrics.update(STATUS)
    assert metrics.page()[0] != first[0]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingEnvironmentError, match=r"megatron-ft\[metrics\]"):
        JobMetrics("job1")


def names() -> set[str]:
    """Names of all samples that a job can have."""
    return {
        f"{PREFIX}{one.name}{suffix}" for one in METRICS for suffix in SUFFIX.get(one.kind, ("",))
    }


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "prometheus-rules.yaml"])
def test_dashboard_and_alerts_name_metrics_that_exist(file: str) -> None:
    used = set(re.findall(rf"{PREFIX}\w+", (MONITORING / file).read_text()))
    assert len(used) > 4
    assert used <= names()


def test_dashboard_labels_exist() -> None:
    """Labels in selectors and legends are labels of the metric that they select."""
    labels = {f"{PREFIX}{one.name}": {"run", "le", *one.labels} for one in METRICS}
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for name, selector in re.findall(rf"({PREFIX}\w+)\{{(.*?)\}}", target["expr"]):
                base = re.sub(r"_(total|bucket|sum|count)$", "", name)
                used = {
                    *re.findall(r"(\w+)=", selector),
                    *re.findall(r"\w+", target["legendFormat"]),
                }
                used -= {"median", "99", "skipped", "usual"}
                assert used <= labels[base], (panel["title"], target)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_rules_and_metrics() -> None:
    metrics = JobMetrics("job1")
    metrics.observe(event(CommittedEvent(iteration=10, stall=0.002, level="local"), 0.0))
    metrics.update(STATUS)
    rules = ["promtool", "check", "rules", str(MONITORING / "prometheus-rules.yaml")]
    subprocess.run(rules, check=True, capture_output=True, timeout=60)
    page = metrics.page()[0]
    lint = ["promtool", "check", "metrics"]
    done = subprocess.run(lint, input=page, capture_output=True, timeout=60)
    assert not done.returncode, done.stderr.decode()


def test_the_module_needs_no_library_to_be_imported() -> None:
    assert module.METRICS
