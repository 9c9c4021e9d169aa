"""Models of the DeepSpeed tests: functions that give the keywords of deepspeed.initialize."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class Small(nn.Module):
    """Everything that a state may forget: tied weights, frozen ones, buffers, dropout.

    The ``mean`` of activations is changed by forward and used by it; ``seen``, the number of
    forward passes, is in no state dict.  In those of ``explodes`` gradients become infinite, in
    those of ``bypasses`` a part of the weights is not used.  The mean is each rank's own, or
    without ``averages`` always 0.
    """

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(
        self,
        explodes: Collection[int] = (),
        bypasses: Collection[int] = (),
        averages: bool = True,
    ) -> None:
        super().__init__()
        self.explodes, self.bypasses, self.averages = explodes, bypasses, averages
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.places.weight.requires_grad = False
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places.weight
        hidden = hidden + 0.1 * self.mean.to(hidden.dtype)
        if int(self.seen) + 1 not in self.bypasses:
            hidden = hidden + self.dropout(self.down(torch.relu(self.up(self.norm(hidden)))))
        with torch.no_grad():
            if self.averages:
                self.mean.mul_(0.9).add_(hidden.flatten(0, 1).mean(0), alpha=0.1)
            self.seen.add_(1)
        if int(self.seen) in self.explodes:
            hidden.register_hook(lambda gradient: gradient * float("inf"))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def small(options: dict[str, Any]) -> dict[str, Any]:
    """A model and two groups of its parameters, of which one does not decay."""
    model = Small(**options)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return {"model": model, "model_parameters": groups}


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """Keeps what DeepSpeed's class of this name keeps, ``step`` as an int; that one is compiled."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        spread = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + 1e-8
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * mean / spread)


def with_host_adam(options: dict[str, Any]) -> dict[str, Any]:
    """The small model with an optimizer of the script's own."""
    keywords = small(options)
    return {**keywords, "optimizer": DeepSpeedCPUAdam(keywords["model_parameters"])}


class Lion(torch.optim.Optimizer):
    """Keeps what the package lion-pytorch's class of this name keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, (first, second) = self.state[parameter], group["betas"]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                assert parameter.grad is not None
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean.lerp(parameter.grad, 1 - first).sign())
                mean.lerp_(parameter.grad, 1 - second)


def with_lion(options: dict[str, Any]) -> dict[str, Any]:
    """The small model with an optimizer of one moment, and no count of steps."""
    keywords = small(options)
    return {**keywords, "optimizer": Lion(keywords["model_parameters"])}


def with_rmsprop(options: dict[str, Any]) -> dict[str, Any]:
    """The small model with torch's RMSprop, with all that it can keep."""
    keywords = small(options)
    made = torch.optim.RMSprop(keywords["model_parameters"], momentum=0.9, centered=True)
    return {**keywords, "optimizer": made}


def with_adagrad(options: dict[str, Any]) -> dict[str, Any]:
    """The small model with torch's Adagrad, which DeepSpeed makes anew with one group."""
    keywords = small(options)
    trained = [p for group in keywords["model_parameters"] for p in group["params"]]
    made = torch.optim.Adagrad(trained, initial_accumulator_value=0.1)
    return {**keywords, "model_parameters": trained, "optimizer": made}


class Adam8bit(torch.optim.Optimizer):
    """Of a package that keeps bytes and their scales."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("trained with an optimizer that is to be refused")


def with_8_bits(options: dict[str, Any]) -> dict[str, Any]:
    """The small model with an optimizer that snapshots do not know."""
    keywords = small(options)
    return {**keywords, "optimizer": Adam8bit(keywords["model_parameters"], {"lr": 1e-3})}


def batch(step: int, micro_step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one micro-batch: the same in every incarnation, another on every
    rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + rank)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
