"""The style of the report: light and dark by the reader's preference, and for paper.

Colours of categories were found by search: any two are at least 28 apart in CIELAB in light, and
23 in dark, as they are and as seen without red, green or blue cones.
"""

from __future__ import annotations

from collections.abc import Mapping

_COLOURS: Mapping[str, tuple[str, str]] = {
    "productive": ("#3852c3", "#5875ec"),
    "redone": ("#9eb8f9", "#a4c1ff"),
    "stall": ("#622f72", "#9d47a0"),
    "detect": ("#d11b0f", "#f97534"),
    "decide": ("#ff951c", "#ffe241"),
    "rebuild": ("#0ca852", "#36ca91"),
    "start": ("#76767c", "#6e827f"),
    "idle": ("#e5c4c3", "#463e58"),
    "hold": ("#722c25", "#8c7749"),
    "queue": ("#141320", "#e4ede6"),
    "kill": ("#622f72", "#9d47a0"),
    "iterate": ("#3852c3", "#5875ec"),
    "reached": ("#3852c3", "#5875ec"),
    "committed": ("#b06a00", "#eab03a"),
    "protected": ("#3852c3", "#5875ec"),
    "local": ("#b06a00", "#eab03a"),
}
"""Colours in light and in dark by class: of categories, parts of recoveries, and curves."""

_PAGE = (
    ("ground", "#ffffff", "#16181c"),
    ("panel", "#f6f6f4", "#1f2227"),
    ("text", "#1f2328", "#e4e4e0"),
    ("quiet", "#5d636b", "#a2a7ae"),
    ("rule", "#dcdcd6", "#363a41"),
    ("alarm", "#b8322a", "#e0584e"),
)

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:28px 24px 48px;background:var(--ground);
 color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1{font-size:24px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 4px}
h3{font-size:14px;font-weight:600;margin:18px 0 2px}
p{margin:2px 0 8px}
p.note,.legend,header p,th,footer{color:var(--quiet);font-size:13px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:12px;margin:18px 0}
dl div{background:var(--panel);border-radius:8px;padding:10px 14px}
dt{color:var(--quiet);font-size:13px}
dd{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--quiet);font-variant-numeric:tabular-nums}
svg.bar{height:16px;overflow:hidden}
.tick,.grid{stroke:var(--rule);fill:none}
.part{fill:var(--panel);stroke:var(--rule)}
.mark{fill:var(--alarm)}
.fault{stroke:var(--alarm);stroke-dasharray:2 3;opacity:.7;fill:none}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round}
.line.committed{stroke-width:6;opacity:.5}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:4px 0 8px;padding:0;list-style:none}
.legend svg{display:inline-block;width:12px;height:12px;margin-right:6px;vertical-align:-1px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:600;white-space:nowrap}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.t{white-space:pre-wrap;overflow-wrap:anywhere;min-width:16em}
td:first-child{white-space:nowrap}
td.b{width:36%;vertical-align:middle}
td.wider{width:80%}
footer{margin-top:36px}
@media print{
 body{max-width:none;padding:0;font-size:12px}
 table{font-size:11px}
 h2,h3{break-after:avoid}
 svg,tr,dl{break-inside:avoid}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


def style() -> str:
    """The style sheet; it names no other file."""
    light, dark = (
        "".join(f"--{name}:{shades[place]};" for name, *shades in _PAGE)
        + "".join(f"--c-{name}:{shades[place]};" for name, shades in _COLOURS.items())
        for place in (0, 1)
    )
    classes = "".join(
        f".{name}{{fill:var(--c-{name})}}.line.{name}{{fill:none;stroke:var(--c-{name})}}"
        for name in _COLOURS
    )
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{classes}{_RULES}"
    )
