"""DeepSpeed, with the plain script in examples/ and a JSON that the demo writes."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ft.cli.demo import deepspeed_script, stdlib_corpus
from megatron_ft.cli.demo.frameworks import CORPUS_BYTES, MICRO_BATCH
from megatron_ft.config.json_section import SECTION
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError

if TYPE_CHECKING:
    from megatron_ft.cli.demo.settings import DemoSettings, Folders

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
