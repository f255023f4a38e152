"""The studio's application: its routes behind one guard, for one person on this machine."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from kedge.core.errors import KedgeError
from kedge.core.quoting import one_line
from kedge.web.studio.chat_pages import add_chat
from kedge.web.studio.context import Studio
from kedge.web.studio.curves import add_curves
from kedge.web.studio.drafts import Outdated
from kedge.web.studio.editor import add_editor, add_new
from kedge.web.studio.guard import LocalDoor, StudioGuard
from kedge.web.studio.pages import page
from kedge.web.studio.running import add_running
from kedge.web.studio.uploads import add_uploads


def make_app(studio: Studio, door: LocalDoor) -> FastAPI:
    # Its own pages of documentation would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(StudioGuard, door=door)
    app.add_exception_handler(KedgeError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _not_here)
    add_running(app, studio)
    add_new(app, studio)
    add_editor(app, studio)
    add_uploads(app, studio)
    add_curves(app, studio)
    add_chat(app, studio)
    return app


def _refused(request: Request, error: Exception) -> Response:
    return _told(request, str(error), 409 if isinstance(error, Outdated) else 400)


def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, details['loc'][1:]))}: {details['msg']}" for details in error.errors()]
    return _told(request, one_line("; ".join(problems), 500), 422)


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = "there is nothing here" if error.status_code == 404 else str(error.detail)
    return _told(request, words, error.status_code)


def _told(request: Request, words: str, status: int) -> Response:
    """A page for who opens one, JSON for scripts."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        shown = page(request, "trouble.html.j2", "", words=words)
        return HTMLResponse(shown.body, status_code=status)
    return JSONResponse({"error": words}, status_code=status)
