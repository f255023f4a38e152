"""Two models' answers to the same prompts, put to a judge in both orders."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.data.examples import Prompt
from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.judged import Judged
from kedge.rewards.pairwise import Panelist, TwoAnswers, refuse_failures


def compared(
    judge: Panelist,
    pairs: Sequence[tuple[ModelAnswer, ModelAnswer]],
    prompts: Sequence[Prompt],
    *,
    max_failed: float,
) -> list[Judged]:
    """What the judge says of the first answer of each pair beside the second; more failed calls than that share are an
    error."""
    results = judge.compare(
        [
            TwoAnswers(
                prompt=tuple((message.role, message.content) for message in prompts[own.prompt].prompt),
                first=own.text,
                second=other.text,
            )
            for own, other in pairs
        ]
    )
    refuse_failures(judge.name, results, max_share=max_failed)
    return [
        Judged(
            prompt=own.prompt,
            as_first=result.as_a,
            as_second=result.as_b,
            length=len(own.tokens),
            baseline_length=len(other.tokens),
            probability=result.probability,
        )
        for (own, other), result in zip(pairs, results, strict=True)
    ]
