"""A real Prometheus scrapes a job of eight nodes; its alerts fire with three faults, and clear."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.main import main as cli
from megatron_ft.core.process_tools import free_port
from megatron_ft.supervisor.metrics import JobMetrics
from megatron_ft.supervisor.metrics_outlet import MetricsServer
from tests.support.disk_jobs import of_kind, wait_for, wait_until
from tests.support.jobs import Job

pytestmark = [
    pytest.mark.usefixtures("warm_trainers"),
    pytest.mark.mpi,
    pytest.mark.all_layouts,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]

RULES = Path(__file__).parents[3] / "configs" / "monitoring" / "prometheus-rules.yaml"
ENDLESS = 100_000
TOKEN = "a token of this test"
WAIT_SECONDS = 60.0


class Prometheus:
    """A Prometheus of this test's own, which scrapes every second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.port = free_port()
        (folder / "token").write_text(TOKEN)
        # As shipped, but for the time for which a condition must hold.
        rules = re.sub(r"for: \d+m", "for: 1s", RULES.read_text())
        (folder / "rules.yaml").write_text(rules)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [
                {
                    "job_name": "megatron-ft",
                    "authorization": {"credentials_file": str(folder / "token")},
                    "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def _get(self, path: str) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now; none while it starts."""
        try:
            alerts = self._get("alerts")["alerts"]
        except OSError:
            return set()
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def value(self, query: str) -> float:
        """The value of a query that gives one."""
        ((found,),) = [self._get(f"query?query={query}")["result"]]
        return float(found["value"][1])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=WAIT_SECONDS)
        self._log.close()


@contextmanager
def watched(job: Job, folder: Path) -> Iterator[Prometheus]:
    """Metrics of a job that runs, and a Prometheus that reads them."""
    metrics = JobMetrics(job.name)
    job.supervisor.observers.subscribe(metrics.observe)
    job.supervisor.summary.subscribe(metrics.update)
    server = MetricsServer(metrics.page, 0, TOKEN)
    prometheus = Prometheus(folder, server.port)
    try:
        yield prometheus
    finally:
        prometheus.close()
        server.close()


def story(prometheus: Prometheus, job: Job) -> None:
    where = ["--job", job.name, "--arena-dir", str(job.cluster.job_dir.parent)]

    def fires(name: str, yes: bool = True) -> None:
        wait_until(job, lambda: (name in prometheus.firing()) is yes, f"for {name}: {yes}")

    # The first: nothing protects newer iterations, until snapshots are taken again.
    wait_until(job, lambda: bool(job.supervisor.members.free_spares()), "for a spare")
    assert cli(["pause", *where]) == 0
    wait_for(job, "exposed")
    fires("MegatronFtExposed")
    assert "paused" in of_kind(job, "exposed")[0].text
    assert cli(["resume", *where]) == 0
    wait_for(job, "protected_again")
    fires("MegatronFtExposed", False)
    # The second: the only spare takes the place of a node.
    trained = len(of_kind(job, "training"))
    job.cluster.kill_node(sorted(job.supervisor.members.active)[1])
    wait_for(job, "training", trained + 1)
    fires("MegatronFtSparesUsedUp")
    # The third, twice: trainers are killed.
    for _ in range(2):
        trained = len(of_kind(job, "training"))
        wait_for(job, "recovered", len(of_kind(job, "recovered")) or 1)
        os.kill(job.trainers()[0], signal.SIGKILL)
        wait_for(job, "training", trained + 1)
    fires("MegatronFtRestartLoop")
    newest = job.supervisor.standing.protected
    assert newest is not None
    query = 'megatron_ft_snapshot_iteration{level="protected"}'
    wait_until(job, lambda: prometheus.value(query) >= newest.iteration, "for the newest scrape")
    # The ledger's sums are taken every ten seconds.
    wait_until(job, lambda: 0 < prometheus.value("megatron_ft_ettr") < 1, "for the ledger")
    assert prometheus.value("megatron_ft_failures_total") >= 3


def test_alerts_fire_with_faults_and_clear(made: list[Job], tmp_path: Path) -> None:
    job = Job(
        tmp_path, nodes=8, spares=1, protect="xor:4", iterations=ENDLESS, exposed_iterations=60
    )
    made.append(job)

    def strike(job: Job) -> None:
        with watched(job, tmp_path) as prometheus:
            story(prometheus, job)
        job.interrupt()

    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        job.run((20, strike))
    assert job.failed_fault is None
    assert "protected_again" in job.kinds(), f"after {time.monotonic() - began:.0f} s"
