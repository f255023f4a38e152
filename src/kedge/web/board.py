"""`/board`: the board of models, read anew; what was lost is sent to people or becomes a badcase on a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from kedge.core.errors import DataError
from kedge.data.examples import Message
from kedge.data.messages import as_messages
from kedge.label.accounts import pseudonym
from kedge.label.audit import note
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.items import add_items
from kedge.report.board.page import HostedBoard, render_board
from kedge.report.board.records import Board, LostItem
from kedge.web.pages import Site, project_for, visitor_of
from kedge.web.roles import roles_for

_FRESH_S = 30.0
Words = Annotated[str, Field(max_length=10_000)]


class Sending(BaseModel):
    """A lost item, by what the page knows of it."""

    model_config = ConfigDict(extra="forbid")
    project: str
    model: Words
    column: Words
    item: Words


class Casing(Sending):
    """The same, with what makes a badcase of it."""

    why: Annotated[str, Field(min_length=1, max_length=2000)]
    check: Literal["contains", "lacks", "number", "regex", "refusal"]
    """Checks of the text alone: what asks a judge or a model is added on the command line."""
    value: Annotated[str, Field(min_length=1, max_length=2000)]
    severity: Literal["block", "warn"] = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadcaseDraft:
    """A badcase to be: the answer by its file and id, and who asks for it, by pseudonym."""

    source: tuple[str, str]
    why: str
    check: str
    value: str
    severity: Literal["block", "warn"]
    person: str


AddBadcase = Callable[[BadcaseDraft], str]
"""Keeps a badcase and gives its id."""


@dataclass(slots=True)
class _Kept:
    """The board of the last half minute: reading all files takes a while."""

    read: Callable[[], Board]
    board: Board | None = None
    at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> Board:
        with self.lock:
            if self.board is None or time.monotonic() - self.at > _FRESH_S:
                self.board, self.at = self.read(), time.monotonic()
            return self.board

    def forget(self) -> None:
        with self.lock:
            self.board = None


def add_board(app: FastAPI, site: Site, read: Callable[[], Board], add_badcase: AddBadcase | None = None) -> None:
    kept = _Kept(read)
    writing = threading.Lock()

    @app.get("/board")
    def board(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        project, visitor = project_for(site, request), visitor_of(request)
        role = visitor.person.role
        hosted = HostedBoard(
            nonce=request.state.nonce,
            csrf=visitor.csrf or "",
            project=project.name,
            sends=role in roles_for("POST", "/board/send"),
            adds_badcases=add_badcase is not None and role in roles_for("POST", "/board/badcase"),
        )
        return HTMLResponse(render_board(kept.now(), hosted))

    @app.post("/board/send")
    def send(request: Request, body: Sending) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request, body.project)
        lost = _find(kept.now(), body)
        added = add_items(site.store, project, [draft_of(lost, kept.now().baseline or "")], origin="board")
        return JSONResponse({"say": f"sent to {project.name}" if added.items else f"{project.name} has it already"})

    if add_badcase is None:
        return

    @app.post("/board/badcase")
    def badcase(request: Request, body: Casing) -> Response:  # pyright: ignore[reportUnusedFunction]
        project, person = project_for(site, request, body.project), visitor_of(request).person
        lost = _find(kept.now(), body)
        if lost.source is None:
            raise DataError(f"no badcase can be made of it: {lost.problem}")
        fields = body.model_dump(include={"why", "check", "value", "severity"})
        draft = BadcaseDraft(source=lost.source, person=pseudonym(project, person.uid), **fields)
        with writing:
            case = add_badcase(draft)
        about = {"project": project.name, "case": case}
        site.store.write(lambda connection: note(site.store, connection, "board.badcase", about, who=person.id))
        kept.forget()
        return JSONResponse({"say": f"{case}: added; every gate replays it"})


def _find(board: Board, body: Sending) -> LostItem:
    for lost in board.lost.items:
        if (lost.model, lost.column, lost.item) == (body.model, body.column, body.item):
            return lost
    raise HTTPException(404, "there is no such item")


def draft_of(lost: LostItem, baseline: str) -> Draft:
    """A lost item as a pair to compare: the model's answer and the baseline's, on sides that are drawn."""
    if lost.answer == lost.baseline_answer:
        raise DataError("both answers are the same; there is nothing to compare")
    rows = [{"role": role, "content": text} for role, text in lost.prompt]
    return Draft(
        prompt=as_messages(rows, text_role="user", field="prompt"),
        answers=(
            DraftAnswer(text=(Message("assistant", lost.answer),), model=lost.model),
            DraftAnswer(text=(Message("assistant", lost.baseline_answer),), model=baseline),
        ),
        priority=1.0,
        origin=f"board: {lost.column}, {lost.item}"[:2000],
    )
