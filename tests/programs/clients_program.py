"""What a rank of the tests of foreign clients runs: the real libraries, models without files.

The SMP is the test's; everything else goes the way of a user's script.  A rank writes its losses
and where it began to ``seen<rank>.json`` in the folder that its argument names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_ft.cli.demo import final_state
from tests.programs import deepspeed_program
from tests.support.accelerate_cpu import join_on_cpu, shard_on_cpu
from tests.support.deepspeed_final import collect
from tests.support.late_capture import LOAD_FROM, ArenaManager

VOCABULARY, LENGTH, SAMPLES, BATCH = 16, 8, 40, 2
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
ENVIRONMENT = {
    **deepspeed_program.ENVIRONMENT,
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def preload() -> None:
    """Import the clients once, in the process that ranks are forked from."""
    deepspeed_program.preload()
    import accelerate.data_loader
    import accelerate.utils.deepspeed  # noqa: F401
    import lightning.pytorch  # noqa: F401
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

    join_on_cpu()


def main() -> None:
    """Run the client that ``sys.argv`` names, with what the test tells it."""
    from deepspeed_ext import attachment

    attachment.make_manager = deepspeed_program.make_manager
    attachment.manager_at = deepspeed_program.manager_at  # type: ignore[assignment]
    told, folder = json.loads(sys.argv[2]), Path(sys.argv[3])
    seen = globals()[sys.argv[1]](told, folder)
    (folder / f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))


def config(told: dict[str, Any], **more: Any) -> dict[str, Any]:
    """DeepSpeed's configuration; what the test tells may add to our section."""
    section = {"enabled": True, "snapshot_interval": 1, "protect": "none"}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": "auto",
        "steps_per_print": 1000,
        "zero_optimization": {"stage": told.get("stage", 1)},
        **told.get("json", {"optimizer": OPTIMIZER}),
        "inmem_snapshot": {**section, **told.get("section", {})},
        **more,
    }


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, **sizes))


def samples() -> list[dict[str, Any]]:
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    return [{"input_ids": row, "labels": row} for row in tokens]


class Unsized(torch.utils.data.IterableDataset[Any]):
    """The samples, as a stream whose length nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


class Counted(list[Any]):
    """Samples that count how often they are read in this process.

    Not in an attribute of the instance: a restart continues such counters of a data set.
    """

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.reads += 1
        return super().__getitem__(index)


class Drawing:
    """A collator that draws from the process's generator, as one that masks at random."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        return {**batch, "labels": batch["labels"].roll(int(torch.randint(3, ())), 1)}


