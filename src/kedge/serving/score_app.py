"""The route of a reward model: POST /score in the form that the reward source `{kind: http}` reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kedge.core.answers import Answer
from kedge.core.errors import DataError
from kedge.data.messages import as_messages
from kedge.rewards.failures import ScoreResult, Source
from kedge.rewards.model import on_text
from kedge.rewards.settings import ModelSource
from kedge.serving.app import Door, model_routes
from kedge.serving.jobs import Job
from kedge.serving.wire import AnswerToScore, ApiError, ScoreRequest, read_request
from kedge.stages.rl.judge import Judge
from kedge.stages.rl.reward import encoded_answer, scorer_of

Compute = Callable[[object, Sequence[Sequence[Answer]]], list[list[ScoreResult]]]


def scoring(judge: Judge, objective: str | None) -> Compute:
    """What a worker computes: the scores of each request's answers, of all requests together."""
    settings = ModelSource.model_validate({"kind": "model", "from": judge.place, "objective": objective})
    source = on_text(scorer_of(judge), settings, partial(encoded_answer, judge))
    return partial(_scores, source)


def _scores(source: Source, kind: object, batch: Sequence[Sequence[Answer]]) -> list[list[ScoreResult]]:
    del kind
    results = iter(source.judge([answer for answers in batch for answer in answers]))
    return [list(islice(results, len(answers))) for answers in batch]


def score_app(door: Door) -> FastAPI:
    app = model_routes(door)

    @app.post("/score")
    async def score(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        asked = read_request(await door.body(request), ScoreRequest)
        answers = [_answer(row, number) for number, row in enumerate(asked.answers)]
        results: list[ScoreResult] = []
        if answers:
            job = Job(kind="score", rows=len(answers), payload=answers)
            results = cast("list[ScoreResult]", await door.computed(request, job))
        return JSONResponse({"scores": [None if math.isnan(result.score) else result.score for result in results]})

    return app


def _answer(row: AnswerToScore, number: int) -> Answer:
    try:
        prompt = as_messages(row.prompt, text_role="user", field=f"answers.{number}.prompt") if row.prompt else ()
    except DataError as error:
        raise ApiError(400, str(error), param=f"answers.{number}.prompt") from None
    return Answer(
        prompt=tuple((message.role, message.content) for message in prompt),
        text=row.answer,
        is_finished=row.is_finished,
        solution=row.solution,
        extra=row.extra,
    )
