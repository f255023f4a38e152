"""The application: the routes of all pages behind one guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kedge.core.errors import KedgeError
from kedge.core.quoting import one_line
from kedge.label.work import NoSuchAssignment
from kedge.report.board.records import Board
from kedge.report.live.feed import RunFeed
from kedge.report.live.web import make_app as watch_app
from kedge.web.board import AddBadcase, add_board
from kedge.web.chat_models import ChatModel
from kedge.web.chatting import add_chat
from kedge.web.desk import add_desk
from kedge.web.entrance import Entrance
from kedge.web.guard import Guard
from kedge.web.home import add_home
from kedge.web.joining import add_accounts, add_start
from kedge.web.overview import add_leading, add_manage, add_me
from kedge.web.pages import Site
from kedge.web.reviewing import add_review


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is hosted beside the labels."""

    chat_models: Sequence[ChatModel] = ()
    feeds: Sequence[RunFeed] = ()
    """Runs to watch."""
    board: Callable[[], Board] | None = None
    """Reads the board anew."""
    add_badcase: AddBadcase | None = None
    """Makes a badcase of what the board has lost."""

    def paths(self) -> frozenset[str]:
        there = {"/chat": self.chat_models, "/watch/": self.feeds, "/board": self.board}
        return frozenset(path for path, wanted in there.items() if wanted)


NOTHING = Extras()


def make_app(entrance: Entrance, extras: Extras = NOTHING) -> FastAPI:
    """All pages for those whom the entrance lets in, and what is hosted beside them."""
    site = Site(entrance=entrance, hosted=extras.paths())
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
    add_leading(app, site)
    if entrance.local is None:
        add_accounts(app, site)
    if extras.chat_models:
        add_chat(app, site, extras.chat_models)
    if extras.board is not None:
        add_board(app, site, extras.board, extras.add_badcase)
    if extras.feeds:
        app.mount("/watch", watch_app(extras.feeds, token=None, hosts=()))
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
