"""The studio's pages from templates: the look of all pages, with a few rules and scripts of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kedge.core.files import hash_bytes
from kedge.core.quoting import count, escaped
from kedge.core.yaml.source import KeyPath
from kedge.report.pages import asset, marked
from kedge.web.studio.drafts import key_of

LINKS = (("Runs", "/"), ("New run", "/new"), ("Data", "/data"), ("Curves", "/curves"), ("Chat", "/chat"))
_SCRIPTS = {
    "new": ("upload", "new"),
    "data": ("upload",),
    "recipe": ("recipe",),
    "run": ("run",),
    "curves": ("curves",),
    "chat": ("chat",),
}
"""By page, what it needs beside what all share."""


def element_id(path: KeyPath) -> str:
    """The id of a field's control in a page: paths hold anything that a user may write."""
    return f"f-{hash_bytes(key_of(path).encode())[:12]}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("kedge.web.studio", "templates"), PackageLoader("kedge.web", "templates")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions: dict[str, Any] = {"count": count, "key_of": key_of, "element_id": element_id}
    environment.globals.update(functions)
    environment.filters["marked"] = marked
    return environment


@cache
def _style() -> Markup:
    charts = asset("kedge.report.charts", "chart.css")
    pages = asset("kedge.report", "page.css") + charts + asset("kedge.web", "pages.css")
    return pages + asset("kedge.web.studio", "studio.css")


@cache
def _script(page: str) -> Markup:
    own = [asset("kedge.web.studio", f"scripts/{name}.js") for name in _SCRIPTS.get(page, ())]
    charts = [asset("kedge.report.charts", "chart.js")] if page in ("run", "curves") else []
    return Markup("").join([asset("kedge.web", "scripts/common.js"), *charts, *own])


def fragment(template: str, **values: Any) -> str:
    """A part of a page. Characters that turn a line around or hide are written out."""
    return escaped(_environment().get_template(template).render(**values))


def page(request: Request, template: str, name: str, **values: Any) -> HTMLResponse:
    """A whole page; `name` is its path without the slash."""
    html = fragment(
        template,
        page=name,
        project="",
        links=LINKS,
        name="",
        has_logout=False,
        csrf="",
        nonce=request.state.nonce,
        style=_style(),
        script=_script(name),
        **values,
    )
    return HTMLResponse(html)
