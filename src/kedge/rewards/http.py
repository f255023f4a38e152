"""A server as a reward source: batches go out as JSON, scores come back.

    POST {"answers": [{"prompt": [{"role", "content"}…], "answer", "is_finished", "solution", "extra"}…]}
    200  {"scores": [0.5, null, …]}        null: no score for this one

A batch that fails after its retries has no scores; the others keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from kedge.core.answers import Answer
from kedge.core.seeds import seed_for
from kedge.rewards.client import CallFailed, Endpoint, call, key_from
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, Source, unscored
from kedge.rewards.settings import HttpSource


def make(settings: HttpSource, context: RewardContext) -> Source:
    endpoint = Endpoint(
        url=settings.url,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        backoff_s=settings.backoff_s,
        key=key_from(settings.key_variable, kind="http"),
    )

    def score_batch(numbered: tuple[int, Sequence[Answer]]) -> list[ScoreResult]:
        index, answers = numbered
        rng = Random(seed_for(context.seed, "reward/http", index))
        try:
            body = {"answers": [as_json(answer) for answer in answers]}
            return call(endpoint, body, lambda reply: _read(reply, len(answers)), rng=rng)
        except (CallFailed, TypeError) as error:  # TypeError: `extra` holds something that JSON cannot
            return [unscored(str(error))] * len(answers)

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        batches = [answers[start : start + settings.batch] for start in range(0, len(answers), settings.batch)]
        with ThreadPoolExecutor(max_workers=settings.workers) as pool:
            return [result for batch in pool.map(score_batch, enumerate(batches)) for result in batch]

    return Source(judge)


def as_json(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": [{"role": role, "content": content} for role, content in answer.prompt],
        "answer": answer.text,
        "is_finished": answer.is_finished,
        "solution": answer.solution,
        "extra": dict(answer.extra),
    }


def _read(reply: Any, rows: int) -> list[ScoreResult]:
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise ValueError('expected an object with a list "scores"')
    if len(scores) != rows:
        raise ValueError(f"{len(scores)} scores for {rows} answers")
    return [_result(score) for score in scores]


def _result(score: Any) -> ScoreResult:
    if score is None:
        return unscored("the server gave no score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        return unscored(f"the server's score is not a number: {str(score)[:80]}")
    return ScoreResult(float(score))
