"""The layout of ``--reshape``: read, and checked against the demo that it would change."""

from __future__ import annotations

from megatron_ft.cli.demo.demo_model import HEADS
from megatron_ft.cli.demo.settings import DemoLayout, DemoSettings
from megatron_ft.core.errors import ConfigError
from megatron_ft.erasure.stripes import possible_scheme


def read_layout(text: str, settings: DemoSettings) -> DemoLayout:
    """The layout that ``text`` names, as ``tp=1,dp=3``; sizes that it leaves out stay.

    ConfigError if the demo of ``settings`` cannot continue in it.
    """
    layout = settings.layout._replace(**_sizes(text))
    label = f"--reshape {text}"
    if settings.lose > settings.scheme.parity_members:
        raise ConfigError(
            f"{label}: --lose {settings.lose} is more than {settings.protect} survives, so there "
            "would be nothing to reshape"
        )
    if layout == settings.layout:
        raise ConfigError(f"{label}: the demo begins with this layout; give another one")
    if HEADS % layout.tp:
        raise ConfigError(f"{label}: the demo's model has {HEADS} heads; give tp 1, 2 or 4")
    _check_nodes(label, layout, settings)
    return layout


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        good = equals and name in DemoLayout._fields and name not in sizes and size.isdecimal()
        if not good or int(size) < 1:
            raise ConfigError(
                f"--reshape {text}: {part!r} is no size; give some of tp, pp and dp once each, as "
                "in tp=1,dp=3"
            )
        sizes[name] = int(size)
    return sizes


def _check_nodes(label: str, layout: DemoLayout, settings: DemoSettings) -> None:
    """ConfigError, with the nearest dp that will do, if the nodes that are left do not fit."""
    per_node = settings.ranks_per_node
    left = settings.nodes + settings.spares - 2 * settings.lose
    reason = _against(layout, settings, left)
    if not reason:
        return
    fitting = [
        dp
        for dp in range(1, left * per_node + 1)
        if (one := layout._replace(dp=dp)) != settings.layout
        if not _against(one, settings, left)
    ]
    nearest = min(fitting, key=lambda dp: (abs(dp - layout.dp), dp), default=None)
    advice = "no dp will do: give another tp or pp, or more --spares"
    if nearest is not None:
        advice = f"the nearest dp that will do is {nearest}; or give more --spares"
    raise ConfigError(f"{label}: {reason}; {advice}")


def _against(layout: DemoLayout, settings: DemoSettings, left: int) -> str:
    """The reason why ``left`` nodes cannot train in the layout; empty if they can."""
    nodes, rest = divmod(layout.ranks, settings.ranks_per_node)
    if rest:
        return f"{layout.ranks} ranks are no multiple of --ranks-per-node {settings.ranks_per_node}"
    if nodes > left:
        return (
            f"its {layout.ranks} ranks take {nodes} nodes, and {left} are left when a fault and "
            f"the reshape have taken {settings.lose} each"
        )
    if possible_scheme(nodes, 1, settings.scheme) is None:
        return f"{nodes} node has no other one to be protected by"
    return ""
