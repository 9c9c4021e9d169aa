"""Loops of Accelerate lose a trainer and a node: all that the Accelerator keeps comes back."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("accelerate") is None:
    pytest.skip("needs accelerate", allow_module_level=True)

from tests.programs import accelerate_fsdp2, accelerate_zero
from tests.support.jobs import Job, difference, oracle, trainers_of

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.mpi]

ITERATIONS = 50
"""Five passes over the data of four ranks, ten steps each."""

WIDTH = 257
"""Weights that no number of ranks divides, and that DDP's ranks capture in parts."""

SCRIPTS = {"ddp": accelerate_fsdp2.EXAMPLE, "fsdp2": Path(accelerate_fsdp2.__file__)}
STAGES = {f"zero{stage}": stage for stage in (1, 2, 3)}
missing = [name for name in ("deepspeed", "transformers", "lightning") if find_spec(name) is None]
with_deepspeed = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"),
]


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    "kind", [*SCRIPTS, *(pytest.param(kind, marks=with_deepspeed) for kind in STAGES)]
)
def test_an_accelerator_trains_on_as_if_nothing_was_lost(
    kind: str,
    made: list[Job],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = SCRIPTS.get(kind, Path(accelerate_zero.__file__))
    stage = {accelerate_zero.STAGE: str(STAGES[kind])} if kind in STAGES else {}
    for name, value in stage.items():
        monkeypatch.setenv(name, value)
    shape = {"nodes": 4, "spares": 1, "protect": "rs:3+1", "iterations": ITERATIONS, "width": WIDTH}
    with trainers_of(request.getfixturevalue("clients_server" if stage else "warm_host")):
        job = Job(tmp_path, script=script, environment=stage, iteration_seconds=0.1, **shape)
        made.append(job)
        job.run(
            (6, lambda job: os.kill(job.trainers()[1], signal.SIGKILL)),
            (24, lambda job: job.cluster.kill_node("n2")),
        )
        alone = oracle(tmp_path, 4, ITERATIONS, WIDTH, script)
    assert not difference(job.result(), alone), job.story()
    sources = [source for _, source in job.restores()]
    assert sources == ["own memory", "parity"], job.story()
