"""Models of the DeepSpeed tests that are spread over ranks: pipelines, tensors, experts."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn

from tests.programs.deepspeed_models import LENGTH, VOCABULARY, WIDTH
from tests.support.late_capture import LOAD_FROM


class Words(nn.Module):
    """Embedding on the first stage, logits on the last one: tied over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def logits(words: Words, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, words.weight)


class Block(nn.Module):
    """A layer with dropout, a frozen parameter, and a buffer that forward changes and uses.

    The buffer is each rank's own, unless the block does not do ``averages``.
    """

    mean: torch.Tensor
    averages = True

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner or feed_forward()
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + 0.1 * self.places + 0.1 * self.mean.to(hidden.dtype)
        hidden = hidden + self.dropout(self.inner(self.norm(hidden)))
        if self.averages:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.flatten(0, 1).mean(0), alpha=0.1)
        return hidden


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH))


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def pipeline(options: dict[str, Any]) -> dict[str, Any]:
    """``layers`` blocks over ``stages`` stages between tied embeddings."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    model = PipelineModule(
        [
            TiedLayerSpec("words", Words),
            *(LayerSpec(Block) for _ in range(options["layers"])),
            TiedLayerSpec("words", Words, forward_fn=logits),
        ],
        num_stages=options["stages"],
        loss_fn=loss,
        partition_method="uniform",
    )
    return {"model": model, "model_parameters": _trained(model)}


def _trained(model: nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


class Between(nn.Module):
    """Embedding, ``blocks``, tied logits and the loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.words = Words()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return loss(logits(self.words, hidden), targets) + self.extra_loss()

    def extra_loss(self) -> Any:
        """What experts add for their balance."""
        extras = [m.balance for m in self.modules() if isinstance(m, Experts)]
        return 0.01 * sum(extras)


class Experts(nn.Module):
    """DeepSpeed's own mixture of experts with gates that draw random numbers."""

    balance: Any = 0.0

    def __init__(self, experts: int, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            WIDTH, feed_forward(), num_experts=experts, ep_size=ranks, noisy_gate_policy="RSample"
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output, self.balance, _ = self.moe(hidden)
        return output


def experts(options: dict[str, Any]) -> dict[str, Any]:
    """A block for each entry of ``ranks``: experts over so many ranks.

    DeepSpeed makes the groups of experts in the order of a set of strings, which every
    process has in an order of its own.  Ranks of a test are forked, so have the same: the
    groups are turned round in an incarnation that restores.
    """
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = Between(*(Block(Experts(options["experts"], ranks)) for ranks in options["ranks"]))
    trained = _trained(model)
    groups = split(
        [
            {"name": "decaying", "params": [p for p in trained if p.dim() > 1]},
            {"name": "others", "params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]
    )
    dense = [group for group in groups if not group.get("moe")]
    sparse = sorted((g for g in groups if g.get("moe")), key=lambda group: str(group["name"]))
    if LOAD_FROM in os.environ:
        sparse = sparse[2:] + sparse[:2]
    return {"model": model, "model_parameters": dense + sparse}


class Grid:
    """An mpu: ``tensor`` neighbouring ranks share tensors, the others are data-parallel."""

    def __init__(self, tensor: int) -> None:
        world, self._rank = distributed.get_world_size(), distributed.get_rank()
        rows = [list(range(first, first + tensor)) for first in range(0, world, tensor)]
        columns = [list(range(column, world, tensor)) for column in range(tensor)]
        self._tensor, self._data = self._mine(rows), self._mine(columns)

    def _mine(self, groups: list[list[int]]) -> Any:
        made = [(ranks, distributed.new_group(ranks)) for ranks in groups]
        return next(group for ranks, group in made if self._rank in ranks)

    def get_model_parallel_rank(self) -> int:
        return distributed.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        return distributed.get_world_size(self._tensor)

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_data_parallel_rank(self) -> int:
        return distributed.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return distributed.get_world_size(self._data)

    def get_data_parallel_group(self) -> Any:
        return self._data


class _Sum(torch.autograd.Function):
    """The sum over the tensor-parallel ranks, of the output or, ``backward``, of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, grid: Grid, backwards: bool) -> torch.Tensor:
        ctx.grid, ctx.backwards = grid, backwards
        return value.view_as(value) if backwards else _sum(value, grid)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return _sum(gradient, ctx.grid) if ctx.backwards else gradient, None, None


def _sum(value: torch.Tensor, grid: Grid) -> torch.Tensor:
    total = value.clone()
    distributed.all_reduce(total, group=grid.get_model_parallel_group())
    return total


class Sharded(nn.Module):
    """A feed-forward layer of which each tensor-parallel rank has a part."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self._grid = grid
        part, parts = grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()
        up, down = torch.randn(3 * WIDTH, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
        self.up = nn.Parameter(0.1 * up.chunk(parts)[part].clone())
        self.down = nn.Parameter(0.1 * down.chunk(parts, dim=1)[part].clone())
        for parameter in self.parameters():
            parameter.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(nn.functional.linear(_Sum.apply(hidden, self._grid, True), self.up))
        return _Sum.apply(nn.functional.linear(hidden, self.down), self._grid, False)


def sharded(options: dict[str, Any]) -> dict[str, Any]:
    """Two blocks whose feed-forward layers are spread over ``tensor`` ranks."""
    grid = Grid(options["tensor"])
    model = Between(Block(Sharded(grid)), Block(Sharded(grid)))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ranks that share tensors must not drop different ones
        if isinstance(module, Block):
            module.averages = options.get("averages", True)
    return {"model": model, "model_parameters": _trained(model), "mpu": grid}