def trainer(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """transformers.Trainer with DeepSpeed, as ``told``; it resumes by the newest checkpoint."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    seen: dict[str, Any] = {"losses": {}, "samples": {}}

    class Notes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen["begins_at"] = state.global_step

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen["losses"][state.global_step] = [logs["loss"].hex(), logs["learning_rate"]]

    def note(model: Any, args: Any, kwargs: Any) -> None:
        if model.training:
            step = seen["samples"].setdefault(one.state.global_step + 1, [])
            step.append(kwargs["input_ids"].tolist())

    output = told["output"]
    options = {
        "max_steps": told["steps"],
        "save_steps": told["save_steps"],
        "logging_steps": 1,
        "per_device_train_batch_size": BATCH,
        "eval_on_start": "eval_strategy" in told.get("arguments", {}),
        **told.get("arguments", {}),
    }
    arguments = TrainingArguments(
        output_dir=output,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        deepspeed=config(told),
        **options,
    )
    callbacks = [Notes(), *([EarlyStoppingCallback(3)] if "early" in told else [])]
    one = Trainer(
        gpt2(),
        arguments,
        train_dataset=Unsized() if told.get("unsized") else samples()[: told.get("samples")],
        eval_dataset=samples()[:4],
        data_collator=Drawing() if told.get("draws") else None,
        callbacks=callbacks,
    )
    one.model.register_forward_pre_hook(note, with_kwargs=True)
    wanted = told.get("resume", get_last_checkpoint(output) if os.path.isdir(output) else None)
    result = one.train(resume_from_checkpoint=wanted)
    seen["engine"] = one.deepspeed.global_steps
    timed = ("runtime", "per_second")
    logs = [{k: v for k, v in e.items() if not k.endswith(timed)} for e in one.state.log_history]
    # How fast it was is of no interest.
    seen |= {"logs": logs, "loss": result.training_loss.hex(), "flos": one.state.total_flos}
    final_state.write(folder / f"final{os.environ['RANK']}.pt", collect(one.deepspeed))
    one.deepspeed.destroy()
    return seen


def accelerator(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """accelerate.Accelerator with a DeepSpeedPlugin, and a loop that counts its steps itself."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    plugin = DeepSpeedPlugin(hf_ds_config=config(told))
    one = Accelerator(deepspeed_plugin=plugin)
    loader: Any = torch.utils.data.DataLoader(samples(), BATCH, shuffle=True)  # type: ignore[arg-type]
    model = gpt2()
    model, optimizer, loader = one.prepare(model, DummyOptim(model.parameters()), loader)
    seen: dict[str, Any] = {"losses": {}}
    step = 0
    if told.get("load"):
        one.load_state(told["load"])
        step = int(told["load"].rpartition("step")[2])
    seen["begins_at"], seen["engine"] = step, model.global_steps
    for batch in one.skip_first_batches(loader, step):
        loss = model(**batch).loss
        one.backward(loss)
        optimizer.step()
        step += 1
        seen["losses"][step] = loss.item().hex()
        if step in told.get("saves", ()):
            one.save_state(str(folder.parent / f"step{step}"))
        if step == told["steps"]:
            break
    model.destroy()
    return seen


class Tally:
    """A user's own object, registered with the Accelerator."""

    def __init__(self) -> None:
        self.tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]


def _accelerator(told: dict[str, Any]) -> Any:
    """An Accelerator with the plugin of ``told["plugin"]``; with none it is DDP."""
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        ProjectConfiguration,
    )

    plugins: dict[str, Any] = {"cpu": True}
    if told["plugin"] == "deepspeed":
        plugins = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config({**told, "json": {}}))}
    elif told["plugin"] == "fsdp2":
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    loaders = {"use_seedable_sampler": told.get("seeds", False)}
    one = Accelerator(
        **plugins,
        gradient_accumulation_steps=told.get("accumulate", 1),
        dataloader_config=DataLoaderConfiguration(**loaders, **told.get("loaders", {})),
        project_config=ProjectConfiguration(
            told.get("project"), automatic_checkpoint_naming="project" in told
        ),
    )
    if told["plugin"] == "fsdp2":
        shard_on_cpu(one, plugins["fsdp_plugin"])
    return one


