"""Answers with scores, written short."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kedge.evaluate.answers import ModelAnswer


@pytest.fixture
def scored() -> Callable[..., ModelAnswer]:
    def make(
        model: str,
        prompt: int,
        reward: float,
        *,
        tokens: tuple[int, ...] = (1, 2, 3),
        text: str | None = None,
        number: int = 0,
        is_finished: bool = True,
        kl: float | None = None,
    ) -> ModelAnswer:
        return ModelAnswer(
            model=model,
            prompt=prompt,
            number=number,
            tokens=tokens,
            text=" ".join(map(str, tokens)) if text is None else text,
            is_finished=is_finished,
            scores={"reward": reward},
            kl=kl,
        )

    return make
