"""Every generator that training draws from, DeepSpeed's tracker included; each rank's own."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ft.trainer.rng import RngState


class RandomStates:
    """Python, numpy, torch, the accelerator, and activation checkpointing's named states.

    DeepSpeed saves none of them.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states as of now."""
        return {
            "generators": RngState().state_dict(),
            "accelerator": _accelerator_state(),
            "tracker": {name: _copy(state) for name, state in _tracker().get_states().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them; may be called more than once with the same value."""
        _tracker().set_states({name: _copy(value) for name, value in state["tracker"].items()})
        RngState().load_state_dict(state["generators"])
        if state["accelerator"] is not None and _has_own_generator():
            _accelerator().set_rng_state(state["accelerator"].cpu())


def _copy(state: Any) -> Any:
    # `fork` of the tracker puts new tensors into its dict, yet a state may be set in place.
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def _tracker() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing.get_cuda_rng_tracker()


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def _has_own_generator() -> bool:
    # RngState knows the CPU and CUDA; DeepSpeed runs on others too.
    return _accelerator().device_name() not in ("cpu", "cuda")


def _accelerator_state() -> Any:
    return _copy(_accelerator().get_rng_state()) if _has_own_generator() else None
