"""Judges beside people, where both labelled the same two answers: κ and agreement, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kedge.core.errors import DataError
from kedge.data.examples import Pair
from kedge.data.reading import read
from kedge.feedback.alt_test import Choice
from kedge.feedback.judge_figures import JudgedItem, accuracy, agreement_figures
from kedge.label.incoming import Draft
from kedge.stages.label.deciding import side_of
from kedge.stages.label.judging import Comparison, key_of, text_of

PeopleOf = Mapping[int, Mapping[str, Choice]]
"""By the number of a comparison, what people said of it; a label of theirs is a voice."""


def people_of(source: str, drafts: Sequence[Draft], comparisons: Sequence[Comparison]) -> PeopleOf:
    """What people's pairs in `source` say of these comparisons; a DataError where they are about none of them."""
    numbers = {comparison.key: number for number, comparison in enumerate(comparisons)}
    verdicts: dict[int, dict[str, Choice]] = {}
    pairs = 0
    for pair in read(source):
        if not isinstance(pair, Pair):
            raise DataError(f"{pair.origin}: `beside` takes pairs that people labelled, and this is none")
        pairs += 1
        number = numbers.get(key_of(pair.prompt, (pair.chosen, pair.rejected)))
        if number is not None:
            comparison = comparisons[number]
            first = drafts[comparison.task].answers[comparison.first].text
            is_first = text_of(pair.chosen) == text_of(first)
            certainty = 1.0 if pair.certainty is None else pair.certainty
            side = side_of(certainty if is_first else 1 - certainty)
            assert side is not None
            verdicts.setdefault(number, {})[str(pair.origin)] = side
    if not verdicts:
        raise DataError(
            f"{source}: none of its {pairs:,} pairs is about two answers of these tasks, so that judges cannot be "
            "measured beside people; let both label the same tasks, or leave `beside` out"
        )
    return verdicts


def beside_people(
    people: PeopleOf, preferences: Sequence[float | None], drafts: Sequence[Draft], comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """κ and agreement of labels with people's, on what people labelled. `preferences` are of the first answer; one that
    is None, because nothing could be read, agrees with nobody."""
    items = [
        JudgedItem(prompt=drafts[comparisons[number].task].prompt, people=own, lengths=(0, 0))
        for number, own in people.items()
    ]
    verdicts: list[Choice | None] = [side_of(preferences[number]) for number in people]
    figures = {"kappa": agreement_figures(items, verdicts)["kappa"], "agreement": accuracy(items, verdicts)}
    return {name: figure and asdict(figure) for name, figure in figures.items()}
