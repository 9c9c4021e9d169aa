"""The demo's output while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from megatron_ft.cli.chaos.follow import RecordedEvent
from megatron_ft.cli.chaos.trace import TraceLine
from megatron_ft.cli.demo.faults import DemoStrike

PLAIN_WIDTH = 100
_EVERY = 5

# Events that a person wants to read, and how they are marked.  Commits are counted instead: one
# line each would bury the rest.
_STYLES = {
    "trainer_died": "red",
    "silent": "red",
    "node_lost": "red",
    "corrupt": "red",
    "log": "red",
    "smp_restarted": "yellow",
    "world_broken": "yellow",
    "rebuild_failed": "yellow",
    "backoff": "yellow",
    "waiting": "yellow",
    "spare": "cyan",
    "restoring": "bold green",
    "from_disk": "yellow",
    "from_scratch": "yellow",
    "finished": "green",
}


def make_console() -> Console:
    """A console for standard output; wide enough for the tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class Screen:
    """Lines of text with the seconds since the start, and one bar for the run under way."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start = time.monotonic()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._furthest = 0
        self._committed = -1
        self._incarnation = 0
        self._strike: DemoStrike | None = None

    def log(self, text: str, style: str = "") -> None:
        """One line; of a text with more lines, the first has the time."""
        stamp = f"[{time.monotonic() - self._start:6.1f} s] "
        self.console.print(Text(stamp, "dim") + Text(text, style), soft_wrap=True)

    def begin(self, title: str, iterations: int) -> None:
        """Begin to show a run of ``iterations``."""
        self.end()
        self._total, self._furthest, self._committed, self._incarnation = iterations, 0, -1, 0
        self.log(title, "bold")
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("iterations", total=iterations, detail="starting")
            self._progress.start()

    def end(self) -> None:
        """Remove the bar of the run, however it went."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, line: TraceLine) -> None:
        """Show an iteration that rank 0 has finished."""
        if self._strike is not None and line.incarnation > self._strike.incarnation:
            seconds = line.time - self._strike.wall
            self.log(
                f"training again: iteration {line.iteration} done {seconds:.1f} s after the fault"
            )
            self._strike = None
        loss = "" if line.loss_value is None else f"loss {line.loss_value:.3f}"
        again = line.iteration <= self._furthest
        self._furthest = max(self._furthest, line.iteration)
        self._show(line.iteration, loss, again)

    def _show(self, iteration: int, loss: str, again: bool) -> None:
        safe = "" if self._committed < 0 else f"snapshot {self._committed}"
        detail = "  ".join(word for word in (loss, safe, "again" if again else "") if word)
        if self._progress is not None:
            self._progress.update(self._task, completed=iteration, detail=detail)
        elif iteration % _EVERY == 0 or iteration == self._total:
            self.log(f"iteration {iteration:3}/{self._total}  {detail}".rstrip())

    def event(self, event: RecordedEvent) -> None:
        """Show an event of the supervisor."""
        kind = event["kind"]
        if kind == "committed":
            self._committed = event["iteration"]
        elif kind == "trainers_started" and self._progress is not None:
            self._progress.update(self._task, detail="trainers are starting")
        if kind in _STYLES:
            self.log(event["text"], _STYLES[kind])

    def strike(self, strike: DemoStrike) -> None:
        """Show a fault that was just carried out."""
        self._strike = strike
        self.log(f"FAULT in iteration {strike.during}: {strike.text}", "bold red")
