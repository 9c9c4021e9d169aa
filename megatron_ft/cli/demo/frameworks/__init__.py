"""What can train in the demo: one small description for each framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

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
