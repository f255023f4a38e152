"""From the scored answers of a round to preferences: which answer is held against which, and what makes no pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from kedge.core.seeds import item_at, seed_for
from kedge.data.batching import LabelledAnswers, TokenSequence
from kedge.data.converting import to_fields
from kedge.data.examples import Message, Pair
from kedge.data.reading import prompt_key
from kedge.data.writing import row_writer
from kedge.stages.preference.online_settings import OnlineSettings
from kedge.stages.preference.preferences import Preference, Preferences
from kedge.stages.rl.answers import Groups, ScoredAnswer
from kedge.stages.rl.prompts import PromptDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Two answers to one prompt."""

    chosen: ScoredAnswer
    rejected: ScoredAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The pairs of a round in the order of their prompts, why so many prompts have none, and what else is no pair."""

    sides: Sequence[Sides]
    without: Mapping[str, int]
    left_out: Mapping[str, int]


def pairs_of(groups: Groups, online: OnlineSettings) -> Made:
    """An answer without words is no side of a pair: beating nothing teaches no preference, and `kedge data check` says
    so. Nor are two answers of the same words one, though a judge may score them apart."""
    found, without, left_out = list[Sides](), Counter[str](), Counter[str]()
    for group in sorted(groups, key=lambda group: group[0].prompt):
        spoken = [one for one in group if one.text.strip()]
        made, why = _pairs(spoken, online)
        apart = [one for one in made if one.chosen.text != one.rejected.text]
        found += apart
        if not apart:
            without["have two scores for the same words" if made else why] += 1
        left_out["answers without words"] += len(group) - len(spoken)
        left_out["pairs of the same words"] += len(made) - len(apart)
    return Made(sides=found, without=without, left_out=+left_out)


def _pairs(group: Sequence[ScoredAnswer], online: OnlineSettings) -> tuple[list[Sides], str]:
    """The pairs of one prompt, or why there are none."""
    scored = [one for one in group if one.is_scored]
    worthy = [one for one in scored if one.is_finished or not online.finished]
    if len(scored) < 2:
        return [], "have fewer than two answers with words and a score"
    if not worthy:
        return [], "have no answer that ended by itself"
    if online.pairs == "all":
        every = permutations(scored, 2)
        made = [Sides(chosen=one, rejected=other) for one, other in every if one in worthy and one.score > other.score]
    else:
        # The first of equals: answers are drawn alike, so it is a random one of them.
        best, worst = max(worthy, key=lambda one: one.score), min(scored, key=lambda one: one.score)
        made = [Sides(chosen=best, rejected=worst)] if best.score > worst.score else []
    return made, "score all answers that may be chosen alike"


def preferences_of(made: Made, book: PromptDataset, *, as_thumbs: bool) -> list[Preference]:
    """What is learnt: the sampled tokens themselves, as pairs, or as one liked and one disliked answer."""
    return [one for sides in made.sides for one in _preferences(sides, book, as_thumbs=as_thumbs)]


def _preferences(sides: Sides, book: PromptDataset, *, as_thumbs: bool) -> Iterator[Preference]:
    prompt, key = book.prompts[sides.chosen.prompt], key_of(sides, book)
    both = [
        (_sampled(book.tokens[one.prompt], one.tokens), one is sides.chosen) for one in (sides.chosen, sides.rejected)
    ]
    for told in [[one] for one in both] if as_thumbs else [both]:
        answers = LabelledAnswers(
            sequences=tuple(sequence for sequence, _ in told),
            is_good=tuple(is_good for _, is_good in told),
            ref_logp=(0.0,) * len(told),
        )
        yield Preference(answers=answers, prompt=prompt.prompt, key=key)


def key_of(sides: Sides, book: PromptDataset) -> int:
    return prompt_key(book.prompts[sides.chosen.prompt])


def write_pairs(made: Made, book: PromptDataset, file: Path, *, held_out: frozenset[int]) -> None:
    """A preference file like any other: to be read again, looked at or annotated. Scores stand beside."""
    with row_writer(file) as write:
        for sides in made.sides:
            asked = book.prompts[sides.chosen.prompt]
            about = {
                "chosen_score": sides.chosen.score,
                "rejected_score": sides.rejected.score,
                "held_out": key_of(sides, book) in held_out,
            }
            chosen, rejected = ((Message("assistant", one.text),) for one in (sides.chosen, sides.rejected))
            pair = Pair(prompt=asked.prompt, chosen=chosen, rejected=rejected, origin=asked.origin, extra=about)
            write(to_fields(pair))


def drawn_beside(given: Preferences, count: int, *, seed: int, number: int) -> list[Preference]:
    """So many of the given preferences, if there are any, for round `number`; none comes twice before all have come."""
    if not given.items:
        return []
    own = seed_for(seed, "offline", number)
    return [given.items[item_at(at, len(given.items), own)] for at in range(count)]


def _sampled(prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
    """What was sampled, token for token; the prompt is not learnt."""
    return TokenSequence(tokens=[*prompt, *answer], counted=[False] * len(prompt) + [True] * len(answer))
