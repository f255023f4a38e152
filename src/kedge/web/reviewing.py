"""`/review`: disagreements one after the other, and labels of who was paused, with what each person said; decide, or
ask for a clearer guideline."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from kedge.label.team.review import Case, Vote, ask_for_guideline, decide, read_docket
from kedge.web.desk import STEPS, DecisionBody
from kedge.web.pages import Site, page, project_for, visitor_of

_AT_ONCE = 5
_LEADERS = ("owner", "manager")


class Deciding(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    item: Annotated[str, Field(max_length=64)]
    decision: DecisionBody


class Asking(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    item: Annotated[str, Field(max_length=64)]
    words: Annotated[str, Field(max_length=2000)]


def add_review(app: FastAPI, site: Site) -> None:
    @app.get("/review")
    def review(request: Request, skip: Annotated[int, Query(ge=0, le=2**31)] = 0) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        person, project = visitor_of(request).person, project_for(site, request)
        docket = read_docket(site.store, project, _AT_ONCE, skip)
        values: dict[str, Any] = {
            "docket": docket,
            "cases": [shown_case(case) for case in docket.cases],
            "steps": STEPS,
            "skip": skip,
            "asks": project.questions,
        }
        return page(site, request, "review.html.j2", "review", project, **values, leads=person.role in _LEADERS)

    @app.post("/review/decide")
    def decide_one(request: Request, body: Deciding) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request, body.project)
        decide(site.store, project, visitor_of(request).person, body.item, body.decision.decision())
        return JSONResponse({"say": "Decided."})

    @app.post("/review/ask")
    def ask(request: Request, body: Asking) -> Response:  # pyright: ignore[reportUnusedFunction]
        project = project_for(site, request, body.project)
        ask_for_guideline(site.store, project, visitor_of(request).person, body.item, body.words)
        return JSONResponse({"say": "Kept as a question to the guideline."})


def shown_case(case: Case) -> dict[str, Any]:
    """A disagreement; people have numbers, so that no name weighs in."""
    return {
        "key": case.key,
        "kind": case.kind,
        "is_split": case.is_split,
        "prompt": case.prompt,
        "answers": case.answers,
        "votes": [(number, words_for(vote), vote) for number, vote in enumerate(case.votes, start=1)],
    }


def words_for(vote: Vote) -> str:
    """What somebody said, in words."""
    if vote.verdict == "both_bad":
        return "both are bad"
    if vote.ranking is not None:
        places = sorted(set(vote.ranking))
        groups = [[str(n + 1) for n, rank in enumerate(vote.ranking) if rank == place] for place in places]
        return " > ".join("=".join(group) for group in groups)
    if vote.verdict == "thumb":
        return "good" if vote.outcome == 1 else "bad"
    return STEPS[(vote.outcome or 0) + 3]
