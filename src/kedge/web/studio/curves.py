"""`/curves`: the numbers of several runs in one chart: picked, smoothed, zoomed into, and taken along as CSV or SVG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from markupsafe import Markup

from kedge.core.metric_table import as_table
from kedge.core.quoting import escaped
from kedge.report.charts import svg
from kedge.report.charts.axes import Frame
from kedge.report.charts.picture import picture
from kedge.report.charts.plot import Plot
from kedge.report.live.headline_metrics import current_stage
from kedge.report.live.overlay import Picked, metric_names, overlay
from kedge.report.run.run_records import StageRecord
from kedge.web.studio.context import Studio
from kedge.web.studio.pages import page

WIDE: Final = Frame(width=720.0, height=330.0, left=50.0, right=706.0, top=14.0, bottom=292.0)
MOST_RUNS: Final = 16
_NOTHING = "Pick runs, and a metric that they log."
Names = Annotated[Sequence[str], Query(max_length=MOST_RUNS)]
Smoothing = Annotated[int, Query(ge=1, le=1000)]
Step = Annotated[float | None, Query(allow_inf_nan=False)]


def _picked(
    metric: Names = (), smoothing: Smoothing = 1, is_scaled: bool = False, first: Step = None, last: Step = None
) -> Picked:
    return Picked(metrics=tuple(metric), smoothing=smoothing, is_scaled=is_scaled, first=first, last=last)


Chosen = Annotated[Picked, Depends(_picked)]


def add_curves(app: FastAPI, studio: Studio) -> None:
    @app.get("/curves")
    def curves_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        names = studio.project.run_names()
        chosen = [name for name in request.query_params.getlist("run") if name in names] or names[:1]
        return page(request, "curves.html.j2", "curves", runs=names, chosen=chosen)

    @app.get("/curves/metrics")
    def metrics(run: Names = ()) -> Response:  # pyright: ignore[reportUnusedFunction]
        stages = stages_of(studio, run)
        revision = sum(studio.feed(name).revision for name in run)
        return JSONResponse({"metrics": metric_names([stage for _, stage in stages]), "revision": revision})

    @app.get("/curves/chart")
    def chart(what: Chosen, run: Names = ()) -> Response:  # pyright: ignore[reportUnusedFunction]
        plot = overlay(stages_of(studio, run), what)
        if plot is None:
            return HTMLResponse(f'<p class="soft">{_NOTHING}</p>')
        return HTMLResponse(escaped(str(svg.figure(plot, WIDE) + _scale_of(plot))))

    @app.get("/curves/export.svg")
    def export_svg(what: Chosen, run: Names = ()) -> Response:  # pyright: ignore[reportUnusedFunction]
        plot = overlay(stages_of(studio, run), what)
        if plot is None:
            return PlainTextResponse(_NOTHING, status_code=404)
        return _file(picture([plot], columns=1), "image/svg+xml", "curves.svg")

    @app.get("/curves/export.csv")
    def export_csv(run: Names = (), metric: Names = ()) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _file(as_csv(stages_of(studio, run), metric), "text/csv; charset=utf-8", "curves.csv")


def _scale_of(plot: Plot) -> Markup:
    """What the script needs to know which step is under the pointer."""
    return Markup('<div hidden data-first="{}" data-last="{}" data-left="{}" data-right="{}"></div>').format(
        plot.x[0], plot.x[-1], WIDE.left, WIDE.right
    )


def stages_of(studio: Studio, runs: Sequence[str]) -> list[tuple[str, StageRecord]]:
    """Every stage of these runs that has numbers, under a name that tells them apart."""
    named: list[tuple[str, StageRecord]] = []
    for name in dict.fromkeys(runs):
        record = studio.feed(name).record()
        stages = [stage for stage in record.stages if len(stage.metrics)]
        own = stages or [stage for stage in (current_stage(record),) if stage is not None]
        named += [(f"{name}/{stage.name}" if record.is_pipeline else name, stage) for stage in own]
    return named


def as_csv(stages: Sequence[tuple[str, StageRecord]], metrics: Sequence[str]) -> str:
    """A row a step of a run; a column a metric, empty where it was not logged."""
    chosen = list(metrics) or metric_names([stage for _, stage in stages])
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(["run", "step", *map(_plain_cell, chosen)])
    for name, stage in stages:
        for record in as_table(stage.metrics):
            if any(metric in record for metric in chosen):
                cells = [record.get(metric, "") for metric in chosen]
                writer.writerow([_plain_cell(name), record["step"], *cells])
    return target.getvalue()


def _plain_cell(text: str) -> str:
    """A spreadsheet takes a cell that begins so for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _file(content: str, media_type: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=media_type, headers=headers)
