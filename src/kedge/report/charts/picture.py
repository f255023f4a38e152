"""Plots side by side as one SVG file that stands alone: for pages of documentation, which show it as an image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from markupsafe import Markup

from kedge.report.charts.axes import Frame
from kedge.report.charts.plot import Plot
from kedge.report.charts.svg import drawing_of, legend_of, plane_of, summary_of

CELL = Frame(width=480.0, height=330.0, left=56.0, right=464.0, top=78.0, bottom=284.0)
"""One plot, with its title and its legend above."""
_TITLE_AT, _LEGEND_AT, _LEGEND_STEP = 24.0, 44.0, 16.0
_LETTER = 6.3
_SIGNS = {"": "━", "dots": "●", "boxes": "■", "fit": "╍"}
_OWN_RULES = """
svg { width: auto; }
svg .ground { fill: var(--card); }
svg text.title { fill: var(--ink); font-size: 14px; font-weight: 600; }
svg text.key { fill: color-mix(in srgb, var(--s) 80%, var(--ink)); font-size: 11px; font-weight: 600; }
"""


def picture(plots: Sequence[Plot], *, columns: int = 2) -> str:
    """An SVG file of some plots, `columns` in a row. It follows the reader's light or dark scheme."""
    rows = -(-len(plots) // columns)
    width, height = CELL.width * min(columns, len(plots)), CELL.height * rows
    cells = [
        Markup('<g transform="translate({},{})">{}</g>').format(
            CELL.width * (place % columns), CELL.height * (place // columns), _cell(plot)
        )
        for place, plot in enumerate(plots)
    ]
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n'
            '<style>{style}</style>\n<rect class="ground" width="{width}" height="{height}" rx="10"/>\n'
            "{cells}\n</svg>\n"
        ).format(
            width=width,
            height=height,
            label=" ".join(summary_of(plot) for plot in plots),
            style=Markup(_style()),
            cells=Markup("\n").join(cells),
        )
    )


def _cell(plot: Plot) -> Markup:
    title = Markup('<text class="title" x="{}" y="{}">{}</text>').format(16, _TITLE_AT, plot.title)
    return title + _legend(plot) + drawing_of(plot, plane_of(plot, CELL))


def _legend(plot: Plot) -> Markup:
    """In lines above the chart, as many names in each as fit."""
    x, y, texts = 16.0, _LEGEND_AT, list[Markup]()
    for colour, sign, name in legend_of(plot):
        text = f"{_SIGNS[sign]} {name}"
        wide = _LETTER * len(text) + 12
        if x + wide > CELL.width and x > 16:
            x, y = 16.0, y + _LEGEND_STEP
        texts.append(Markup('<text class="key {}" x="{}" y="{}">{}</text>').format(colour, round(x, 1), y, text))
        x += wide
    return Markup("").join(texts)


@cache
def _style() -> str:
    """The colours of all pages (the rules at the top of `page.css`), those of charts, and a few of our own."""
    report = files("kedge.report")
    colours = report.joinpath("page.css").read_text(encoding="utf-8").split("* {", 1)[0]
    charts = report.joinpath("charts", "chart.css").read_text(encoding="utf-8")
    return colours + charts + _OWN_RULES
