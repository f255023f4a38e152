"""`/` and `/run`: all runs, and one of them: started, stopped, resumed, with what it writes and its numbers."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints

from kedge.core.errors import ConfigError, KedgeError
from kedge.report.charts import svg
from kedge.report.live.headline_metrics import current_stage, headline_metrics, progress
from kedge.report.run.curves import plots
from kedge.report.run.run_records import RunRecord
from kedge.web.studio import drafts
from kedge.web.studio.context import Studio
from kedge.web.studio.drafts import Outdated, key_of
from kedge.web.studio.editor import checked
from kedge.web.studio.jobs import Job
from kedge.web.studio.pages import fragment, page

Short = Annotated[str, StringConstraints(max_length=4096)]
_CHARTS: Final = 6
_LAST_EVENTS: Final = 12
_OFFLINE: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts allow-downloads"
)
"""For the pages of reports, which stand alone: their own scripts run, and reach nothing."""
_CODES: Final = {
    0: "",
    1: "it failed; the last lines below say why",
    2: "it was refused before anything was changed; the last lines below say why",
    3: "a contract of the recipe stopped it; everything is saved",
    4: "it waits for people; resume it when they are done",
    130: "it was stopped, with everything saved; it can be resumed",
}


class Start(BaseModel):
    model_config = ConfigDict(extra="forbid")
    file: Short
    base: Short


class OfRun(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Short


def add_running(app: FastAPI, studio: Studio) -> None:
    project = studio.project

    @app.get("/")
    def home(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        recipes = project.recipes()
        return page(request, "home.html.j2", "", folder=project.folder.name, runs=studio.run_lines(), recipes=recipes)

    @app.post("/run/start")
    def start(body: Start) -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse(start_run(studio, body))

    @app.post("/run/stop")
    def stop(body: OfRun) -> Response:  # pyright: ignore[reportUnusedFunction]
        job = studio.job_of(body.name)
        return JSONResponse({"say": "it has ended already" if job is None else studio.jobs.stop(job.id)})

    @app.post("/run/resume")
    def resume(body: OfRun) -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse(resume_run(studio, body.name))

    @app.get("/run")
    def run_page(request: Request, name: str = "") -> Response:  # pyright: ignore[reportUnusedFunction]
        job = studio.job_of(name)
        if job is None:
            studio.run_folder(name)
        return page(request, "run.html.j2", "run", run=name, recipe=_recipe_of(studio, name, job))

    @app.get("/run/live")
    def live(name: str = "", since: str = "", stage: str = "", log: str = "") -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse(_news(studio, name, since=since, stage=stage, log=log))

    @app.get("/run/doctor")
    def doctor(name: str = "") -> Response:  # pyright: ignore[reportUnusedFunction]
        folder = studio.run_folder(name)
        try:
            verdicts, trouble = studio.services.doctor(folder), ""
        except KedgeError as error:
            verdicts, trouble = (), str(error)
        return HTMLResponse(fragment("doctor.html.j2", verdicts=verdicts, trouble=trouble))

    @app.get("/report")
    def report(name: str = "") -> Response:  # pyright: ignore[reportUnusedFunction]
        html = studio.services.report(studio.run_folder(name))
        return HTMLResponse(html, headers={"Content-Security-Policy": _OFFLINE})

    @app.get("/compare")
    def compare(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        names = request.query_params.getlist("run")
        html = studio.services.compare([studio.run_folder(name) for name in names])
        return HTMLResponse(html, headers={"Content-Security-Policy": _OFFLINE})


def start_run(studio: Studio, body: Start) -> dict[str, Any]:
    """Begin a run of the recipe that the page shows; what is wrong is answered at its fields, and nothing begins."""
    draft = drafts.read_draft(studio.project, body.file)
    if draft.hash != body.base:
        raise Outdated(f"{draft.file.name} was changed elsewhere since this page was loaded; load it again")
    recipe, report, plan = checked(studio, draft, asks_servers=True)
    problems = {"problems": report.fatal.by_key(), "top": report.fatal.top, "plan": plan, "hash": draft.hash}
    if recipe is None or report.fatal:
        return problems
    name = recipe.settings.name
    if (studio.project.inside("runs") / name).exists():
        taken = f"runs/{name} is there already: resume it on its page, or give this run another name"
        return {**problems, "problems": {key_of(("name",)): [taken]}}
    command = studio.services.run_command(draft.file.name, False)
    studio.jobs.start("run", command, subject=draft.file.name, name=name, at_once=studio.runs_at_once)
    return {"go": f"/run?name={name}"}


def resume_run(studio: Studio, name: str) -> dict[str, Any]:
    """Go on with a run, by the recipe that it was started with."""
    studio.run_folder(name)
    file = _recipe_of(studio, name, studio.job_of(name))
    if not file:
        raise ConfigError(f"no recipe of this project is named {name}; it is resumed where its recipe is")
    draft = drafts.read_draft(studio.project, file)
    _, recipe, problems = drafts.look_at(studio.project, draft)
    if recipe is None or recipe.settings.name != name:
        where = "; ".join([*problems.top, *(text for texts in problems.at.values() for text in texts)])
        raise ConfigError(f"{file} cannot run as it is now: {where or f'it names another run than {name}'}")
    command = studio.services.run_command(file, True)
    at_once = studio.runs_at_once
    studio.jobs.start("run", command, subject=file, name=name, at_once=at_once, is_resumed=True)
    return {"say": f"{name} goes on", "resumed": True}


def _recipe_of(studio: Studio, name: str, job: Job | None) -> str:
    """The recipe that a run was started with, or the one that is called like it."""
    names = studio.project.recipes()
    wanted = [job.subject] if job is not None else [f"{name}.yaml"]
    return next((file for file in wanted if file in names), "")


def _news(studio: Studio, name: str, *, since: str, stage: str, log: str) -> dict[str, Any]:
    """What has changed of a run; `since` and `log` say what the page has already."""
    job = studio.job_of(name)
    status = studio.status(name)
    if job is None and status == "absent":
        studio.run_folder(name)
    identity, _, place = log.partition("@")
    offset = int(place) if job is not None and identity == job.id and place.isdigit() else 0
    written, end = ("", 0) if job is None else studio.jobs.log(job, offset)
    news: dict[str, Any] = {
        "status": status,
        "is_alive": job is not None and job.is_alive,
        "outcome": _outcome(job, status),
        "can_resume": status in ("interrupted", "stopped", "waiting", "failed") and not (job and job.is_alive),
        "presses": len(job.presses) if job is not None and job.is_alive else 0,
        "log": written,
        "log_at": "" if job is None else f"{job.id}@{end}",
        "is_log_new": offset == 0,
    }
    if not (studio.project.runs / name / "run.json").is_file():
        return news
    feed = studio.feed(name)
    mark = f"{feed.revision}/{status}/{stage}"
    if mark != since:
        news |= {"since": mark, "html": _run_html(feed.record(), stage)}
    return news


def _outcome(job: Job | None, status: str) -> str:
    """How the process ended, in words; nothing while it runs."""
    if job is None or job.is_alive:
        return ""
    if job.code is None:  # only the server that began it is told
        unseen = "the studio that began it had ended before it did, so how its process ended is not known"
        return "" if status == "done" else f"{unseen}; what it saved is here"
    return _CODES.get(job.code, f"its process ended with {job.code}; the last lines below may say why")


def _run_html(run: RunRecord, name: str) -> str:
    stage = current_stage(run, name)
    figures = [] if stage is None else [svg.figure(plot) for plot in islice(plots(stage, smoothing=1), _CHARTS)]
    events = [] if stage is None else list(reversed(stage.events[-_LAST_EVENTS:]))
    return fragment(
        "run_live.html.j2",
        run=run,
        stage=stage,
        events=events,
        figures=figures,
        progress=None if stage is None else progress(stage),
        tiles=[] if stage is None else headline_metrics(stage),
    )
