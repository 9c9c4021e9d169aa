"""One rank that keeps a state of DTensors, or brings it back in another number of ranks.

python -m benchmarks.reshape.rank PLAN      PLAN: the fields of Plan as JSON

Each way has ranks that save and, in new processes, fewer ranks that load.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

COLUMNS = 1024
PACE_SECONDS = 0.05
"""Between two saves that are asked for."""

WAIT_SECONDS = 300.0
OUTLIVES_SECONDS = 3600.0
"""A rank of a job stands so long to be killed."""

State = dict[str, Any]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement.  ``mib`` is the part of the state that each of the ``savers`` has.

    ``hot_mib`` is memory that is used and freed just before a load, see ``heat``.
    """

    way: str
    folder: str
    mib: int
    savers: int
    tensors: int = 16
    hot_mib: int = 0

    @property
    def rows(self) -> int:
        """Rows of each tensor."""
        return (self.mib << 20) * self.savers // (4 * COLUMNS * self.tensors)


class Said(msgspec.Struct, frozen=True):
    """One rank's moments, in monotonic seconds, which all processes of a machine share.

    ``begun`` and ``done`` are of its save or load, ``built`` is when its state was there.
    """

    built: float
    begun: float
    done: float


def build(plan: Plan, mesh: Any, *, saved: bool) -> State:
    """The state as it is saved, or with other values; all its pages are there."""
    return {
        f"w{number}": DTensor.from_local(
            local if saved else torch.full_like(local, -1.0),
            mesh,
            [Shard(0)],
            shape=torch.Size((plan.rows, COLUMNS)),
            stride=(COLUMNS, 1),
        )
        for number in range(plan.tensors)
        for local in [values(plan, number)]
    }


def values(plan: Plan, number: int) -> torch.Tensor:
    """This rank's rows of a tensor, whose elements say where in which tensor they are."""
    rows = torch.arange(plan.rows, dtype=torch.float32).chunk(dist.get_world_size())
    own = rows[dist.get_rank()].remainder(1 << 12)[:, None] * COLUMNS
    return own + torch.arange(COLUMNS, dtype=torch.float32) + 0.25 * (number % 4)


def require_right(plan: Plan, state: State) -> None:
    """RuntimeError if what was loaded is not what was saved."""
    for number, (name, tensor) in enumerate(state.items()):
        if not torch.equal(tensor.to_local(), values(plan, number)):
            raise RuntimeError(f"{name} was not loaded as it was saved")


def say(plan: Plan, what: str, said: Said) -> None:
    """Write this rank's moments; the file is there when it is whole."""
    path = Path(plan.folder) / f"{what}-{dist.get_rank()}.json"
    (new := path.with_suffix(".new")).write_bytes(msgspec.json.encode(said))
    new.replace(path)


def timed(plan: Plan, work: Callable[[], object]) -> Said:
    """Begin and end of the work, which all ranks begin together."""
    built = time.monotonic()
    dist.barrier()
    if dist.get_world_size() != plan.savers:
        heat(plan)
        dist.barrier()
    begun = time.monotonic()
    work()
    return Said(built, begun, time.monotonic())


def heat(plan: Plan) -> None:
    """Use memory and free it again, once for all ranks.

    A virtual machine may give its free memory back to its host within seconds.  The next use of
    that memory waits for the host, which is no part of a reshape or of a checkpoint.
    """
    if plan.hot_mib and dist.get_rank() == 0:
        with mmap.mmap(-1, plan.hot_mib << 20) as pages:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, len(pages), mmap.PAGESIZE):
                pages[at] = 1


def checkpoint(plan: Plan, mesh: Any) -> None:
    """DCP: save twice, of which the first warms up, or load."""
    # Here: it takes a third of what importing takes, in ranks that have no use for it.
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    saves = dist.get_world_size() == plan.savers
    state, place = build(plan, mesh, saved=saves), Path(plan.folder) / "checkpoint"
    if not saves:
        say(plan, "load", timed(plan, lambda: load(state, checkpoint_id=place)))
        require_right(plan, state)
        return
    for _ in range(2):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        said = timed(plan, lambda: save(state, checkpoint_id=place))
    say(plan, "save", said)


def memory(plan: Plan, mesh: Any) -> None:
    """megatron-ft: have a snapshot protected and wait to be killed, or load it reshaped."""
    from megatron_ft import SnapshotManager
    from megatron_ft.core.identity import RankRule

    saves = dist.get_world_size() == plan.savers
    state = build(plan, mesh, saved=saves)
    manager = SnapshotManager(rank_rule=RankRule(1, 1, 12))
    said = timed(plan, lambda: manager.load(into=state))
    if not saves:
        say(plan, "load", said)
        require_right(plan, state)
        manager.close()
        return
    iteration, protected = 0, False
    while not protected:
        time.sleep(PACE_SECONDS)
        iteration += 1
        ticket = manager.save(iteration, state)
        with manager.fence():
            pass
        # A rank that has skipped it cannot say so while the others wait for what becomes of it.
        if agreed(not ticket.skipped):
            committed = ticket.committed.result(WAIT_SECONDS)
            protected = agreed(committed and ticket.protected.result(0))
    say(plan, "save", said)
    time.sleep(OUTLIVES_SECONDS)


def agreed(mine: bool) -> bool:
    """True if it is so on all ranks."""
    dist.all_reduce(found := torch.tensor(int(mine)), dist.ReduceOp.MIN)
    return bool(found)


def main() -> None:
    """Do this rank's part."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    {"dcp": checkpoint, "memory": memory}[plan.way](plan, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
