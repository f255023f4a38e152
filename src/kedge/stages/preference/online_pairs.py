"""From the scored answers of a round to preferences: which answer is chosen over which, and what makes no pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from kedge.core.seeds import item_at, seed_for
from kedge.data.batching import LabelledAnswers
from kedge.data.converting import to_fields
from kedge.data.examples import Message, Pair
from kedge.data.reading import prompt_key
from kedge.data.writing import row_writer
from kedge.stages.preference.online_settings import OnlineSettings
from kedge.stages.preference.preferences import Preference
from kedge.stages.rl.answers import Groups, ScoredAnswer, learnt_sequence
from kedge.stages.rl.prompts import PromptDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPair:
    """Two answers to one prompt."""

    chosen: ScoredAnswer
    rejected: ScoredAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPairs:
    """The pairs of a round in the order of their prompts, why so many prompts have none, and what else is no pair."""

    pairs: Sequence[AnswerPair]
    without: Mapping[str, int]
    left_out: Mapping[str, int]

    def why_not(self) -> str:
        """What makes no pair, in words."""
        prompts = [f"{count:,} prompts {why}" for why, count in self.without.items()]
        return ", ".join([*prompts, *(f"{count:,} {what} left out" for what, count in self.left_out.items())])


def pairs_of(groups: Groups, online: OnlineSettings) -> RoundPairs:
    """An answer without words is never in a pair: beating nothing teaches no preference, and `kedge data check` says
    so. Nor are two answers of the same words a pair, though a judge may score them apart."""
    pairs, without, left_out = list[AnswerPair](), Counter[str](), Counter[str]()
    for group in sorted(groups, key=lambda group: group[0].prompt):
        spoken = [answer for answer in group if answer.text.strip()]
        candidates, why = _pairs(spoken, online)
        apart = [pair for pair in candidates if pair.chosen.text != pair.rejected.text]
        pairs += apart
        if not apart:
            without["have two scores for the same words" if candidates else why] += 1
        left_out["answers without words"] += len(group) - len(spoken)
        left_out["pairs of the same words"] += len(candidates) - len(apart)
    return RoundPairs(pairs=pairs, without=without, left_out=+left_out)


def _pairs(group: Sequence[ScoredAnswer], online: OnlineSettings) -> tuple[list[AnswerPair], str]:
    """The pairs of one prompt, or why there are none."""
    scored = [answer for answer in group if answer.is_scored]
    worthy = [answer for answer in scored if answer.is_finished or not online.finished]
    if len(scored) < 2:
        return [], "have fewer than two answers with words and a score"
    if not worthy:
        return [], "have no answer that ended by itself"
    if online.pairs == "all":
        pairs = [
            AnswerPair(chosen=better, rejected=worse)
            for better, worse in permutations(scored, 2)
            if better in worthy and better.score > worse.score
        ]
    else:
        # The first of equals: answers are drawn alike, so it is a random one of them.
        best = max(worthy, key=lambda answer: answer.score)
        worst = min(scored, key=lambda answer: answer.score)
        pairs = [AnswerPair(chosen=best, rejected=worst)] if best.score > worst.score else []
    return pairs, "score all answers that may be chosen alike"


def preferences_of(pairs: Sequence[AnswerPair], dataset: PromptDataset, *, as_thumbs: bool) -> list[Preference]:
    """What is learnt: the sampled tokens themselves, as pairs, or as one liked and one disliked answer."""
    return [preference for pair in pairs for preference in _preferences(pair, dataset, as_thumbs=as_thumbs)]


def _preferences(pair: AnswerPair, dataset: PromptDataset, *, as_thumbs: bool) -> Iterator[Preference]:
    prompt, key = dataset.prompts[pair.chosen.prompt], prompt_key_of(pair, dataset)
    chosen, rejected = (
        learnt_sequence(dataset.tokens[answer.prompt], answer) for answer in (pair.chosen, pair.rejected)
    )
    labelled = [((chosen,), (True,)), ((rejected,), (False,))] if as_thumbs else [((chosen, rejected), (True, False))]
    for sequences, is_good in labelled:
        answers = LabelledAnswers(sequences=sequences, is_good=is_good, ref_logp=(0.0,) * len(sequences))
        yield Preference(answers=answers, prompt=prompt.prompt, prompt_key=key)


def prompt_key_of(pair: AnswerPair, dataset: PromptDataset) -> int:
    return prompt_key(dataset.prompts[pair.chosen.prompt])


def write_pairs(pairs: Sequence[AnswerPair], dataset: PromptDataset, file: Path, *, held_out: frozenset[int]) -> None:
    """A preference file like any other, to be read again, looked at or annotated, with the scores in each line."""
    with row_writer(file) as write:
        for pair in pairs:
            prompt = dataset.prompts[pair.chosen.prompt]
            about = {
                "chosen_score": pair.chosen.score,
                "rejected_score": pair.rejected.score,
                "held_out": prompt_key_of(pair, dataset) in held_out,
            }
            chosen, rejected = ((Message("assistant", answer.text),) for answer in (pair.chosen, pair.rejected))
            example = Pair(prompt=prompt.prompt, chosen=chosen, rejected=rejected, origin=prompt.origin, extra=about)
            write(to_fields(example))


def drawn_beside(offline: Sequence[Preference], count: int, *, seed: int, number: int) -> list[Preference]:
    """So many of the offline preferences, if there are any, for round `number`; none twice before all have come."""
    if not offline:
        return []
    order_seed = seed_for(seed, "offline", number)
    return [offline[item_at(at, len(offline), order_seed)] for at in range(count)]
