"""Every generator that training draws from, Megatron's tracker included; each rank's own."""

from __future__ import annotations

from typing import Any

from megatron_ft.trainer.rng import RngState
from megatron_ft.trainer.values import host_copy


def capture_random_states() -> dict[str, Any]:
    """Python's, numpy's, torch's, the device's, and the tracker's named states, as of now."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as megatron_random

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    plain = {name: megatron_random.convert_cuda_rng_state(s) for name, s in states.items()}
    return {"generators": RngState().state_dict(), "tracker": host_copy(plain)}


def restore_random_states(captured: dict[str, Any]) -> None:
    """Set them again; may be called more than once with the same value."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as megatron_random

    tracker = tensor_parallel.get_cuda_rng_tracker()
    graph_safe = megatron_random.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: megatron_random.convert_cuda_rng_state(state.clone(), to_graphable=graph_safe)
            for name, state in captured["tracker"].items()
        }
    )
    # After the tracker: converting a state passes through the device's generator.
    RngState().load_state_dict(captured["generators"])
