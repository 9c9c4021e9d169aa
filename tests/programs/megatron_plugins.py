"""Changes to the training program of a test, called in each rank before it trains."""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support import fused_adam


def _after_building(change: Callable[[Any], None]) -> None:
    """Call ``change`` with each GPTModel once it is built."""
    from megatron.core.models.gpt import GPTModel

    build: Any = GPTModel.__init__

    @functools.wraps(build)
    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        change(self)

    GPTModel.__init__ = changed


def freeze_positions() -> None:
    """Position embeddings are not trained."""

    def freeze(model: Any) -> None:
        if hasattr(model, "embedding"):
            model.embedding.position_embeddings.weight.requires_grad_(False)

    _after_building(freeze)


class Drift(torch.nn.Module):
    """Keeps a number outside parameters and buffers that decides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state["calls"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * (1 + 0.01 * self.calls)


def extra_state() -> None:
    """A module of the model has state that only ``get_extra_state`` gives."""

    def add(model: Any) -> None:
        model.drift = Drift()
        model.decoder.register_forward_hook(lambda *call: model.drift(call[2]))

    _after_building(add)


def nothing_sharded() -> None:
    """A model that cannot say how it is sharded, as those of some forks."""
    from megatron.core.models.gpt import GPTModel

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this model is not sharded")

    GPTModel.sharded_state_dict = refuse


class Drawn:
    """A loader without end that draws samples; its position is its generator's state."""

    def __init__(self, rank: int) -> None:
        from megatron.training import get_args

        self._args = get_args()
        self._generator = torch.Generator().manual_seed(rank)

    def __next__(self) -> dict[str, torch.Tensor]:
        shape = (self._args.micro_batch_size, self._args.seq_length)
        tokens = torch.randint(0, 256, shape, generator=self._generator)
        return {
            "tokens": tokens,
            "labels": tokens,
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(shape[1]).expand(shape),
        }


class Savable(Drawn):
    """The same, with the two methods that Megatron's external loaders have."""

    def save_state(self) -> torch.Tensor:
        return self._generator.get_state()

    def restore_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)


def _bring_loader(kind: type[Drawn]) -> None:
    from megatron.core import mpu

    from megatron_ft.cli.demo import gpt_training

    def loaders(samples: list[int], vp_stage: int | None = None) -> Any:
        loader = kind(mpu.get_data_parallel_rank())
        return loader, loader, loader

    loaders.is_distributed = True  # type: ignore[attr-defined]
    gpt_training.datasets = loaders  # type: ignore[assignment]


def savable_loader() -> None:
    _bring_loader(Savable)


def opaque_loader() -> None:
    """An external loader that cannot."""
    _bring_loader(Drawn)


def perturb_weights() -> None:
    """Something changes weights after the optimizer has made its masters of them.

    Not in a restored run: its weights follow, and it has to take those of the snapshot.
    """
    if "TEST_LOAD_FROM" in os.environ:
        return
    from megatron.training import training

    build = training.setup_model_and_optimizer

    @functools.wraps(build)
    def perturbed(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        with torch.no_grad():
            for parameter in built[0][0].module.parameters():
                parameter.mul_(1.5)
        return built

    training.setup_model_and_optimizer = perturbed


def provided_model() -> None:
    """The program builds its model itself, as those for Megatron before 0.19 do.

    Only then Megatron orders its parameters by the ranks that update them, if these own whole ones.
    """
    from megatron_ft.cli.demo import pretrain_gpt
    from tests.programs import pretrain_gpt as older

    pretrain_gpt.pretrain = older.pretrain


def _use_adam(adam: Any) -> None:
    import megatron.core.optimizer as optimizers

    optimizers.Adam = adam
    optimizers.USING_PYTORCH_OPTIMIZER = False


def apex_adam() -> None:
    """Megatron's Adam keeps its state as Apex's does."""
    _use_adam(fused_adam.FusedAdam)


def installed_apex_adam() -> None:
    """The same, and Megatron's own checkpoints know of it."""
    from megatron.core.optimizer import distrib_optimizer

    apex_adam()
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def capturable_adam() -> None:
    """The same with ``step`` as a tensor."""
    _use_adam(type("FusedAdam", (_Capturable,), {}))


class _Capturable(fused_adam.FusedAdam):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **(options | {"capturable": True}))


class _Unknown(fused_adam.FusedAdam):
    def initialize_state(self, parameter: torch.Tensor) -> None:
        super().initialize_state(parameter)
        self.state[parameter]["curvature"] = torch.zeros_like(parameter)


