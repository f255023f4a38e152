"""The desk: `/work` and `/rank`. An item comes, a judgment goes, both in one message; nothing in it tells gold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from kedge.label.accounts import Person
from kedge.label.judging import judge, undo
from kedge.label.projects import Project, read_guideline
from kedge.label.questions import FLAGS, Decision, Verdict
from kedge.label.team.members import may_take_harm, pause_if_careless, step_of
from kedge.label.team.pace import labels_today, shown_for
from kedge.label.team.quiz import split_quiz
from kedge.label.work import Task, give_back, next_task
from kedge.web.pages import Site, fragment, page, project_for, visitor_of
from kedge.web.text import markdown

STEPS = (
    "A is much better", "A is better", "A is slightly better", "tie",
    "B is slightly better", "B is better", "B is much better",
)  # fmt: skip
FLAG_WORDS: Mapping[str, str] = {
    "harmful": "harmful or upsetting",
    "private": "somebody's private data",
    "broken": "broken: cut off, garbled, empty",
    "unclear": "the prompt is unclear",
    "known_model": "I can tell which model wrote it",
}
REASONS = ("I do not understand the prompt", "I know too little about it", "Not a language of mine", "It upsets me")
KINDS = {
    "pair": "Two answers to compare",
    "rank": "Answers to put in order",
    "thumb": "An answer to judge",
    "write": "A prompt to answer",
}
GOAL = 100
"""Labels a day that the bar at the top counts towards."""
_LONG = 1200


class DecisionBody(BaseModel):
    """A judgment as a page sends it; whether it answers what was asked is checked by the store."""

    model_config = ConfigDict(extra="forbid")
    verdict: Verdict
    outcome: StrictInt | None = None
    ranking: list[StrictInt] | None = None
    axes: dict[str, StrictInt] | None = None
    reason: str | None = None
    edit: str | None = None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    idle_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    flags: dict[str, str] = {}

    def decision(self) -> Decision:
        values = self.model_dump()
        values["ranking"] = None if self.ranking is None else tuple(self.ranking)
        return Decision(**values)


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    kind: str | None = None
    guideline: int = 0
    """The version that the page shows; a newer one comes with the reply."""


class Judged(Asked):
    assignment: str
    decision: DecisionBody


class Undone(Asked):
    assignment: str
    current: str = ""
    """What the page shows now, which is given back first."""


def add_desk(app: FastAPI, site: Site) -> None:
    @app.get("/work")
    def work(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        return _page(site, request, "work", "Work")

    @app.get("/rank")
    def rank(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _page(site, request, "rank", "Rank")

    @app.post("/work/next")
    def next_one(request: Request, body: Asked) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _next(site, request, body)

    @app.post("/work/judge")
    def judge_one(request: Request, body: Judged) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request, body.project)
        decision = bounded(site, person, body.assignment, body.decision.decision())
        judge(site.store, project, person, body.assignment, decision)
        return _next(site, request, body)

    @app.post("/work/undo")
    def undo_one(request: Request, body: Undone) -> Response:  # pyright: ignore[reportUnusedFunction]
        person = visitor_of(request).person
        undo(site.store, person, body.assignment)
        if body.current and body.current != body.assignment:
            give_back(site.store, person, body.current)
        return _next(site, request, body)


def bounded(site: Site, person: Person, assignment: str, decision: Decision) -> Decision:
    """The decision with no more time than has passed since the item was shown: hours are paid."""
    most = shown_for(site.store, person, assignment)
    return replace(
        decision, seconds=min(decision.seconds, most), idle_seconds=min(decision.idle_seconds, most)
    )  # fmt: skip


def _page(site: Site, request: Request, name: str, title: str) -> Response:
    person, project = visitor_of(request).person, project_for(site, request)
    if step_of(site.store, project, person) != "work":
        return RedirectResponse(f"/start?project={project.name}", status_code=303)
    return page(
        site, request, "work.html.j2", name, project, **desk_values(site, project, person, title)
    )  # fmt: skip


def desk_values(site: Site, project: Project, person: Person, title: str) -> dict[str, Any]:
    """What the page around items needs."""
    return {
        "title": title,
        "guideline": shown_guideline(site, project.guideline),
        "flags": [(name, FLAG_WORDS[name]) for name in FLAGS],
        "reasons": REASONS,
        "today": labels_today(site.store, project, person),
        "goal": GOAL,
    }


def shown_guideline(site: Site, number: int) -> str:
    """The guideline as HTML, without the quiz and its answers."""
    return markdown(split_quiz(read_guideline(site.store, number))[0])


def _next(site: Site, request: Request, body: Asked) -> Response:
    person, project = visitor_of(request).person, project_for(site, request, body.project)
    if pause_if_careless(site.store, project, person) or step_of(site.store, project, person) != "work":
        return JSONResponse({"task": None, "go": f"/start?project={project.name}"})
    task = next_task(site.store, project, may_take_harm(site.store, project, person), body.kind)
    if person.role == "machine":
        return JSONResponse({"task": None if task is None else raw_task(task)})
    reply: dict[str, Any] = {"task": None if task is None else shown_task(project, task)}
    if task is not None and task.guideline != body.guideline:
        reply["guideline"] = {"number": task.guideline, "html": shown_guideline(site, task.guideline)}
    return JSONResponse(reply)


def shown_task(project: Project, task: Task, *, is_practice: bool = False) -> dict[str, Any]:
    """An item as a part of the page. What is not here, nobody who labels can find out."""
    length = sum(len(message.content) for message in task.prompt)
    count = len(task.answers)
    names = ("Answer A", "Answer B") if task.kind == "pair" else tuple(f"Answer {n + 1}" for n in range(count))
    html = fragment(
        "task.html.j2",
        task=task,
        names=("Answer",) if count == 1 else names,
        kind_words=KINDS[task.kind],
        is_long=length > _LONG,
        is_practice=is_practice,
        steps=STEPS,
        axes=project.questions.get("axes", ()),
        asks=project.questions.get(task.kind) or {},
        can_edit=task.kind == "write" or "edit" in project.questions,
    )
    return {"assignment": task.assignment, "kind": task.kind, "guideline": task.guideline, "html": html}


def raw_task(task: Task) -> dict[str, Any]:
    """The same for machines: texts as they are."""
    return {
        "assignment": task.assignment,
        "kind": task.kind,
        "prompt": [{"role": message.role, "content": message.content} for message in task.prompt],
        "answers": [[{"role": m.role, "content": m.content} for m in answer] for answer in task.answers],
        "questions": dict(task.questions),
    }
