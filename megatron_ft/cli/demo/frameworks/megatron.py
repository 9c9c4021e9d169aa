"""Megatron-LM's loop, on the megatron-core package or with a checkout's own script."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from megatron_ft.cli.demo import stdlib_corpus, stock_script
from megatron_ft.cli.demo.frameworks import CORPUS_BYTES, MICRO_BATCH
from megatron_ft.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ft.cli.demo.settings import DemoSettings, Folders

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
