"""Scored pairs made to order: by hand, or drawn from a world where quality, length and labels are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kedge.report.reward import ScoredPair

Make = Callable[..., ScoredPair]


@pytest.fixture
def make() -> Make:
    """One pair; a plain number stands for a single member."""

    def build(
        chosen: float | tuple[float, ...],
        rejected: float | tuple[float, ...],
        *,
        lengths: tuple[int, int] = (10, 10),
        margin: float | None = None,
        prompt: str = "",
        where: str = "pairs.jsonl:1",
        texts: tuple[str, str] = ("good", "bad"),
    ) -> ScoredPair:
        return ScoredPair(
            chosen=chosen if isinstance(chosen, tuple) else (chosen,),
            rejected=rejected if isinstance(rejected, tuple) else (rejected,),
            chosen_length=lengths[0],
            rejected_length=lengths[1],
            margin=margin,
            where=where,
            prompt=prompt,
            chosen_text=texts[0],
            rejected_text=texts[1],
        )

    return build


@pytest.fixture
def world(make: Make) -> Callable[..., list[ScoredPair]]:
    """Pairs with prompts of their own: quality differs by q > 0, the longer is chosen in a share `longer` of them.

    The score of an answer is `quality` times its quality, plus `length` times its hundreds of tokens, plus noise.
    """

    def build(
        n: int,
        *,
        quality: float = 0.0,
        length: float = 0.0,
        noise: float = 1.0,
        longer: float = 0.5,
        seed: int = 0,
    ) -> list[ScoredPair]:
        rng = np.random.default_rng(seed)
        pairs = list[ScoredPair]()
        for row in range(n):
            short, extra = int(rng.integers(20, 120)), int(rng.integers(1, 200))
            is_longer = row < round(longer * n)
            lengths = (short + extra, short) if is_longer else (short, short + extra)
            scores = [
                quality * sign / 2 + length * tokens / 100 + noise * float(rng.normal())
                for sign, tokens in zip((1, -1), lengths, strict=True)
            ]
            pairs.append(make(*scores, lengths=lengths, prompt=f"prompt {row}", where=f"pairs.jsonl:{row + 1}"))
        return pairs

    return build
