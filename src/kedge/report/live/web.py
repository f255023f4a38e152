"""The local page of `kedge watch --web`: thin routes over feeds; the server renders, the page swaps its parts.

Only for this machine: the caller binds to loopback, every request needs the token of the URL and a Host header that
names this address (a page elsewhere cannot reach it by a name of its own). Left out: accounts, TLS, writing anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from markupsafe import Markup

from kedge.core.quoting import escaped
from kedge.report.charts import svg
from kedge.report.live.feed import RunFeed
from kedge.report.live.headline_metrics import current_stage, headline_metrics, progress
from kedge.report.live.overlay import Picked, metric_names
from kedge.report.live.overlay import overlay as overlay_plot
from kedge.report.pages import asset, render_page
from kedge.report.run.curves import plots
from kedge.report.run.run_records import Record, RunRecord, StageRecord
from kedge.report.run.samples import answer_facts, shown_answer, shown_turns

PAGE_SIZE = 20
"""Samples on one page of search results."""
Smoothing = Annotated[int, Query(ge=1, le=1000)]
_CHARTS = 6
_LAST_EVENTS = 30


def make_app(feeds: Sequence[RunFeed], *, token: str | None, hosts: Sequence[str]) -> FastAPI:
    """`hosts` are the values of the Host header that are answered, with their port.

    Without a token whoever hosts this application lets visitors in.
    """
    # Its own pages of documentation would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(_guard(token, hosts))

    @app.get("/")
    async def page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        return HTMLResponse(_page(feeds, nonce=request.state.nonce))

    @app.get("/live")
    async def live(  # pyright: ignore[reportUnusedFunction]
        since: int = -1, stage: Annotated[Sequence[str], Query()] = (), smoothing: Smoothing = 1
    ) -> Response:
        for feed in feeds:
            feed.poll()
        revision = sum(feed.revision for feed in feeds)
        if revision == since:
            return Response(status_code=204)
        return JSONResponse(_news(feeds, revision, stage, smoothing))

    @app.get("/overlay")
    async def overlay(  # pyright: ignore[reportUnusedFunction]
        metric: Annotated[Sequence[str], Query()] = (),
        stage: Annotated[Sequence[str], Query()] = (),
        smoothing: Smoothing = 1,
        is_scaled: bool = False,
    ) -> Response:
        picked = Picked(metrics=tuple(metric), smoothing=smoothing, is_scaled=is_scaled)
        return HTMLResponse(_overlay(feeds, stage, picked))

    @app.get("/samples")
    async def samples(run: int = 0, q: str = "", first: int = 0) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not 0 <= run < len(feeds):
            return PlainTextResponse("there is no such run", status_code=404)
        results = search(feeds[run].record(), q, first=max(0, first))
        values = {
            "results": results,
            "size": PAGE_SIZE,
            "facts": answer_facts,
            "turns": shown_turns,
            "answer": shown_answer,
        }
        return HTMLResponse(render_page("kedge.report.live", "samples.html.j2", **values))

    return app


Handler = Callable[[Request], Awaitable[Response]]


def _guard(token: str | None, hosts: Sequence[str]) -> Callable[[Request, Handler], Awaitable[Response]]:
    """Nothing is answered, not even "not found", without the right host and the token."""

    def is_known(request: Request) -> bool:
        if token is None:
            return True
        given = request.query_params.get("token", "")
        # compared as bytes: compare_digest takes no text beyond ASCII
        return request.headers.get("host", "") in hosts and secrets.compare_digest(given.encode(), token.encode())

    async def guard(request: Request, handle: Handler) -> Response:
        if not is_known(request):
            return PlainTextResponse("Open the address that kedge watch printed.", status_code=403)
        request.state.nonce = secrets.token_urlsafe(16)
        response = await handle(request)
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'nonce-{request.state.nonce}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-store"
        return response

    return guard


def _page(feeds: Sequence[RunFeed], *, nonce: str) -> str:
    return render_page(
        "kedge.report.live",
        "page.html.j2",
        names=[str(feed.folder) for feed in feeds],
        nonce=nonce,
        own_style=asset("kedge.report.live", "page.css"),
        script=asset("kedge.report.charts", "chart.js") + asset("kedge.report.live", "page.js"),
    )


def _shown(runs: Sequence[RunRecord], stage_names: Sequence[str]) -> list[StageRecord | None]:
    """`stage_names` has one for each run, in their order; where it is empty or missing, `current_stage` chooses."""
    names = [*stage_names, *("" for _ in runs)]
    return [current_stage(run, name) for run, name in zip(runs, names, strict=False)]


def _overlay(feeds: Sequence[RunFeed], stage_names: Sequence[str], picked: Picked) -> str:
    runs = [feed.record() for feed in feeds]
    named = [(run.manifest.name, stage) for run, stage in zip(runs, _shown(runs, stage_names), strict=True) if stage]
    plot = overlay_plot(named, picked)
    return escaped(str(svg.figure(plot))) if plot else '<p class="soft">Pick a metric that these stages log.</p>'


def _news(feeds: Sequence[RunFeed], revision: int, stage_names: Sequence[str], smoothing: int) -> dict[str, object]:
    runs = [feed.record() for feed in feeds]
    shown = _shown(runs, stage_names)
    html = render_page(
        "kedge.report.live",
        "runs.html.j2",
        runs=list(zip(runs, shown, strict=True)),
        progress=progress,
        headline_metrics=headline_metrics,
        figures=partial(_figures, smoothing=smoothing),
        last_events=_LAST_EVENTS,
    )
    return {
        "revision": revision,
        "html": html,
        "is_running": any(run.status == "running" for run in runs),
        "metrics": metric_names([stage for stage in shown if stage]),
    }


def _figures(stage: StageRecord, *, smoothing: int) -> list[Markup]:
    return [svg.figure(replace(plot, note="")) for plot in islice(plots(stage, smoothing=smoothing), _CHARTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResults:
    """One page of matching samples; `total` counts all pages."""

    samples: tuple[tuple[str, Record], ...]
    """Stage and sample."""
    total: int
    first: int


def search(run: RunRecord, words: str, *, first: int = 0) -> SearchResults:
    """Samples with all of these words in prompt or answer, in small or capital letters; newest first."""
    terms = words.casefold().split()
    matches = [
        (stage, sample)
        for stage, sample in _newest_first(run)
        if all(word in f"{sample.get('prompt', '')}\n{sample.get('answer', '')}".casefold() for word in terms)
    ]
    return SearchResults(samples=tuple(matches[first : first + PAGE_SIZE]), total=len(matches), first=first)


def _newest_first(run: RunRecord) -> Iterator[tuple[str, Record]]:
    for stage in reversed(run.stages):
        samples: Sequence[Record] = stage.samples
        yield from ((stage.name, sample) for sample in reversed(samples))
