"""Megatron-LM's loop, on the megatron-core package or with a checkout's own script.

What can train in the demo: one small description for each framework.

DeepSpeed, with the plain script in examples/ and a JSON that the demo writes.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_ft.cli.demo import deepspeed_script, stdlib_corpus, stock_script
from megatron_ft.config.json_section import SECTION
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError

if TYPE_CHECKING:
    from megatron_ft.cli.demo.settings import DemoSettings, Folders


MICRO_BATCH = 2
CORPUS_BYTES = 1 << 20


class Framework(Protocol):
    """A training program and how the demo runs it.

    A description is a frozen dataclass, whose fields are the user's choices.  It raises
    ConfigError or MissingEnvironmentError when it is made with what cannot be run.
    """

    name: ClassVar[str]
    """The word after ``--framework``."""

    samples: ClassVar[str]
    """What the numbers are by which a trace names samples, in the plural."""

    @property
    def title(self) -> str:
        """What trains, for people: ``Megatron-LM's loop``."""

    @property
    def shape(self) -> str:
        """How the model is laid out, for people: ``tp 2, pp 1``."""

    @property
    def model_parallel(self) -> int:
        """How many ranks hold one copy of the model; the job's number of ranks is a multiple."""

    def choices(self) -> dict[str, int | str]:
        """The user's choices by name, as plain values."""

    def versions(self) -> dict[str, str]:
        """Its packages and their versions."""

    def prepare(self, settings: DemoSettings, folders: Folders) -> Path:
        """Write the training text and whatever else both runs read; the path of the text."""

    def command(
        self, settings: DemoSettings, folders: Folders, text: Path, trace: Path, *, snapshots: bool
    ) -> tuple[str, ...]:
        """What each rank runs, with or without snapshots; reads and writes nothing."""

    def environment(self, trace: Path) -> dict[str, str]:
        """Variables for every rank, by which it also writes ``trace`` if not by its command."""


SCRIPT = Path(__file__).parents[4] / "examples" / "deepspeed_gpt.py"
STAGES = (0, 1, 2, 3)
PIPELINE_STAGES = (0, 1)
"""ZeRO stages that DeepSpeed combines with a pipeline."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeed:
    """examples/deepspeed_gpt.py with ZeRO stage ``zero`` and ``pp`` pipeline stages."""

    name: ClassVar[str] = "deepspeed"
    samples: ClassVar[str] = "samples"
    zero: int = 3
    pp: int = 1

    def __post_init__(self) -> None:
        if self.pp < 1:
            raise ConfigError(f"--pp is {self.pp}; give a number >= 1")
        allowed = STAGES if self.pp == 1 else PIPELINE_STAGES
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

    def choices(self) -> dict[str, int | str]:
        """See Framework."""
        return {"zero": self.zero, "pp": self.pp}

    def versions(self) -> dict[str, str]:
        """See Framework."""
        with suppress(metadata.PackageNotFoundError):
            return {"deepspeed": metadata.version("deepspeed")}
        return {}

    def prepare(self, settings: DemoSettings, folders: Folders) -> Path:
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
        """What DeepSpeed is given, with our section or without."""
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
        self, settings: DemoSettings, folders: Folders, text: Path, trace: Path, *, snapshots: bool
    ) -> tuple[str, ...]:
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
        words = [str(word) for pair in flags.items() for word in pair]
        return (sys.executable, str(SCRIPT), *words)

    def environment(self, trace: Path) -> dict[str, str]:
        """See Framework."""
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        # Host memory everywhere, so that the same bits come out with and without a GPU.
        host = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        return deepspeed_script.environment(trace, {**host, **path})


def _json_path(folders: Folders, snapshots: bool) -> Path:
    return folders.root / ("deepspeed.json" if snapshots else "deepspeed-uninterrupted.json")


_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class MegatronCore:
    """A program of this package on the installed megatron-core."""

    name: ClassVar[str] = "megatron-core"
    samples: ClassVar[str] = "sample indices"
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for flag in ("tp", "pp"):
            if getattr(self, flag) < 1:
                raise ConfigError(f"--{flag} is {getattr(self, flag)}; give a number >= 1")
        if _HEADS % self.tp:
            raise ConfigError(
                f"--tp {self.tp}: the demo's model has {_HEADS} heads; give 1, 2 or 4"
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

    def choices(self) -> dict[str, int | str]:
        """See Framework."""
        return {"tp": self.tp, "pp": self.pp}

    def versions(self) -> dict[str, str]:
        """See Framework."""
        with suppress(metadata.PackageNotFoundError):
            return {"megatron-core": metadata.version("megatron-core")}
        return {}

    def prepare(self, settings: DemoSettings, folders: Folders) -> Path:
        """Build the corpus; see Framework."""
        return stdlib_corpus.prepare(folders.corpus, CORPUS_BYTES)

    def command(
        self, settings: DemoSettings, folders: Folders, text: Path, trace: Path, *, snapshots: bool
    ) -> tuple[str, ...]:
        """See Framework."""
        switch = ("--inmem-snapshot", "--inmem-snapshot-interval", str(settings.snapshot_interval))
        flags = self._flags(settings, folders, text)
        return (sys.executable, *self._program(flags, trace), *(switch if snapshots else ()))

    def environment(self, trace: Path) -> dict[str, str]:
        """See Framework."""
        from megatron_ft.cli.demo.demo_model import ENVIRONMENT

        # Host memory everywhere, so that the same bits come out with and without a GPU.
        return {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}

    def _program(self, flags: list[str], trace: Path) -> list[str]:
        return ["-m", "megatron_ft.cli.demo.pretrain_gpt", *flags, "--trace-dir", str(trace)]

    def _flags(self, settings: DemoSettings, folders: Folders, text: Path) -> list[str]:
        from megatron_ft.cli.demo.demo_model import demo_arguments

        return demo_arguments(
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


@dataclass(frozen=True, kw_only=True)
class MegatronLM(MegatronCore):
    """The stock ``pretrain_gpt.py`` of ``checkout``, traced from outside."""

    name: ClassVar[str] = "megatron-lm"
    checkout: Path

    @property
    def title(self) -> str:
        """See Framework."""
        return str(self.checkout / stock_script.SCRIPT)

    def choices(self) -> dict[str, int | str]:
        """See Framework."""
        return {**super().choices(), "checkout": str(self.checkout)}

    def versions(self) -> dict[str, str]:
        """See Framework."""
        return {"Megatron-LM": stock_script.release_of(self.checkout)}

    def environment(self, trace: Path) -> dict[str, str]:
        """See Framework."""
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return stock_script.environment(trace, {**super().environment(trace), **path})

    def _program(self, flags: list[str], trace: Path) -> list[str]:
        return [str(self.checkout / stock_script.SCRIPT), *flags]
