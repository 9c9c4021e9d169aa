"""What every family of DeepSpeed's optimizers is seen as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Master(NamedTuple):
    """One tensor that an inner optimizer updates, on this rank.

    ``name`` is the same in every life of the job.  ``inner.state[parameter]`` is where the
    inner optimizer keeps its moments, ``group`` its settings for it.  ``replicas`` is the
    process group whose ranks all hold the same, None if this rank's part is its own.
    """

    name: str
    inner: Any
    group: dict[str, Any]
    parameter: torch.Tensor
    replicas: Any = None

    @property
    def tensor(self) -> torch.Tensor:
        """The master in the memory that it has now: DeepSpeed's offload_states gives it other."""
        return self.parameter.detach()


class Weight(NamedTuple):
    """Weights of this rank that are ``master`` rounded, after each step that was not skipped."""

    name: str
    tensor: torch.Tensor
    master: torch.Tensor
    replicas: Any = None


class OptimizerView(Protocol):
    """An engine's optimizer.  Asked when training begins and after a restore, not in between."""

    def inner(self) -> Sequence[Any]:
        """The optimizers of torch's kind that update masters: to be fenced."""

    def masters(self) -> Sequence[Master]:
        """All tensors that those update, in an order that is the same in every life."""

    def weights(self) -> Sequence[Weight]:
        """The weights that follow from masters of this rank; none where these are the weights."""

    def owned(self) -> Iterable[torch.Tensor]:
        """The model's parameters that follow from masters, whichever rank has these."""

    def publish(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Make the model's weights equal to the masters: collective over the ranks that share.

        A weight whose name is in ``kept`` becomes that instead.
        """

    def scalars(self) -> dict[str, Any]:
        """Loss scaler and other plain values that decide how training goes on."""

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Set what ``scalars`` gave."""


def round_masters(weights: Iterable[Weight], kept: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's weights to their masters, or to what is ``kept`` of that name."""
    with torch.no_grad():
        for weight in weights:
            weight.tensor.copy_(kept.get(weight.name, weight.master))
