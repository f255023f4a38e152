"""From a link to the queue: a password, the guideline with its quiz, practice; and logging in and out."""

from __future__ import annotations

from threading import BoundedSemaphore
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from kedge.label.accounts import LEAST_PASSWORD, Person, accept_invite, check_password, close_session, open_session
from kedge.label.projects import read_guideline
from kedge.label.team.members import Feedback, next_practice, practice_progress, practise, step_of, take_quiz
from kedge.label.team.quiz import TRIES, split_quiz
from kedge.web.desk import STEPS, Asked, Judged, bounded, desk_values, shown_guideline, shown_task
from kedge.web.entrance import COOKIE
from kedge.web.pages import Site, fragment, page, project_for, visitor_of

_HASHING = BoundedSemaphore(4)
"""argon2id takes 64 MiB a password: so many at once, and no more."""
Words = Annotated[str, Field(max_length=1000)]


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid")
    email: Words
    password: Words


class Joining(BaseModel):
    model_config = ConfigDict(extra="forbid")
    token: Words
    password: Words


class QuizAnswers(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    answers: list[StrictInt]


def add_accounts(app: FastAPI, site: Site) -> None:
    """Who has no session yet, and how one ends."""

    @app.get("/login")
    def login_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        return page(site, request, "login.html.j2", "login")

    @app.get("/join")
    def join_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return page(site, request, "join.html.j2", "join", least=LEAST_PASSWORD)

    @app.post("/login")
    def login(request: Request, body: Login) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not site.entrance.logins.may(request.state.peer):
            return _too_often()
        with _HASHING:
            person = check_password(site.store, body.email, body.password)
        if person is None:
            return JSONResponse({"error": "This address with this password is not known here."}, status_code=403)
        return _let_in(site, person)

    @app.post("/join")
    def join(request: Request, body: Joining) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not site.entrance.logins.may(request.state.peer):
            return _too_often()
        with _HASHING:
            person = accept_invite(site.store, body.token, body.password)
        return _let_in(site, person)

    @app.post("/logout")
    def logout(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        close_session(site.store, request.cookies.get(COOKIE, ""))
        answer = JSONResponse({"go": "/login"})
        answer.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="strict")
        return answer


def _too_often() -> Response:
    error = {"error": "Too many tries from your address. Wait a minute, then try again."}
    return JSONResponse(error, status_code=429, headers={"Retry-After": "60"})


def _let_in(site: Site, person: Person) -> Response:
    identity, _ = open_session(site.store, person)
    answer = JSONResponse({"go": "/"})
    answer.set_cookie(COOKIE, identity, path="/", secure=True, httponly=True, samesite="strict")
    return answer


def add_start(app: FastAPI, site: Site) -> None:
    """What stands before the queue."""

    @app.get("/start")
    def start(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request)
        step = step_of(site.store, project, person)
        if step == "work":
            return RedirectResponse(f"/work?project={project.name}", status_code=303)
        if step == "practice":
            values = desk_values(site, project, person, "Practice")
            return page(site, request, "work.html.j2", "start", project, **values)
        _, quiz = split_quiz(read_guideline(site.store, project.guideline))
        guideline = shown_guideline(site, project.guideline)
        values: dict[str, Any] = {"step": step, "quiz": quiz, "guideline": guideline, "tries": TRIES}
        return page(site, request, "start.html.j2", "start", project, **values)

    @app.post("/start/quiz")
    def quiz(request: Request, body: QuizAnswers) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request, body.project)
        result = take_quiz(site.store, project, person, body.answers)
        if result.passed or not result.tries_left:
            return JSONResponse({"go": f"/start?project={project.name}"})
        words = f"{result.right} of {result.questions} are right. Read the guideline again; one try is left."
        return JSONResponse({"say": words})

    @app.post("/start/next")
    def next_one(request: Request, body: Asked) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request, body.project)
        step = step_of(site.store, project, person)
        task = next_practice(site.store, project, person) if step == "practice" else None
        if task is None:
            return JSONResponse(
                {"task": None, "go": f"/{'start' if step != 'work' else 'work'}?project={project.name}"}
            )
        done, wanted = practice_progress(site.store, project, person)
        shown = shown_task(project, task, is_practice=True)
        return JSONResponse({"task": shown, "progress": f"{done + 1} of {wanted}"})

    @app.post("/start/practise")
    def practise_one(request: Request, body: Judged) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request, body.project)
        decision = bounded(site, person, body.assignment, body.decision.decision())
        told = practise(site.store, project, person, body.assignment, decision)
        html = fragment("feedback.html.j2", feedback=told, expected=_expected(told))
        return JSONResponse({"feedback": html})


def _expected(feedback: Feedback) -> str:
    expected = feedback.expected
    if isinstance(expected, tuple):
        return "the places " + ", ".join(f"answer {place + 1}: {rank}" for place, rank in enumerate(expected))
    return STEPS[expected + 3]
