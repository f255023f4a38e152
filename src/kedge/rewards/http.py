"""A server as a reward source: batches go out as JSON, scores come back.

    POST {"answers": [{"prompt": [{"role", "content"}…], "answer", "is_finished", "solution", "extra"}…]}
    200  {"scores": [0.5, null, …]}        null: no score for this one

A batch that fails after its retries has no scores; the others keep theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from kedge.core.answers import Answer
from kedge.core.seeds import seed_for
from kedge.rewards.client import Call, CallFailed, Client, Endpoint, key_from
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, Source, score_of, unscored
from kedge.rewards.settings import HttpSource


def make(settings: HttpSource, context: RewardContext) -> Source:
    client = Client(
        Endpoint(
            url=settings.url,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            backoff_s=settings.backoff_s,
            workers=settings.workers,
            key=key_from(settings.key_variable, kind="http"),
        )
    )

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        batches = [answers[start : start + settings.batch] for start in range(0, len(answers), settings.batch)]
        results: dict[int, list[ScoreResult]] = {}
        calls: dict[int, Call[list[ScoreResult]]] = {}
        for index, batch in enumerate(batches):
            try:
                body = json.dumps({"answers": [as_json(answer) for answer in batch]}).encode()
            except (TypeError, ValueError) as error:  # `extra` holds something that JSON cannot
                results[index] = [unscored(str(error))] * len(batch)
                continue
            rng = Random(seed_for(context.seed, "reward/http", index))
            calls[index] = Call(body=body, read=partial(_read, rows=len(batch)), rng=rng)
        for index, result in zip(calls, client.call_all(list(calls.values())), strict=True):
            is_failed = isinstance(result, CallFailed)
            results[index] = [unscored(str(result))] * len(batches[index]) if is_failed else result
        return [result for index in range(len(batches)) for result in results[index]]

    return Source(judge)


def as_json(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": [{"role": role, "content": content} for role, content in answer.prompt],
        "answer": answer.text,
        "is_finished": answer.is_finished,
        "solution": answer.solution,
        "extra": dict(answer.extra),
    }


def _read(reply: Any, *, rows: int) -> list[ScoreResult]:
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise ValueError('expected an object with a list "scores"')
    if len(scores) != rows:
        raise ValueError(f"{len(scores)} scores for {rows} answers")
    return [_result(score) for score in scores]


def _result(score: Any) -> ScoreResult:
    if score is None:
        return unscored("the server gave no score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        return unscored(f"the server's score is not a number: {str(score)[:80]}")
    return score_of(score, giver="the server")
