"""A comparison as one page that opens anywhere, without a network. Everything that comes from data is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from markupsafe import Markup

from kedge.core.pages import render_page
from kedge.report.charts import svg
from kedge.report.compare.frontier import plots
from kedge.report.compare.numbers import rows_of
from kedge.report.compare.records import Entry
from kedge.report.compare.table import table_of
from kedge.report.run.methods import what_was_run
from kedge.report.run.telling import what_happened

_STYLES = (("kedge.report.run", "page.css"), ("kedge.report.charts", "chart.css"), ("kedge.report.compare", "page.css"))


def render_comparison(entries: Sequence[Entry]) -> str:
    rows = rows_of(entries)
    style = "".join(files(package).joinpath(name).read_text(encoding="utf-8") for package, name in _STYLES)
    return render_page(
        "kedge.report.compare",
        "page.html.j2",
        entries=entries,
        table=table_of(rows, entries, with_intervals=True),
        figures=[svg.figure(plot) for plot in plots(entries, rows)],
        stories=[
            (entry, what_was_run(entry.stage.kind, entry.stage.settings), list(what_happened(entry.stage)))
            for entry in entries
        ],
        own_style=Markup(style),  # ours, not data
        script=svg.script(),
    )
