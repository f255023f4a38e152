"""Pages from templates: everything that comes from data is escaped, styles and scripts are ours and stand inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException

from kedge.core.quoting import count, escaped
from kedge.label.accounts import Role
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.team.members import projects_of
from kedge.report.pages import asset, marked
from kedge.web.entrance import Entrance, Visitor
from kedge.web.roles import roles_for
from kedge.web.text import markdown

_LINKS = (
    ("Work", "/work"), ("Rank", "/rank"), ("Chat", "/chat"), ("Me", "/me"), ("Review", "/review"),
    ("Manage", "/manage"), ("Watch", "/watch/"), ("Board", "/board"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every page knows: where it is, and which of the optional pages there are."""

    entrance: Entrance
    hosted: frozenset[str] = field(default_factory=frozenset[str])
    """Paths of optional pages that are there: /chat, /watch/, /board."""

    @property
    def store(self) -> Store:
        return self.entrance.store


def visitor_of(request: Request) -> Visitor:
    visitor = request.state.visitor
    assert isinstance(visitor, Visitor)  # the guard lets nobody else in
    return visitor


def project_for(site: Site, request: Request, name: str = "") -> Project:
    """The project that is asked for, or the first one; another's is not there."""
    projects = projects_of(site.store, visitor_of(request).person)
    wanted = name or request.query_params.get("project", "")
    for project in projects:
        if not wanted or project.name == wanted:
            return project
    raise HTTPException(404, "there is no such project")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kedge.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions: dict[str, Any] = {"markdown": markdown, "count": count}
    environment.globals.update(functions)
    environment.filters["marked"] = marked
    return environment


@cache
def _style() -> Markup:
    charts = asset("kedge.report.charts", "chart.css")
    return asset("kedge.report", "page.css") + charts + asset("kedge.web", "pages.css")


_DESK = ("ranking", "differences", "desk")
_SCRIPTS = {"chat": ("chat",), "review": ("review",), "start": _DESK, "work": _DESK, "rank": _DESK}
"""By page, what it needs beside what all share."""


@cache
def _script(page: str) -> Markup:
    names = ("common", *_SCRIPTS.get(page, ()))
    return Markup("").join(asset("kedge.web", f"scripts/{name}.js") for name in names)


def fragment(template: str, **values: Any) -> str:
    """A part of a page. Characters that turn a line around or hide are written out."""
    return escaped(_environment().get_template(template).render(**values))


def page(
    site: Site, request: Request, template: str, name: str, project: Project | None = None, **values: Any
) -> HTMLResponse:
    """A whole page; `name` is its path without the slash."""
    visitor: Visitor | None = request.state.visitor
    person = None if visitor is None else visitor.person
    is_local = site.entrance.local is not None
    html = fragment(
        template,
        page=name,
        project="" if project is None else project.name,
        links=[] if person is None or project is None else links_for(site, person.role, project),
        name="" if person is None or is_local else person.email or "",
        has_logout=person is not None and not is_local,
        csrf="" if visitor is None else visitor.csrf or "",
        nonce=request.state.nonce,
        style=_style(),
        script=_script(name),
        **values,
    )
    return HTMLResponse(html)


def links_for(site: Site, role: Role, project: Project | None) -> Sequence[tuple[str, str]]:
    """The pages that a role may open, in the order of the line at the top."""
    query = "" if project is None else f"?project={project.name}"
    asks_rank = project is not None and "rank" in project.questions
    links: list[tuple[str, str]] = []
    for name, path in _LINKS:
        is_there = {"/rank": asks_rank}.get(path, path not in ("/chat", "/watch/", "/board") or path in site.hosted)
        if is_there and role in roles_for("GET", path):
            links.append((name, path if path in ("/watch/", "/board") else path + query))
    return links
