"""What a rank of the tests of saving runs; it notes what it saw, the tests judge."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.programs.deepspeed_program import make_engine, train_step
from tests.support.deepspeed_cells import zero
from tests.support.warm_host import Request, WarmHost

MASTERS = "masters.pt"
"""Weights in memory when the checkpoint "after" was saved."""

SAVED_BUFFERS = {"mean"}
"""Those of the model that a checkpoint holds."""

WAIT = 30.0
TIMEOUT_SECONDS = 150.0


def main() -> None:
    """Run the scenario that ``sys.argv`` names, in its folder; keep its notes."""
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    notes = globals()[scenario](folder)
    rank = os.environ["RANK"]
    (folder / f"notes{rank}.json").write_text(json.dumps(notes))
    torch.distributed.destroy_process_group()


def engine_of(**config: Any) -> Any:
    """An engine of the tests' small model that has made a step."""
    base = {**zero(2, "bf16"), **config}
    engine = make_engine(
        {"model": "tests.programs.deepspeed_models:small", "options": {}, "config": base}
    )
    train_step(engine)
    return engine


def wrapped(engine: Any, seconds: float = WAIT) -> Any:
    """Put our engine around DeepSpeed's; the ``save_checkpoint`` that goes with it."""
    from deepspeed_ext.checkpoint_engine import SnapshotCheckpointEngine, world_agreement
    from deepspeed_ext.saving import Checkpoints

    agreement = world_agreement(timedelta(seconds=seconds))
    engine.checkpoint_engine = SnapshotCheckpointEngine(engine.checkpoint_engine, agreement)
    return functools.partial(Checkpoints(engine).save, engine.save_checkpoint)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT} s in vain: {what}"
        time.sleep(0.01)


def latest(folder: Path) -> str:
    file = folder / "latest"
    return file.read_text() if file.is_file() else ""


def tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call raised, '' if nothing."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rank() -> int:
    return torch.distributed.get_rank()


def on_rank_1(inner: Any, before_save: Callable[[str], None]) -> Callable[[], None]:
    """Have ``before_save(path)`` called before rank 1 writes a file; returns what undoes it."""
    original = inner.save

    def save(state_dict: Any, path: str) -> Any:
        before_save(str(path))
        return original(state_dict, path)

    if rank() == 1:
        inner.save = save

    def undo() -> None:
        inner.__dict__.pop("save", None)

    return undo


def plain(folder: Path) -> dict[str, Any]:
    """DeepSpeed alone: rank 1 does not write before ``latest`` names the checkpoint."""
    engine = engine_of()
    seen: dict[str, Any] = {}

    def wait_for_latest(path: str) -> None:
        until(lambda: latest(folder) == "slow", "`latest` names the checkpoint")
        seen["named"], seen["present"] = latest(folder), Path(path).exists()

    on_rank_1(engine.checkpoint_engine, wait_for_latest)
    engine.save_checkpoint(folder, tag="slow")
    engine.destroy()
    return seen


def saving(folder: Path) -> dict[str, Any]:
    """Ours: the same files, a slow rank 1, and a rank 1 that fails in every place."""
    engine = engine_of()
    inner, notes = engine.checkpoint_engine, {}
    engine.save_checkpoint(folder / "plain", tag="one")
    engine.save_16bit_model(folder / "plain")
    save = wrapped(engine)
    notes["returned"] = save(folder / "ours", tag="one")
    engine.save_16bit_model(folder / "ours")
    if rank() == 0:
        engine.save_16bit_model(folder / "alone")
    notes["latest"] = latest(folder / "ours")
    notes["slow"] = _slow(engine, save, folder / "ours")
    save(folder / "ours", "unnamed", {"epoch": 3}, save_latest=False)
    notes["unnamed"] = latest(folder / "ours")
    notes["failures"] = {
        name: _failing(engine, inner, save, folder / "ours", name, fail)
        for name, fail in FAILURES.items()
    }
    notes["last_save_before"] = _last_save(engine, folder / "ours", save.func.__self__)
    save(folder / "ours", tag="after")
    _keep_masters(engine, folder / MASTERS)
    notes["after"] = latest(folder / "ours")
    notes["last_save"] = _last_save(engine, folder / "ours", save.func.__self__)
    path, _ = engine.load_checkpoint(folder / "ours")
    notes["loaded"] = Path(path).parent.name
    engine.destroy()
    return notes


