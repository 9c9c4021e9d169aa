"""Show a whole job on one screen, live: its protection, the cost of losses, every node.

Reads the status that the job's supervisor writes to the state folder every second, so it works on
every machine that sees the folder.  Keys: n, i, s sort by node, iteration or silence; arrow keys
choose a node, Enter shows the cost of its loss; q quits.  Without a terminal it prints one screen.
"""

from __future__ import annotations

import argparse
import curses
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.cli import common, status
from megatron_ft.core.errors import ConfigError

LOOK_MILLISECONDS = 1000
_CELL, _NAME = 26, 8
_DOWN, _UP = ("KEY_DOWN", "j"), ("KEY_UP", "k")
_SORTS = {"n": "node", "i": "iteration", "s": "silent"}
_BACK = ("KEY_LEFT", "KEY_BACKSPACE", "\x1b", "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)


@dataclass
class View:
    """State of the screen: the order of nodes, the chosen one, and whether it is open."""

    sort: str = "n"
    chosen: int = 0
    opened: bool = False

    def press(self, key: str) -> bool:
        """Obey a key; False if it ends the program."""
        if self.opened and key in _BACK:
            self.opened = False
        elif key in _SORTS:
            self.sort = key
        elif key in _DOWN + _UP:
            self.chosen = max(0, self.chosen + (1 if key in _DOWN else -1))
        elif key == "\n":
            self.opened = True
        return key != "q"


def main(arguments: argparse.Namespace) -> int:
    """Show the job until the user quits; one screen if nobody can press a key."""
    load(arguments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        size = shutil.get_terminal_size()
        print("\n".join(screen(arguments.job, load(arguments), View(), size.columns, size.lines)))
        return 0
    curses.wrapper(_follow, arguments)
    return 0


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """The newest status that the job's supervisor has written; ConfigError if there is none."""
    for _, job in status.recorded(arguments.job, arguments.state_dir):
        return job
    raise ConfigError(
        f"no supervisor of {arguments.job} has written a status: name the job (--job), and the "
        "folder of its notes if it has one (--state-dir)"
    )


def _follow(window: curses.window, arguments: argparse.Namespace) -> None:
    curses.curs_set(0)
    window.timeout(LOOK_MILLISECONDS)
    view, key = View(), ""
    while view.press(key):
        job = load(arguments)
        height, width = window.getmaxyx()
        window.erase()
        # The last place of the last line cannot be written without a scroll.
        for row, line in enumerate(screen(arguments.job, job, view, width - 1, height)):
            window.addstr(row, 0, line)
        window.refresh()
        try:
            key = window.getkey()
        except curses.error:
            key = ""


def screen(name: str, job: Mapping[str, Any], view: View, width: int, height: int) -> Sequence[str]:
    """The lines of one screen, none wider or more than there is room for."""
    lines = _head(name, job)
    nodes = _sorted(job["ranks"], view.sort)
    view.chosen = max(0, min(view.chosen, len(nodes) - 1))
    if view.opened and nodes:
        lines += _node(job, nodes[view.chosen])
    else:
        lines += _table(job["ranks"], nodes, view, width, height - len(lines))
    return [line[:width] for line in lines[:height]]


def _head(name: str, job: Mapping[str, Any]) -> list[str]:
    """The lines of ``megatron-ft status`` that are about the whole job, the worst losses first."""
    lines = status.render(name, {**job, "nodes": {}}).splitlines()
    headline, *rest = lines
    facts = headline.split("; ")
    losses = [line for line in rest if line.startswith("losing")]
    others = [line for line in rest if not line.startswith(("losing", "no SMP"))]
    more = [f"{len(losses) - 2} more losses: see megatron-ft status"] if len(losses) > 3 else []
    shown = losses if len(losses) <= 3 else losses[:2]
    return [f"{facts[0]}  (written {job['age']:.0f} s ago)", *facts[1:], *shown, *more, *others]


def _sorted(ranks: Mapping[str, Mapping[str, Any]], sort: str) -> list[str]:
    if sort == "i":
        return sorted(ranks, key=lambda node: (ranks[node]["iteration"], node))
    if sort == "s":
        return sorted(ranks, key=lambda node: (-ranks[node]["silent"], node))
    return sorted(ranks, key=lambda node: (len(node), node))


def _table(
    ranks: Mapping[str, Mapping[str, Any]],
    nodes: Sequence[str],
    view: View,
    width: int,
    height: int,
) -> list[str]:
    """Nodes in as many columns as there is room for, around the chosen one if not all fit."""
    columns, rows = max(1, width // _CELL), max(1, height - 1)
    heading = f" {'node':<{_NAME}}{'iteration':>9}{'silent':>7}"
    shown = columns * rows
    first = max(0, min(view.chosen - shown // 2, len(nodes) - shown))
    cells = []
    for number, node in enumerate(nodes):
        mark, found = ">" if number == view.chosen else " ", ranks[node]
        text = f"{node[-_NAME:]:<{_NAME}}{found['iteration']:>9}{found['silent']:>6.1f}s"
        cells.append(f"{mark}{text}".ljust(_CELL))
    visible = cells[first : first + shown]
    used = -(-len(visible) // rows)
    lines = [heading.ljust(_CELL) * used]
    lines += ["".join(visible[row::rows]) for row in range(min(rows, len(visible)))]
    if not nodes:
        return ["no rank has reported yet"]
    return lines


def _node(job: Mapping[str, Any], node: str) -> list[str]:
    ranks, costs = job["ranks"][node], status.exposure(job["summary"])
    lines = [
        f"{node}: {ranks['ranks']} ranks, iteration {ranks['iteration']}; rank {ranks['rank']} "
        f"({ranks['phase']}) has passed no mark for {ranks['silent']:.1f} s"
    ]
    if node in costs.get("nodes", {}):
        lines.append(f"losing it: {status.describe(costs['nodes'][node])}")
    for pair in costs.get("pairs", ()):
        if node in (*pair["nodes"], *pair["others"]):
            partners = pair["nodes"] if node in pair["others"] else pair["others"] or pair["nodes"]
            names = ", ".join(one for one in partners if one != node)
            lines.append(f"and with it one of {names}: {status.describe(pair)}")
    return [*lines, "Enter goes back"]
