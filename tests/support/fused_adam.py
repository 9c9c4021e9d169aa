"""Optimizers that keep their state as Apex's and Transformer Engine's FusedAdam do.

Written from what these two keep, in plain torch, because neither installs without CUDA:
``step`` stands in the parameter group and appears with the first step (as a tensor if
``capturable``), and only moments are kept for each parameter.  Transformer Engine's can
also keep moments in other dtypes with their scales outside the state, and masters of
bf16 parameters, whole or as the 16 bits that the parameter lacks.
"""

from __future__ import annotations

from typing import Any

import torch


def _split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 tensor as bf16, rounded, and the signed 16 bits that give it back."""
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)
    high = ((bits - low.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), low


def _join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


class FusedAdam(torch.optim.Optimizer):
    """Apex's layout by default; see the module for what the options add."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and master_weight_dtype == torch.float32
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.capturable, self.master_weights = capturable, master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """What the first step would create; Megatron calls it before it loads."""
        state = self.state[parameter]
        for name, dtype in self.dtypes.items():
            state[name] = torch.zeros(parameter.shape, dtype=dtype)
            if dtype != torch.float32:
                self._scales.setdefault(parameter, {})[name] = torch.ones(1)
        if self._has_remainder(parameter):
            state["master_param"] = torch.zeros(parameter.shape, dtype=torch.int16)
        elif self.master_weights:
            state["master_param"] = parameter.detach().clone().float()

    def _read(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        value = self.state[parameter][name].float()
        return value * self._scales.get(parameter, {}).get(name, 1.0)

    def _write(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        scale = self._scales.get(parameter, {}).get(name)
        if scale is not None:  # the largest value becomes a fixed one, as with fp8
            scale.copy_((value.abs().max() / 256.0).clamp(min=1e-30))
            value = value / scale
        self.state[parameter][name].copy_(value)

    def _advance(self, group: dict[str, Any]) -> float:
        if "step" in group:
            group["step"] += 1
        else:
            group["step"] = torch.tensor(1, dtype=torch.int) if self.capturable else 1
        return float(group["step"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """AdamW; ``closure`` is not used."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            step = self._advance(group)
            for parameter in group["params"]:
                self._step_one(group, parameter, step)

    def _step_one(self, group: dict[str, Any], parameter: torch.Tensor, step: float) -> None:
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        gradient = getattr(parameter, name, None)
        if gradient is None:
            return
        if not self.state[parameter]:
            self.initialize_state(parameter)
        one, two = group["betas"]
        average = self._read(parameter, "exp_avg").lerp(gradient.float(), 1 - one)
        square = self._read(parameter, "exp_avg_sq").lerp(gradient.float() ** 2, 1 - two)
        self._write(parameter, "exp_avg", average)
        self._write(parameter, "exp_avg_sq", square)
        master = self._master(parameter)
        master.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (square / (1 - two**step)).sqrt().add_(group["eps"])
        master.addcdiv_(average / (1 - one**step), denominator, value=-group["lr"])
        self._store(parameter, master)

    def _has_remainder(self, parameter: torch.Tensor) -> bool:
        whole = parameter.dtype != torch.bfloat16
        return self.master_weights and self.store_param_remainders and not whole

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        if not self.master_weights:
            return parameter
        kept = self.state[parameter]["master_param"]
        return _join(parameter, kept) if self._has_remainder(parameter) else kept

    def _store(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        if self._has_remainder(parameter):
            high, low = _split(master)
            parameter.copy_(high)
            self.state[parameter]["master_param"].copy_(low)
        elif self.master_weights:
            parameter.copy_(master)