def _keep_masters(engine: Any, path: Path) -> None:
    """Write the full fp32 weights by name, as the optimizer has them at this moment."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {n: b.float() for n, b in engine.module.named_buffers() if n in SAVED_BUFFERS}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        # What is not trained has no master.
        full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else parameter
        found[name] = full.detach().float().clone()
    if rank() == 0:
        torch.save(found, path)


def _last_save(engine: Any, folder: Path, saved: Any) -> list[Any]:
    """The tag that a snapshot would note, and the steps of checkpoints that follow from that."""
    from deepspeed_ext.saving import Checkpoints, disk_of

    later = Checkpoints(engine)
    later.load_state_dict(saved.state_dict())
    assert later.saved is not None
    tags = ("after", "global_step7")
    return [
        later.saved.tag,
        *(disk_of(engine, str(folder), t, later.saved).iteration for t in tags),
    ]


def _slow(engine: Any, save: Callable[..., Any], folder: Path) -> dict[str, Any]:
    agreement, met, seen = engine.checkpoint_engine._agreement, folder / "rank0_waits", {}
    meet = agreement.meet

    def marking(*args: Any) -> Any:
        if rank() == 0:
            met.touch()
        return meet(*args)

    def wait_for_rank_0(path: str) -> None:
        until(met.exists, "rank 0 has written its files")
        seen["named"] = latest(folder)

    agreement.meet = marking
    undo = on_rank_1(engine.checkpoint_engine.inner, wait_for_rank_0)
    save(folder, tag="slow")
    undo()
    del agreement.meet
    return {**seen, "then": latest(folder)}


def _full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def _fail_save(engine: Any, inner: Any, folder: Path) -> Callable[[], None]:
    return on_rank_1(inner, _full)


def _fail_commit(engine: Any, inner: Any, folder: Path) -> Callable[[], None]:
    if rank() == 1:
        inner.commit = _full
    return lambda: inner.__dict__.pop("commit", None)


def _fail_state(engine: Any, inner: Any, folder: Path) -> Callable[[], None]:
    # Not in the checkpoint engine: DeepSpeed has not called it yet.
    if rank() == 1:
        engine.optimizer.state_dict = _full
    return lambda: engine.optimizer.__dict__.pop("state_dict", None)


def _fail_latest(engine: Any, inner: Any, folder: Path) -> Callable[[], None]:
    ours = engine.checkpoint_engine
    if rank() == 0:
        ours._write_latest = _full
    return lambda: ours.__dict__.pop("_write_latest", None)


def _fail_folder(engine: Any, inner: Any, folder: Path) -> Callable[[], None]:
    if rank() == 0:
        inner.makedirs = _full
    return lambda: inner.__dict__.pop("makedirs", None)


FAILURES = {
    "save": _fail_save,
    "commit": _fail_commit,
    "state": _fail_state,
    "latest": _fail_latest,
    "folder": _fail_folder,
}


def _failing(
    engine: Any, inner: Any, save: Any, folder: Path, name: str, fail: Callable[..., Any]
) -> dict[str, str]:
    undo = fail(engine, inner, folder)
    raised = tried(save, folder, tag=f"bad-{name}")
    undo()
    torch.distributed.barrier()
    return {"raised": raised, "latest": latest(folder)}


def dead(folder: Path) -> dict[str, Any]:
    """Rank 1 dies while it saves."""
    engine = engine_of()
    save = wrapped(engine, seconds=2.0)
    on_rank_1(engine.checkpoint_engine.inner, lambda path: os._exit(0))
    raised = tried(save, folder, tag="lost")
    (folder / "notes0.json").write_text(json.dumps({"raised": raised, "latest": latest(folder)}))
    (folder / "notes1.json").write_text("null")
    os._exit(0)  # nothing collective can be had any more


def node_local(folder: Path) -> dict[str, Any]:
    """Two nodes of one rank each, which see only folders of their own."""
    node = folder / f"node{os.environ['RANK']}"
    os.environ["LOCAL_RANK"] = "0"
    engine = engine_of(checkpoint={"use_node_local_storage": True})
    engine.save_checkpoint(node / "plain", tag="one")
    notes = {"plain": latest(node / "plain")}
    wrapped(engine)(node / "ours", tag="one")
    path, _ = engine.load_checkpoint(node / "ours")
    engine.destroy()
    return {**notes, "ours": latest(node / "ours"), "loaded": bool(path)}


def notes_of(
    server: WarmHost,
    folder: Path,
    scenario: str,
    ranks: int,
    entry: str = "tests.programs.deepspeed_saving_program:main",
) -> list[Any]:
    """Run a scenario to its end; what each rank noted.  Called by tests, not by ranks."""
    argv, logs = [scenario, str(folder)], str(folder / "logs")
    request = Request(entry, argv, ranks, logs, TIMEOUT_SECONDS)
    outcome = server.run(request)
    assert not any(outcome.codes), outcome.story()
    return [json.loads((folder / f"notes{rank}.json").read_text()) for rank in range(ranks)]
