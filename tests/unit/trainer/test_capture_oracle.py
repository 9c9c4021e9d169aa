"""Whatever is sealed is the state between two iterations, however late its bytes are copied."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megatron_ft.trainer.cpu import CpuCopier
from tests.support.captures import WAIT, FakeSmp, make_manager
from tests.support.small_training import advance, fingerprint, make_training

PATIENCE_SECONDS = 0.5
"""How long a copy waits for a step that must not come; a step that nothing holds takes 1 ms."""


class LastMomentCopier(CpuCopier):
    """Lets the optimizer step first, if nothing holds it for so long."""

    def __init__(self, patience_seconds: float) -> None:
        super().__init__(1 << 20)
        self.stepped, self._patience_seconds = Event(), patience_seconds

    def copy(self, *arguments: Any) -> bool:
        self.stepped.wait(self._patience_seconds)
        return super().copy(*arguments)


@pytest.mark.parametrize(("fence_seconds", "sealed"), [(WAIT, True), (0.05, False)])
def test_what_is_sealed_is_the_state_between_two_iterations(
    tmp_path: Path, fence_seconds: float, sealed: bool
) -> None:
    """A copy that the fence can wait for is complete, one that it cannot is given up."""
    # One that is given up sees the step, however late that comes on a busy machine.
    copier = LastMomentCopier(PATIENCE_SECONDS if sealed else WAIT)
    smp, state = FakeSmp(tmp_path), make_training()
    settings = {"fence_timeout_seconds": fence_seconds}
    manager = make_manager(smp, copier=copier, settings=settings)
    manager.register_fence(state["optimizer"])
    for iteration in (1, 2):
        advance(state, iteration)
    manager.prepare(state)
    state["optimizer"].register_step_post_hook(lambda *_: copier.stepped.set())
    smp.grant(2)
    manager.save(2, state)
    truth = deepcopy(fingerprint(state))
    advance(state, 3)
    smp.wait_ended()
    manager.close()
    if smp.sealed_records:
        assert restored(smp) == truth, "the snapshot of iteration 2 is not the state at its end"
    assert bool(smp.sealed_records) is sealed


def restored(smp: FakeSmp) -> list[Any]:
    smp.offer_last()
    fresh, manager = make_training(seed=99), make_manager(smp)
    assert manager.load(into=fresh) == 2
    return fingerprint(fresh)
