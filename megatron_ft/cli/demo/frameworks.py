"""Frameworks of the demo: Megatron-LM's loop, a checkout's own script, and DeepSpeed."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from megatron_ft.cli.demo import stdlib_corpus, traced_script
from megatron_ft.cli.demo.demo_model import ENVIRONMENT, demo_arguments
from megatron_ft.cli.demo.settings import DemoFolders, DemoSettings, Framework
from megatron_ft.config.json_section import SECTION
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError

MICRO_BATCH = 2
CORPUS_BYTES = 1 << 20
# Host memory everywhere, so that the same bits come out with and without a GPU.
_ON_HOST = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}


def from_arguments(arguments: argparse.Namespace) -> Framework:
    """The framework that the flags name; ConfigError for flags of another one."""
    name, path = arguments.framework, arguments.megatron_lm_path
    if path is not None and name != MegatronLM.name:
        raise ConfigError(f"--megatron-lm-path needs --framework {MegatronLM.name}")
    if arguments.zero is not None and name != DeepSpeed.name:
        raise ConfigError(f"--zero needs --framework {DeepSpeed.name}")
    if name == MegatronLM.name:
        checkout = traced_script.find_checkout(path)
        return MegatronLM(tp=arguments.tp, pp=arguments.pp, checkout=checkout)
    if name == MegatronCore.name:
        return MegatronCore(tp=arguments.tp, pp=arguments.pp)
    if arguments.tp != 1:
        raise ConfigError(f"--tp {arguments.tp}: the DeepSpeed script has no tensor parallelism")
    usual = 3 if arguments.pp == 1 else 1
    return DeepSpeed(zero=usual if arguments.zero is None else arguments.zero, pp=arguments.pp)


@dataclass(frozen=True, kw_only=True)
class MegatronCore(Framework):
    """A program of this package on the installed megatron-core."""

    name: ClassVar[str] = "megatron-core"
    samples: ClassVar[str] = "sample indices"
    package: ClassVar[str] = "megatron-core"
    heads: ClassVar[int] = 4
    tp: int = 1

    def __post_init__(self) -> None:
        for flag in ("tp", "pp"):
            if getattr(self, flag) < 1:
                raise ConfigError(f"--{flag} is {getattr(self, flag)}; give a number >= 1")
        if self.heads % self.tp:
            raise ConfigError(
                f"--tp {self.tp}: the demo's model has {self.heads} heads; give 1, 2 or 4"
            )

    @property
    def title(self) -> str:
        """See Framework."""
        return "Megatron-LM's loop"

    @property
    def shape(self) -> str:
        """See Framework."""
        return f"tp {self.tp}, pp {self.pp}"

    @property
    def model_parallel(self) -> int:
        """See Framework."""
        return self.tp * self.pp

    def prepare(self, settings: DemoSettings, folders: DemoFolders) -> Path:
        """Build the corpus; see Framework."""
        return stdlib_corpus.prepare(folders.corpus, CORPUS_BYTES)

    def command(
        self, settings: DemoSettings, folders: DemoFolders, text: Path, trace: Path, snapshots: bool
    ) -> list[str]:
        """See Framework."""
        flags = demo_arguments(
            tp=self.tp,
            pp=self.pp,
            iterations=settings.iterations,
            data_path=text,
            layers=2 * self.pp,
            micro_batch=MICRO_BATCH,
            # In a pipeline two micro-batches for each data-parallel rank, so that stages overlap.
            global_batch=MICRO_BATCH * settings.data_parallel * (1 if self.pp == 1 else 2),
            cache_path=folders.corpus / "indices",
        )
        switch = ["--inmem-snapshot", "--inmem-snapshot-interval", str(settings.snapshot_interval)]
        return [*self._program(flags, trace), *(switch if snapshots else [])]

    def environment(self, trace: Path) -> dict[str, str]:
        """See Framework."""
        return {**ENVIRONMENT, **_ON_HOST}

    def _program(self, flags: list[str], trace: Path) -> list[str]:
        return ["-m", "megatron_ft.cli.demo.pretrain_gpt", *flags, "--trace-dir", str(trace)]


@dataclass(frozen=True, kw_only=True)
class MegatronLM(MegatronCore):
    """The stock ``pretrain_gpt.py`` of ``checkout``, traced from outside."""

    name: ClassVar[str] = "megatron-lm"
    checkout: Path

    @property
    def title(self) -> str:
        """See Framework."""
        return str(self.checkout / traced_script.SCRIPT)

    def versions(self) -> dict[str, str]:
        """See Framework."""
        return {"Megatron-LM": traced_script.release_of(self.checkout)}

    def environment(self, trace: Path) -> dict[str, str]:
        """See Framework."""
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return traced_script.environment(trace, {**super().environment(trace), **path})

    def _program(self, flags: list[str], trace: Path) -> list[str]:
        return [self.title, *flags]


SCRIPT = Path(__file__).parents[3] / "examples" / "deepspeed_gpt.py"


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(Framework):
    """examples/deepspeed_gpt.py with ZeRO stage ``zero`` and ``pp`` pipeline stages."""

    name: ClassVar[str] = "deepspeed"
    samples: ClassVar[str] = "samples"
    package: ClassVar[str] = "deepspeed"
    zero: int = 3

    def __post_init__(self) -> None:
        if self.pp < 1:
            raise ConfigError(f"--pp is {self.pp}; give a number >= 1")
        allowed = (0, 1, 2, 3) if self.pp == 1 else (0, 1)
        if self.zero not in allowed:
            known = ", ".join(map(str, allowed))
            raise ConfigError(f"--zero {self.zero} with --pp {self.pp}: give one of {known}")

    @property
    def title(self) -> str:
        """See Framework."""
        return f"DeepSpeed and {SCRIPT.parent.name}/{SCRIPT.name}"

    @property
    def shape(self) -> str:
        """See Framework."""
        return f"ZeRO {self.zero}, pp {self.pp}"

    @property
    def model_parallel(self) -> int:
        """See Framework."""
        return self.pp

    def prepare(self, settings: DemoSettings, folders: DemoFolders) -> Path:
        """Write the text and both runs' JSON; see Framework."""
        if find_spec("deepspeed") is None:
            raise MissingEnvironmentError(
                "--framework deepspeed needs deepspeed: scripts/quickstart.sh installs it"
            )
        if not SCRIPT.is_file():
            raise MissingEnvironmentError(
                f"--framework deepspeed trains {SCRIPT}, which a checkout has and an installed "
                "package has not; run it in a checkout"
            )
        folders.corpus.mkdir(parents=True, exist_ok=True)
        for snapshots in (True, False):
            text = json.dumps(self.json_config(settings, snapshots=snapshots), indent=2)
            _json_path(folders, snapshots).write_text(text + "\n")
        path = folders.corpus / "text"
        path.write_bytes(b"\0".join(stdlib_corpus.documents(CORPUS_BYTES)))
        return path

    def json_config(self, settings: DemoSettings, *, snapshots: bool) -> dict[str, Any]:
        """DeepSpeed's configuration, with our section or without."""
        switches = {"enabled": True, "follows_engine": True}
        ours = {SECTION: {**switches, "snapshot_interval": settings.snapshot_interval}}
        iterations = settings.iterations
        return {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            # In a pipeline two micro-batches, so that stages overlap.
            "gradient_accumulation_steps": 1 if self.pp == 1 else 2,
            "gradient_clipping": 1.0,
            "steps_per_print": 1000,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": iterations, "warmup_num_steps": iterations // 10},
            },
            # Small, so that ZeRO 3 keeps only biases and norms whole, as with a large model.
            "zero_optimization": {"stage": self.zero, "stage3_param_persistence_threshold": 1000},
            **(ours if snapshots else {}),
        }

    def command(
        self, settings: DemoSettings, folders: DemoFolders, text: Path, trace: Path, snapshots: bool
    ) -> list[str]:
        """See Framework."""
        flags: dict[str, object] = {
            "--steps": settings.iterations,
            "--text": text,
            "--layers": 2 * self.pp,
            "--checkpoints": folders.root / "checkpoints",
            "--deepspeed_config": _json_path(folders, snapshots),
        }
        if self.pp > 1:
            flags["--pipeline"] = self.pp
        return [str(SCRIPT), *(str(word) for pair in flags.items() for word in pair)]

    def environment(self, trace: Path) -> dict[str, str]:
        """See Framework."""
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return traced_script.environment(trace, {**_ON_HOST, **path}, deepspeed=True)


def _json_path(folders: DemoFolders, snapshots: bool) -> Path:
    return folders.root / ("deepspeed.json" if snapshots else "deepspeed-uninterrupted.json")
