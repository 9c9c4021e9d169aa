"""The demo's picture: the loss of both runs, and where it was thrown back."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from megatron_ft.cli.chaos.trace import TraceLine, final_lines
from megatron_ft.cli.demo.faults import Traces
from megatron_ft.cli.demo.report import DemoReport

_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00")
_FAULT_COLOUR = "#b2182b"


def draw(path: Path, report: DemoReport, ours: Traces, oracle: Traces) -> None:
    """Write the picture as a PNG; an oracle without lines is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.6), dpi=130, layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss")
    word = "bit-identical to" if report.identical else "not compared with, or different from,"
    axes.set_title(f"The interrupted run is {word} the uninterrupted one", loc="left")
    whole = _mean_losses(list(map(final_lines, oracle.values())))
    axes.plot(*_points(whole), color="#999999", linewidth=2.5, zorder=1, label="uninterrupted run")
    for number, incarnation in enumerate(
        sorted({line.incarnation for lines in ours.values() for line in lines})
    ):
        lines = [
            {line.iteration: line for line in rank if line.incarnation == incarnation}
            for rank in ours.values()
        ]
        colour, name = _COLOURS[number % len(_COLOURS)], f"our run, start {number + 1}"
        axes.scatter(*_points(_mean_losses(lines)), s=34, color=colour, zorder=3, label=name)
    for event in report.recoveries:
        struck = event.during - 1 + event.fraction
        back = event.restored_iteration
        text = f"{event.kind} lost: " + (
            "not restored" if back is None else f"back to {back} from {event.source}"
        )
        axes.axvline(struck, color=_FAULT_COLOUR, linestyle=":", zorder=0)
        axes.text(struck, axes.get_ylim()[1], text, color=_FAULT_COLOUR, fontsize=9, rotation=90,
                  va="top", ha="right")  # fmt: skip
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _mean_losses(ranks: list[dict[int, TraceLine]]) -> dict[int, float]:
    """Iteration to loss, averaged over the ranks that have one."""
    losses: dict[int, list[float]] = {}
    for line in (line for lines in ranks for line in lines.values()):
        if line.loss_value is not None:
            losses.setdefault(line.iteration, []).append(line.loss_value)
    return {iteration: fmean(losses[iteration]) for iteration in sorted(losses)}


def _points(losses: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())
