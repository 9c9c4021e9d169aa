"""The demo's picture: the loss of both runs, and where it was thrown back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_ft.cli.chaos.trace import final_lines
from megatron_ft.cli.demo.faults import DemoRecovery, Traces
from megatron_ft.cli.demo.report import DemoReport

_INCARNATION_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00")

_FAULT_COLOUR = "#b2182b"

Losses = dict[int, float]


def mean_losses(traces: Traces, incarnation: int | None) -> Losses:
    """Iteration to loss, averaged over the ranks that have one, of one incarnation or what
    counts."""
    values: dict[int, list[float]] = {}
    for lines in traces.values():
        chosen = [line for line in lines if incarnation in (None, line.incarnation)]
        for iteration, line in final_lines(chosen).items():
            if line.loss_value is not None:
                values.setdefault(iteration, []).append(line.loss_value)
    return {iteration: fmean(values[iteration]) for iteration in sorted(values)}


def draw(
    path: Path, title: str, ours: Traces, oracle: Traces, events: Sequence[DemoRecovery], last: int
) -> None:
    """Write the picture as a PNG.

    ``last`` is the last iteration on the axis.  An oracle without lines is left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, last + 1)
    whole = mean_losses(oracle, None)
    if whole:
        axes.plot(
            list(whole), list(whole.values()), color="#999999", linewidth=2.5, zorder=1,
            label="uninterrupted run",
        )  # fmt: skip
    _draw_lives(axes, ours)
    _draw_events(axes, events, last)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if whole or any(ours.values()):  # else matplotlib warns that there is nothing to explain
        place = (1.0, 0.97 - 0.06 * len(events))
        axes.legend(loc="upper right", bbox_to_anchor=place, frameon=False)
    figure.savefig(path, format="png")


def _draw_lives(axes: Any, traces: Traces) -> None:
    """A dot for each iteration that counts, a ring around it for each that had to be repeated."""
    incarnations = sorted({line.incarnation for lines in traces.values() for line in lines})
    newest = {
        i: incarnation for incarnation in incarnations for i in mean_losses(traces, incarnation)
    }
    rings: list[tuple[int, float]] = []
    for number, incarnation in enumerate(incarnations):
        losses = mean_losses(traces, incarnation)
        kept = {i: loss for i, loss in losses.items() if newest[i] == incarnation}
        rings += [(i, loss) for i, loss in losses.items() if newest[i] != incarnation]
        name = "our run" if not number else f"our run, start {number + 1}"
        colour = _INCARNATION_COLOURS[number % len(_INCARNATION_COLOURS)]
        axes.scatter(list(kept), list(kept.values()), s=34, color=colour, zorder=3, label=name)
    if rings:
        axes.scatter(
            *zip(*rings, strict=True), s=130, facecolors="none", edgecolors=_FAULT_COLOUR,
            linewidths=1.2, zorder=2, label="lost and trained again",
        )  # fmt: skip


def _draw_events(axes: Any, events: Sequence[DemoRecovery], last: int) -> None:
    """A line where each fault struck, what it was, and an arrow back to what was restored."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + (0.05 + 0.07 * len(events)) * (high - low))
    for number, event in enumerate(events):
        level = high + (0.07 * (len(events) - number) - 0.01) * (high - low)
        struck = event.during - 1 + event.fraction
        axes.axvline(struck, color=_FAULT_COLOUR, linestyle=":", linewidth=1.2, zorder=0)
        if event.restored_iteration is not None:
            axes.annotate(
                "", (event.restored_iteration, level), (struck, level),
                arrowprops={"arrowstyle": "-|>", "color": _FAULT_COLOUR, "linewidth": 1.4},
            )  # fmt: skip
        # Late faults have their words on the left, where there is room.
        early = struck < 0.6 * last
        axes.text(
            struck + 0.4 if early else (event.restored_iteration or struck) - 0.6, level,
            caption(event), color=_FAULT_COLOUR, va="center", ha="left" if early else "right",
            fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip


def headline(report: DemoReport) -> str:
    """The picture's title."""
    shape = report.settings
    run = f"{shape.world_size} ranks on {shape.nodes} nodes, {shape.protect}, seed {shape.seed}"
    if report.comparison is None:
        return f"Stopped with exit code {report.exit_code} ({run})"
    word = "Bit-identical to" if report.identical else "DIFFERENT from"
    return f"{word} the uninterrupted run ({run})"


def caption(event: DemoRecovery) -> str:
    """A fault and its recovery in few words."""
    if event.restored_iteration is None:
        return f"{event.kind} lost, not restored"
    return f"{event.kind} lost: back to {event.restored_iteration} from {event.source}"
