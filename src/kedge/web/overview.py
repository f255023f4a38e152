"""Pages of numbers: `/me` for oneself, `/manage` for who leads or audits a project."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from kedge.label.accounts import make_invite
from kedge.label.audit import tampered
from kedge.label.export import EXPORT_KINDS, ExportKind, export_labels
from kedge.label.status import status
from kedge.label.team.members import set_pause, set_preferences
from kedge.label.team.overview import agreements, audit_rows, colleagues, export_rows, forecast
from kedge.label.team.pace import pace
from kedge.label.team.review import flagged, read_docket
from kedge.web.pages import Site, fragment, page, project_for, visitor_of

_MOST_ROWS = 50
_LEADERS = ("owner", "manager")


class Preferences(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    takes_harm: StrictBool
    languages: Annotated[str, Field(max_length=200)] = ""


class Invitation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    email: Annotated[str, Field(max_length=320)]
    role: Literal["annotator", "manager", "auditor"] = "annotator"


class Pausing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    person: StrictInt
    paused: StrictBool


class Exporting(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    kind: ExportKind = "pairs"
    heldout: StrictBool = False


class Verifying(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""


def days_back(now: int, counts: Sequence[int]) -> list[tuple[str, int]]:
    """Counts of the last days with the name of each, oldest first.

    >>> days_back(1_800_000_000_000, [4, 5])
    [('Thu 14', 4), ('Fri 15', 5)]
    """
    names = [time.strftime("%a %d", time.gmtime(now / 1000 - 86400 * ago)) for ago in range(len(counts))]
    return list(zip(reversed(names), counts, strict=True))


def day(milliseconds: int) -> str:
    """
    >>> day(1_800_000_000_000)
    '2027-01-15 08:00'
    """
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(milliseconds / 1000))


def add_me(app: FastAPI, site: Site) -> None:
    @app.get("/me")
    def me(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        person, project = visitor_of(request).person, project_for(site, request)
        mine = pace(site.store, project, person)
        days = days_back(site.store.now(), mine.week)
        values = {"pace": mine, "days": days, "person": person, "settings": project.settings}
        return page(site, request, "me.html.j2", "me", project, **values)

    @app.post("/me/preferences")
    def preferences(request: Request, body: Preferences) -> Response:  # pyright: ignore[reportUnusedFunction]
        languages = [word for word in body.languages.replace(",", " ").split() if word]
        set_preferences(site.store, visitor_of(request).person, takes_harm=body.takes_harm, languages=languages)
        return JSONResponse({"say": "Kept. It holds from the next item on."})


def add_manage(app: FastAPI, site: Site) -> None:
    store = site.store

    @app.get("/manage")
    def manage(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request)
        now = status(store, project)
        values: dict[str, Any] = {
            "status": now,
            "next_steps": list(now.next_steps()),
            "flags": flagged(store, project, _MOST_ROWS),
            "exports": export_rows(store, project, 10),
            "audit": audit_rows(store, _MOST_ROWS),
            "settings": project.settings,
            "export_kinds": EXPORT_KINDS,
            "leads": person.role in _LEADERS,
            "day": day,
        }
        return page(site, request, "manage.html.j2", "manage", project, **values)

    # What takes longer than a moment of a big project is loaded by the page when it is there.
    @app.get("/manage/people")
    def people(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request)
        values = {"people": colleagues(store, project), "settings": project.settings}
        return HTMLResponse(fragment("people.html.j2", **values, leads=person.role in _LEADERS))

    @app.get("/manage/days")
    def days(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request)
        ahead = forecast(store, project, status(store, project))
        counts = days_back(store.now(), ahead.days)
        values = {"forecast": ahead, "days": counts, "docket": read_docket(store, project, 0)}
        return HTMLResponse(fragment("days.html.j2", **values))

    @app.get("/manage/agreement")
    def agreement(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request)
        return HTMLResponse(fragment("agreement.html.j2", agreements=agreements(store, project)))


def add_leading(app: FastAPI, site: Site) -> None:
    """What is done from the page: invitations, pauses, exports, a look at the chain."""
    store = site.store

    @app.post("/manage/invite")
    def invite(request: Request, body: Invitation) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request, body.project)
        token = make_invite(store, project, body.email, body.role)
        link = f"{site.entrance.origin}/join#{token}"
        return JSONResponse({"html": fragment("invited.html.j2", link=link, email=body.email)})

    @app.post("/manage/pause")
    def pause(request: Request, body: Pausing) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request, body.project)
        set_pause(store, project, body.person, paused=body.paused, who=visitor_of(request).person.id)
        return JSONResponse({"go": f"/manage?project={project.name}#people"})

    @app.post("/manage/export")
    def export(request: Request, body: Exporting) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request, body.project)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "labels.jsonl"
            who = visitor_of(request).person.id
            exported = export_labels(store, project, file, kind=body.kind, heldout=body.heldout, who=who)
            content = file.read_bytes()
        name = f"{project.name}-{body.kind}-{exported.as_of}.jsonl"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "X-Kedge-Hash": exported.hash}
        return Response(content, media_type="application/x-ndjson", headers=headers)

    @app.post("/manage/verify")
    def verify(request: Request, body: Verifying) -> Response:  # pyright: ignore[reportUnusedFunction]
        project_for(site, request, body.project)
        problems = tampered(store)
        return JSONResponse({"say": "; ".join(problems) or "Judgments and audit are as they were written."})
