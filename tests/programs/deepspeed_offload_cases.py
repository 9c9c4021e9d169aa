"""What ranks of tests of offload_states run: memory that DeepSpeed gives back is given back."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext import attach, attachment
from megatron_ft.rpc.heartbeat_page import TrainerPhase
from tests.programs.deepspeed_program import make_engine, train_step
from tests.support.captures import WAIT, FakeSmp, GatedCopier, make_manager
from tests.support.deepspeed_cells import Cell, zero


@contextmanager
def attached(stage: int, copier: Any = None) -> Iterator[tuple[Any, FakeSmp, Any]]:
    """An engine with its snapshots, whose weights are captured too, as views of them.

    They do not follow from masters when training begins.
    """
    cell = Cell("case", 0, zero(stage, "bf16"), model="tests.programs.deepspeed_models:small")
    smp = FakeSmp(Path(sys.argv[1]))
    smp.directory.mkdir()
    made = make_manager(smp, copier=copier)
    attachment.make_manager = lambda config, engine: made
    os.environ["MEGATRON_FT_PROTECT"] = "none"
    engine = make_engine(dataclasses.asdict(cell))
    with torch.no_grad():
        for flat in engine.optimizer.bit16_groups_flat:
            flat.mul_(1.5)
    attach(engine)
    engine.load_checkpoint(str(smp.directory / "none"))
    if copier is not None:
        copier.gate.set()
    train_step(engine)
    yield engine, smp, made
    engine.destroy()


def captured(engine: Any, smp: FakeSmp) -> None:
    snapshot = smp.grant(engine.global_steps + 1)
    train_step(engine)
    smp.wait_ended()
    assert snapshot in smp.sealed_records, smp.abandoned_ids


def memory_of_states(engine: Any) -> list[StorageWeakRef]:
    """Of the weights, of the masters, and of what is kept for these."""
    optimizer = engine.optimizer
    kept = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values()]
    moved = [*optimizer.bit16_groups_flat, *optimizer.single_partition_of_fp32_groups, *kept]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in moved]


def offload_as_from_a_device(optimizer: Any) -> None:
    """Have ``offload_states`` move what is kept for masters too, which is on the host here."""
    original = optimizer.offload_states

    def offload_states(**options: Any) -> None:
        original(**options)
        for state in optimizer.optimizer.state.values():
            state.update({name: tensor.clone() for name, tensor in state.items()})

    optimizer.offload_states = offload_states


def offloaded_memory_is_given_back() -> None:
    """When the call returns, not at the next snapshot; what is trained on then is captured."""
    with attached(2) as (engine, smp, _):
        offload_as_from_a_device(engine.optimizer)
        for _ in range(2):
            captured(engine, smp)
            memory = memory_of_states(engine)
            engine.offload_states()
            assert all(one.expired() for one in memory), "something still looks into it"
            engine.reload_states()
        captured(engine, smp)


def states_move_when_no_copy_reads_them() -> None:
    """Nor is a hang seen in the time that it takes."""
    copier = GatedCopier()
    with attached(2, copier) as (engine, smp, made):
        # No step can be made between an offload and its reload.
        for name in ("reload_states", "offload_states"):
            copier.started.clear()
            copier.gate.clear()
            smp.grant(engine.global_steps + 1)
            train_step(engine)
            assert copier.started.wait(WAIT), "the copy has not begun"
            run, found = made._captures._run, list[Any]()
            move = getattr(engine.optimizer, name)

            def moved(move: Any = move, run: Any = run, found: Any = found, **options: Any) -> None:
                found.append((run.moved.is_set(), made.watch._pulse.phase))
                move(**options)

            setattr(engine.optimizer, name, moved)
            open_when_waited_for(copier, run)
            getattr(engine, name)()
            assert found == [(True, TrainerPhase.PAUSED)], found
            assert made.watch._pulse.phase == TrainerPhase.TRAINING
            smp.wait_ended()
            assert not smp.abandoned_ids


def open_when_waited_for(copier: GatedCopier, run: Any) -> None:
    """Let the copy continue once the training thread waits for it."""
    entered = threading.Event()
    wait = run.wait_moved
    run.wait_moved = lambda seconds: entered.set() or wait(seconds)  # type: ignore[func-returns-value]

    def open_gate() -> None:
        entered.wait(WAIT)
        copier.gate.set()

    threading.Thread(target=open_gate, daemon=True).start()
