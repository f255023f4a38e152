"""The first page: which projects there are for this person."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from kedge.label.team.members import projects_of
from kedge.web.pages import Site, links_for, page, visitor_of


def add_home(app: FastAPI, site: Site) -> None:
    @app.get("/")
    def home(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        person = visitor_of(request).person
        projects = [
            (project, links_for(site, person.role, project)) for project in projects_of(site.store, person)
        ]  # fmt: skip
        if len(projects) == 1 and site.entrance.local is None:
            first = "work" if person.role == "annotator" else "manage"
            return RedirectResponse(f"/{first}?project={projects[0][0].name}", status_code=303)
        return page(site, request, "home.html.j2", "", projects=projects)
