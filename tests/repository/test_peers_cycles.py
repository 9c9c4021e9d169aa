"""Incarnations of a job that is compared with its peers: each loads what the one before has
saved."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.methods import State, saved_at_last
from benchmarks.peers.jobs import Found, read
from benchmarks.peers.peer import Peer
from benchmarks.peers.rank import Plan
from tests.support.warm_host import Request, WarmHost

WAY, RANKS, INCARNATIONS = "torch.save", 2, 2


@pytest.fixture(scope="module")
def server() -> Iterator[WarmHost]:
    server = WarmHost("tests.programs.peers_program", {"OMP_NUM_THREADS": "1"})
    yield server
    server.close()


def incarnation(server: WarmHost, folder: Path) -> Found:
    """One incarnation of all ranks; what the job has found so far."""
    plan = Plan(
        way=WAY, folder=str(folder), tensors=2, mib=1, work=1.0, every=1, iterations=1, rounds=1,
        incarnations=INCARNATIONS,
    )  # fmt: skip
    arguments = [msgspec.json.encode(plan).decode()]
    ended = server.run(
        Request("tests.programs.peers_program:main", arguments, RANKS, str(folder / "logs"), 30.0)
    )
    last = len(read(WAY, folder).loads) == INCARNATIONS
    assert ended.codes == [0 if last else -signal.SIGKILL] * RANKS, ended.story()
    return read(WAY, folder)


@pytest.mark.all_layouts
def test_each_incarnation_loads_what_the_last_has_saved(server: WarmHost, tmp_path: Path) -> None:
    """A save of two incarnations ago has the right names and shapes, but not the values."""
    assert incarnation(server, tmp_path).loads == ()
    older = shutil.copytree(tmp_path, tmp_path / "older")
    assert incarnation(server, tmp_path).loads[-1]["right"]
    for file in older.glob("*.pt"):
        shutil.copy(file, tmp_path)
    first, last = incarnation(server, tmp_path).loads
    assert first["right"] and not last["right"]
    assert first["iteration"] == last["iteration"], "the last incarnation saves no more"


class Third(Peer):
    """Saves when it is asked for the third time; ``told`` is what happened, in order."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.told: list[str] = []

    def save(self, iteration: int, state: State) -> bool:
        self.told.append(f"save {iteration}")
        return sum(word != "compute" for word in self.told) == 3

    def compute(self) -> None:
        self.told.append("compute")


def test_a_rank_computes_until_it_may_save() -> None:
    """Sleeping instead would leave it with cold cores; peers compute once before theirs."""
    third = Third()
    assert saved_at_last(third, 7, {}, third.compute)[0] == 9
    assert third.told == [word for i in (7, 8, 9) for word in ("compute", f"save {i}")]
    asked = Third()
    asked.save_alone(7, {}, asked.compute)
    assert asked.told == ["compute", "save 7"]
