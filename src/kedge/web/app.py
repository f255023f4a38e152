"""The application: the routes of all pages behind one guard."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kedge.core.errors import KedgeError
from kedge.core.quoting import one_line
from kedge.label.work import NoSuchAssignment
from kedge.web.chatting import ChatModel, add_chat
from kedge.web.desk import add_desk
from kedge.web.entrance import Entrance
from kedge.web.guard import Guard
from kedge.web.home import add_home
from kedge.web.joining import add_accounts, add_start
from kedge.web.overview import add_manage, add_me
from kedge.web.pages import Site
from kedge.web.reviewing import add_review


def make_app(entrance: Entrance, *, chat_models: Sequence[ChatModel] = ()) -> FastAPI:
    """All pages for those whom the entrance lets in; the chat only where there are models to talk with."""
    site = Site(entrance=entrance, hosted=frozenset({"/chat"} if chat_models else ()))
    # Its own pages of documentation would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, entrance=entrance)
    app.add_exception_handler(KedgeError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _not_here)
    add_home(app, site)
    add_desk(app, site)
    add_start(app, site)
    add_me(app, site)
    add_review(app, site)
    add_manage(app, site)
    if entrance.local is None:
        add_accounts(app, site)
    if chat_models:
        add_chat(app, site, chat_models)
    return app


def _refused(request: Request, error: Exception) -> Response:
    """What the store refuses is told; another's assignment looks like one that never was."""
    del request
    return JSONResponse({"error": str(error)}, status_code=404 if isinstance(error, NoSuchAssignment) else 400)


def _malformed(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, found['loc'][1:]))}: {found['msg']}" for found in error.errors()]
    return JSONResponse({"error": one_line("; ".join(problems), 500)}, status_code=422)


def _not_here(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    words = "there is nothing here" if error.status_code == 404 else str(error.detail)
    return JSONResponse({"error": words}, status_code=error.status_code)
