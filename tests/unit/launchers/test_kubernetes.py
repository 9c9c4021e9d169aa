"""The manifest of a JobSet that ``megatron-ft init`` writes: valid, and of one job."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megatron_ft.cli import main as cli
from megatron_ft.cli import run
from megatron_ft.cli.training_command import command_of, settle
from megatron_ft.core.environment import check_names
from megatron_ft.launchers.agents.rendezvous import node_rank

Manifest = dict[str, Any]


def closed(required: str, **properties: Any) -> Manifest:
    """The schema of an object with these properties only."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


TEXT, COUNT, MAP = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
QUANTITY = {"type": ["string", "integer"]}


def listed(items: Manifest) -> Manifest:
    return {"type": "array", "items": items, "minItems": 1}


CONTAINER = closed(
    "name image",
    name=TEXT,
    image=TEXT,
    command=listed(TEXT),
    args=listed(TEXT),
    resources=closed("", limits={"type": "object", "additionalProperties": QUANTITY}),
    volumeMounts=listed(closed("name mountPath", name=TEXT, mountPath=TEXT)),
)
POD = closed(
    "containers",
    containers=listed(CONTAINER),
    restartPolicy={"enum": ["OnFailure", "Never"]},
    shareProcessNamespace={"type": "boolean"},
    terminationGracePeriodSeconds=COUNT,
    affinity=closed(
        "",
        podAntiAffinity=closed(
            "",
            requiredDuringSchedulingIgnoredDuringExecution=listed(
                closed("topologyKey", topologyKey=TEXT, labelSelector=closed("", matchLabels=MAP))
            ),
        ),
    ),
    volumes=listed(
        closed(
            "name",
            name=TEXT,
            emptyDir=closed("", medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
            persistentVolumeClaim=closed("claimName", claimName=TEXT),
        )
    ),
)
JOB = closed(
    "template",
    completionMode={"enum": ["NonIndexed", "Indexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    podReplacementPolicy={"enum": ["Failed", "TerminatingOrFailed"]},
    template=closed("spec", spec=POD),
)
# What the manifest uses of JobSet's own schema: config/components/crd/bases of its main branch.
JOBSET = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed("name", name=TEXT),
    spec=closed(
        "replicatedJobs",
        failurePolicy=closed("", maxRestarts=COUNT),
        replicatedJobs=listed(
            closed("name template", name=TEXT, template=closed("spec", spec=JOB))
        ),
    ),
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("init") / "written"
    assert cli.main(["init", str(folder)]) == 0
    found: Manifest = yaml.safe_load((folder / "configs/kubernetes/jobset.yaml").read_text())
    return found


def job_of(manifest: Manifest) -> Manifest:
    (job,) = manifest["spec"]["replicatedJobs"]
    found: Manifest = job["template"]["spec"]
    return found


def pod_of(manifest: Manifest) -> Manifest:
    found: Manifest = job_of(manifest)["template"]["spec"]
    return found


SPOILED: list[Callable[[Manifest], Any]] = [
    lambda it: it.update(apiVersion="jobset.x-k8s.io/v1"),
    lambda it: it["spec"].update(replicas=2),
    lambda it: it["spec"]["failurePolicy"].update(maxRestart=0),
    lambda it: job_of(it).update(completion=5),
    lambda it: job_of(it).update(parallelism="5"),
    lambda it: pod_of(it)["containers"][0].pop("name"),
    lambda it: pod_of(it)["volumes"][0]["emptyDir"].update(size="1Gi"),
]


def test_the_manifest_is_valid_and_a_spoiled_one_is_not(manifest: Manifest) -> None:
    jsonschema.validate(manifest, JOBSET)
    for spoil in SPOILED:
        spoiled = copy.deepcopy(manifest)
        spoil(spoiled)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoiled, JOBSET)


def test_each_pod_is_a_node_of_one_job(manifest: Manifest) -> None:
    job, pod = job_of(manifest), pod_of(manifest)
    (container,) = pod["containers"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    run.add_arguments(parser)
    for index in range(job["completions"]):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["args"]]
        given = parser.parse_args(words)
        settings = settle(vars(given), command_of(given), {})
        size = given.nodes + given.spares
        assert (given.launcher, given.job) == ("nodes", manifest["metadata"]["name"])
        assert node_rank({}, given.node_rank, size) == (index, job["parallelism"])
        assert pod["terminationGracePeriodSeconds"] > settings.drain_stop_seconds
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": given.job}
    assert given.ranks_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    hosts = [f"{given.job}-node-0-{index}" for index in range(size)]
    check_names(Path("/dev/shm/megatron-ft-0"), given.job, hosts)


def test_memory_outlives_the_container_and_the_job_no_pod(manifest: Manifest) -> None:
    job, pod = job_of(manifest), pod_of(manifest)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert pod["restartPolicy"] == "OnFailure" and pod["shareProcessNamespace"]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 0 and job["backoffLimit"] > 0
    given = [word for word in pod["containers"][0]["args"] if word.startswith("--state-dir=")]
    assert given[0].startswith("--state-dir=/shared/") and "/shared" in mounts