def unknown_adam() -> None:
    """A FusedAdam that keeps something that nobody knows."""

    import megatron.core.optimizer as optimizers

    _use_adam(type("FusedAdam", (_Unknown,), {}))
    make = optimizers._get_megatron_optimizer_based_on_param_groups

    def initialised(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        for group in made.optimizer.param_groups:
            for parameter in group["params"]:
                made.optimizer.initialize_state(parameter)
        return made

    optimizers._get_megatron_optimizer_based_on_param_groups = initialised


def transformer_engine_adam() -> None:
    """Megatron finds a FusedAdam of Transformer Engine, which keeps masters and scales."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = types.ModuleType(name)
    module: Any = types.ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = fused_adam.FusedAdam
    sys.modules[module.__name__] = module
    _use_adam(fused_adam.FusedAdam)
    optimizers.is_te_min_version = optimizer_config.is_te_min_version = lambda *_: True


def quiet_data_loaders() -> None:
    """Data loaders leave the generator of dropout alone, as where that is a device's.

    Cyclic data is iterated over only when the first batch is read, in a restored run after
    the generators were set.
    """
    from tests.support import megatron_host

    megatron_host.keep_data_loader_off_the_generator()


def terminate_in_iteration_3() -> None:
    """The rank gets SIGTERM in the middle of its third iteration."""
    from megatron.training import get_args, training

    step: Any = training.train_step

    @functools.wraps(step)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if get_args().curr_iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **kwargs)

    training.train_step = interrupted


def count_calls() -> None:
    """Note each collective and each sharded state dict that is called for a snapshot."""
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
    from megatron.core.transformer.module import MegatronModule

    from megatron_ft.megatron.run import SnapshotRun

    counts: dict[str, Any] = {
        "iterations": 0,
        "snapshots": 0,
        "collectives outside": 0,
        "inside": [],
    }
    depth = [0]

    def watch(owner: Any, name: str, collective: bool) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                counts["inside"].append(name)
            elif collective:
                counts["collectives outside"] += 1
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    for name in COLLECTIVES:
        watch(torch.distributed, name, True)
    for owner in (MegatronModule, ChainedOptimizer, DistributedOptimizer):
        watch(owner, "sharded_state_dict", False)
    end, close = SnapshotRun.end_iteration, SnapshotRun.close

    def counted(self: Any, *args: Any) -> None:
        depth[0] += 1
        try:
            end(self, *args)
        finally:
            depth[0] -= 1
        counts["iterations"] += 1

    def closed(self: Any) -> None:
        manager = self._manager
        close(self)
        counts["snapshots"] = manager.stats.taken
        folder = Path(os.environ["TEST_SAVE_TO"]).parent
        (folder / f"calls{os.environ['RANK']}.json").write_text(json.dumps(counts))

    SnapshotRun.end_iteration, SnapshotRun.close = counted, closed  # type: ignore[method-assign, assignment]


COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single "
    "barrier broadcast broadcast_object_list gather gather_object recv reduce reduce_scatter "
    "reduce_scatter_tensor scatter send isend irecv batch_isend_irecv monitored_barrier"
).split()


def offloaded_optimizer() -> None:
    """Megatron moves the optimizer's state away and back before each step; others take its memory.

    Only what the moves do is played, as all memory is the host's here.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.training import training

    optimizer: Any = MegatronOptimizer
    offload, step = optimizer.offload_to_cpu, training.train_step

    @functools.wraps(offload)
    def taking_memory(self: Any) -> None:
        with _as_on_device():
            offload(self)

    @functools.wraps(step)
    def moving(*args: Any, **kwargs: Any) -> Any:
        moved = inspect.signature(step).bind(*args, **kwargs).arguments["optimizer"]
        moved.offload_to_cpu()
        moved.restore_from_cpu()
        return step(*args, **kwargs)

    optimizer.offload_to_cpu, training.train_step = taking_memory, moving


@contextmanager
def _as_on_device() -> Iterator[None]:
    """Every tensor takes itself for one of a device, whose memory is used anew once it is away."""
    tensor: Any = torch.Tensor
    before = tensor.cpu

    def cpu(self: torch.Tensor) -> torch.Tensor:
        moved = self.detach().clone()
        self.detach().fill_(float("nan"))
        return moved

    tensor.is_cuda, tensor.cpu = property(lambda self: True), cpu
    try:
        yield
    finally:
        del tensor.is_cuda
        tensor.cpu = before


def hide_tensors() -> None:
    """Before training begins: what is hidden from a snapshot is refused by its name."""
    from megatron_ft.core.errors import ConfigError
    from megatron_ft.megatron.run import SnapshotRun
    from megatron_ft.trainer.module_tree import load_trained

    begin: Any = SnapshotRun.begin_training

    def checked(self: Any, training: Any) -> None:
        begin(self, training)
        state, (chunk, *_) = self._state, training["model"]
        assert state.restart_losses().objects == [], state.restart_losses()
        weight = chunk.module.module.decoder.layers[0].mlp.linear_fc1.weight
        derived = [name for name in state.derived() if name.endswith("mlp.linear_fc1.weight")]
        assert len(derived) == 2, derived
        for name, hide in (("weight", _moved), ("hidden", _unnamed), ("average", _averaged)):
            back = hide(weight, chunk.module, state)
            try:
                state.refresh()
                state.require_covered()
            except ConfigError as error:
                assert name in str(error), error
            else:
                raise AssertionError(f"{name} is in no snapshot, and nobody says so")
            back()
            state.refresh()
            state.require_covered()
        flags = state.objects()["flags"]
        weight.requires_grad_(False)
        frozen = state.objects()["flags"]
        assert load_trained(state._tree.parameters.values(), flags)
        assert weight.requires_grad and frozen != flags

    SnapshotRun.begin_training = checked  # type: ignore[method-assign]


def _moved(weight: Any, model: Any, state: Any) -> Callable[[], None]:
    """A weight that lies in Megatron's flat buffer no more."""
    before = weight.data
    weight.data = before.clone()
    return lambda: setattr(weight, "data", before)


def _unnamed(weight: Any, model: Any, state: Any) -> Callable[[], None]:
    known = dict(model.named_buffers())
    model.register_buffer("hidden", torch.ones(3))
    vars(model)["named_buffers"] = lambda *_, **__: iter(known.items())

    def back() -> None:
        del vars(model)["named_buffers"], model.hidden

    return back


def _averaged(weight: Any, model: Any, state: Any) -> Callable[[], None]:
    """An average that the optimizer keeps under a key that is no parameter."""
    inner = state._masters[0].inner
    inner.state["average"] = {"weight": torch.ones(5)}
    return lambda: inner.state.pop("average")
