"""Ways of saving a state while training continues, behind one small interface."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_ft import SnapshotConfig, SnapshotManager
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.supervisor.orders import Timing
from megatron_ft.trainer.ticket import Ticket

WAIT_SECONDS = 120.0

State = dict[str, torch.Tensor]


class Method(Protocol):
    """``save`` at an iteration's end, ``fence`` before the state changes, ``settle`` until what
    was saved last outlives the trainers, and as many nodes as the method promises.

    ``save`` returns whether it saved.  One that ``decides`` is asked after every iteration, and
    told by ``pause`` when it shall not.
    """

    decides: bool

    def pause(self, paused: bool) -> None:
        """Take no snapshots from now on, or take them again."""
        ...

    def idle(self) -> None:
        """Return when nothing is under way any more, whatever has become of it."""
        ...

    def save(self, iteration: int, state: State) -> bool:
        """Begin to save."""
        ...

    def fence(self) -> None:
        """Return when the state may change."""
        ...

    def settle(self) -> None:
        """Return when it is safe."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Asked:
    """Saves when it is asked to, and only then."""

    decides = False
    """Whether it chooses itself which of the offered iterations it saves; it is offered all."""

    def pause(self, paused: bool) -> None:
        """It is not asked meanwhile."""

    def idle(self) -> None:
        """What it does after a phase is its own affair."""


class InMemory:
    """megatron-ft."""

    decides = True

    def __init__(self, folder: Path) -> None:
        self._manager = SnapshotManager(SnapshotConfig.from_env())
        self._loaded = False
        self._ticket: Ticket | None = None

    def save(self, iteration: int, state: State) -> bool:
        """Captures where the job has agreed to."""
        if not self._loaded:
            self.load(state)
        ticket = self._manager.save(iteration, state)
        self._ticket = self._ticket if ticket.skipped else ticket
        return not ticket.skipped

    def pause(self, paused: bool) -> None:
        """As `megatron-ft pause` and `resume`; returns when the job has heard of it."""
        ask(ProcessEnvironment.from_env().socket, m.Pause(paused))
        time.sleep(2 * Timing().heartbeat)

    def idle(self) -> None:
        """Wait for the last snapshot, which may have been given up."""
        self.fence()
        self.committed()

    def load(self, state: State) -> None:
        """Load the newest snapshot in place, if there is one, as an incarnation begins."""
        self._loaded = True
        self._manager.load(into=state)

    def fence(self) -> None:
        """Wait for the copy."""
        with self._manager.fence():
            pass

    def committed(self) -> bool:
        """Wait for the fate of the last snapshot; whether it was committed."""
        return self._ticket is not None and self._ticket.committed.result(timeout=WAIT_SECONDS)

    def settle(self) -> None:
        """Wait until parity is there, or whatever the job protects with."""
        assert self.committed(), "the snapshot was given up"

    def close(self) -> None:
        """Leave the SMP."""
        self._manager.close()


class TorchSave(Asked):
    """torch.save to a memory file system, then a rename: the trainer waits for all of it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"rank{os.environ['RANK']}.pt"

    def save(self, iteration: int, state: State) -> bool:
        """Write the file."""
        temporary = self._path.with_suffix(".tmp")
        torch.save({"iteration": iteration, "state": state}, temporary)
        os.replace(temporary, self._path)
        return True

    def fence(self) -> None:
        """Nothing runs any more."""

    def settle(self) -> None:
        """It is safe as far as it will be: on this node only."""

    def close(self) -> None:
        """Nothing is held."""


class DcpAsync(Asked):
    """torch.distributed.checkpoint.async_save in a thread, to a memory file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Here: a third of what importing takes, in every process that saves in another way.
        self._library: Any = import_module("torch.distributed.checkpoint.state_dict_saver")
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None
        self._last = 0

    def save(self, iteration: int, state: State) -> bool:
        """Start when the last one is done: two at once are refused by design."""
        self.settle()
        if self._last and dist.get_rank() == 0:
            shutil.rmtree(self._folder / f"iteration{self._last}", ignore_errors=True)
        place = str(self._folder / f"iteration{iteration}")
        self._future = self._library.async_save(
            {f"rank{dist.get_rank()}.{name}": tensor for name, tensor in state.items()},
            checkpoint_id=place,
            process_group=self._group,
        )
        self._last = iteration
        return True

    def fence(self) -> None:
        """The call has staged everything when it returns."""

    def settle(self) -> None:
        """Wait for the files; they are on this node only."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def close(self) -> None:
        """Wait for the last one."""
        self.settle()


METHODS: dict[str, Callable[[Path], Method]] = {
    "inmem": InMemory,
    "torch.save": TorchSave,
    "dcp": DcpAsync,
}


def saved_at_last(
    method: Method,
    iteration: int,
    state: State,
    compute: Callable[[], object],
    agreed: Callable[[bool], bool] = bool,
) -> tuple[int, float]:
    """Save as soon as the method does so; the iteration, and when that call began.

    ``compute`` is what comes before the end of each iteration.  ``agreed`` gets whether this
    rank has saved, and says whether that counts.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        compute()
        started = time.perf_counter()
        if agreed(method.save(iteration, state)):
            return iteration, started
        iteration += 1
    raise TimeoutError(f"no permit for a snapshot in {WAIT_SECONDS:.0f} s")