def accelerator_in_memory(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """accelerate.Accelerator with our object: its own optimizer and schedule, several passes."""
    from deepspeed_ext import InMemoryState

    each, one = told.get("accumulate", 1), _accelerator(told)
    tally, net = Tally(), gpt2()
    data: Any = Unsized() if told.get("unsized") else Counted(samples())
    collate = Drawing() if told.get("draws") else None
    shuffle = not told.get("unsized")
    loader: Any = torch.utils.data.DataLoader(data, BATCH, shuffle=shuffle, collate_fn=collate)
    optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 10))
    model, optimizer, loader, schedule = one.prepare(net, optimizer, loader, schedule)
    one.register_for_checkpointing(tally)
    by_engine = told["plugin"] == "deepspeed"
    torch.manual_seed(50 + one.process_index)
    memory = InMemoryState(one) if by_engine else InMemoryState(one, manager=_snapshots(model))
    step = memory.resume(told.get("load"))
    seen: dict[str, Any] = {"begins_at": step, "losses": {}, "samples": {}}
    for epoch in range(step * each * BATCH * one.num_processes // SAMPLES, 99):
        if told.get("numbered"):
            loader.set_epoch(epoch)
        for batch in loader:
            seen["samples"].setdefault(step + 1, []).append(batch["input_ids"].tolist())
            with one.accumulate(model):
                loss = model(**batch).loss
                one.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            tally.tokens += batch["input_ids"].numel()
            step += one.sync_gradients
            memory.save()
            if one.sync_gradients:
                seen["losses"][step] = [loss.item().hex(), *schedule.get_last_lr(), tally.tokens]
                if step in told.get("saves", ()):
                    one.save_state()
            if step == told["steps"]:
                final = collect(model) if by_engine else _all_of(one)
                final_state.write(folder / f"final{os.environ['RANK']}.pt", final)
                memory.close(finished=True)
                if by_engine:
                    model.destroy()
                return {**seen, "reads": Counted.reads}
    raise AssertionError("too few passes")


def _all_of(one: Any) -> dict[str, Any]:
    """The Accelerator's state at the end, without the help of what is tested."""
    inner = [*one._models, *one._optimizers, *one._schedulers, *one._custom_objects[:1]]
    states = [each.state_dict() for each in inner]
    for tensors in (states[0], *states[1]["state"].values()):
        tensors |= {name: getattr(value, "_local_tensor", value) for name, value in tensors.items()}
    rest = {"random": final_state.random_states(None, None), "step": one.step}
    return {"states": final_state.plain(states), **rest}


class Net(torch.nn.Module):
    """For the plain interface: dropout draws from the process's generator."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens).square().mean()


def _snapshots(weights: torch.nn.Module) -> ArenaManager:
    from megatron_ft.config import SnapshotConfig

    rank = int(os.environ["RANK"])
    place = {
        "shard_id": f"pp0-tp0-dp{rank}-ep0",
        "rank": rank,
        "coordinates": (0, 0, 0),
    }
    return ArenaManager(SnapshotConfig(protect="none"), place, lambda _: weights.parameters())


def plain_accelerator(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Accelerate without DeepSpeed, and our plain interface."""
    from accelerate import Accelerator

    from megatron_ft.trainer.state import RngState

    one = Accelerator(cpu=True)
    net = Net()
    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    model, optimizer, loader = one.prepare(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        torch.utils.data.DataLoader(tokens, BATCH, shuffle=True),  # type: ignore[arg-type]
    )
    state = {"model": model, "optimizer": optimizer.optimizer, "rng": RngState()}
    torch.manual_seed(50 + 100 * (LOAD_FROM in os.environ) + one.process_index)
    snapshots = _snapshots(net)
    step = snapshots.load(into=state)
    snapshots.register_fence(optimizer.optimizer)
    seen: dict[str, Any] = {"begins_at": step, "losses": {}}
    batches = iter(one.skip_first_batches(loader, step))
    while step < told["steps"]:
        step += 1
        seen["losses"][step] = _train_one(one, model, optimizer, batches)
        snapshots.save(step, state)
    snapshots.close(finished=True)
    return seen


def _train_one(one: Any, model: Any, optimizer: Any, batches: Iterator[Any]) -> str:
    optimizer.zero_grad()
    loss = model(next(batches))
    one.backward(loss)
    optimizer.step()
    return str(loss.item().hex())


def plain_lightning(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Lightning on two ranks, with a callback of the user's own on our plain interface."""
    import lightning.pytorch as lightning

    from megatron_ft.trainer.state import RngState

    seen: dict[str, Any] = {"losses": {}}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Snapshots(lightning.Callback):
        def on_train_start(self, one: Any, module: Any) -> None:
            optimizer = one.optimizers[0]
            self.state = {"model": module, "optimizer": optimizer, "rng": RngState()}
            self.manager = _snapshots(module)
            self.first = seen["begins_at"] = self.manager.load(into=self.state)
            self.manager.register_fence(optimizer)

        def on_train_batch_end(
            self, one: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            step = self.first + one.global_step
            seen["losses"][step] = outputs["loss"].item().hex()
            self.manager.save(step, self.state)

        def on_train_end(self, one: Any, module: Any) -> None:
            self.manager.close(finished=True)

    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    one = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=told["steps"],
        callbacks=[Snapshots()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    loader: Any = torch.utils.data.DataLoader(tokens, BATCH, shuffle=True)  # type: ignore[arg-type]
    one.fit(Module(), loader)
    return seen
