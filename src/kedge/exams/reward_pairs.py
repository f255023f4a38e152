"""Exams for reward models: does the better answer score higher? Beside every subset stand two rules that read nothing.

`longest wins` and `shortest wins` show which subsets length alone solves. Three kinds of rows, which may be mixed:

- `chosen` and `rejected`, a text each: pairs, as in RewardBench (Lambert et al. 2024)
- `chosen` and `rejected`, the same answers in styles from plain to rich: RM-Bench's form (Liu et al. 2024). `hard`: the
  better answer is in the plainer style; `normal`: both in one style; `easy`: the better one is in the richer style
- `answers` and `best`, the index of the best or a list of them: the best of K, as in RewardBench 2 (Malik et al. 2025)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

from kedge.exams.exam import Dialogue, Metric, Score, ScoreQuestion, ScoreReply, Turns
from kedge.exams.items import ITEMS, Row, hash_of_files, read_rows, unique_ids

_GRADING = 1
_STYLES = {-1: "hard", 0: "normal", 1: "easy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Answers, of which the first `num_better` are the better ones; in pairs of styles that is half of them."""

    item: str
    turns: Turns
    answers: tuple[str, ...]
    num_better: int
    has_styles: bool
    subset: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPairs:
    items_hash: str
    items: tuple[Comparison, ...]
    name: str = "reward_pairs"
    title: str = "Reward pairs: the better answer scores higher"
    licence: str = "that of the files that were brought"

    @property
    def metrics(self) -> dict[str, Metric]:
        more = partial(Metric, better="more")
        return {
            "accuracy": more(summary="comparisons in which the better answer scores higher; ties count half"),
            "longest": more(summary="the same, if the longest answer won"),
            "shortest": more(summary="the same, if the shortest answer won"),
            "easy": more(summary="pairs whose better answer has the richer style"),
            "normal": more(summary="pairs in one style"),
            "hard": more(summary="pairs whose better answer has the plainer style"),
        }

    def take(self, seed: int) -> Dialogue:
        del seed
        replies = yield [ScoreQuestion(item=item.item, turns=item.turns, answers=item.answers) for item in self.items]
        scores: list[Score] = []
        for item, reply in zip(self.items, replies, strict=True):
            assert isinstance(reply, ScoreReply)
            scores += grade(item, reply.scores)
        return scores


def grade(item: Comparison, values: Sequence[float]) -> Iterator[Score]:
    """By the scores of a reward model, and by lengths in characters."""
    best = max(range(len(values)), key=values.__getitem__)
    score = partial(Score, item=item.item, answer=item.answers[best], groups={"subset": item.subset})
    lengths = [len(answer) for answer in item.answers]
    rules: tuple[tuple[str, Sequence[float]], ...] = (
        ("accuracy", values),
        ("longest", lengths),
        ("shortest", [-length for length in lengths]),
    )
    for metric, by in rules:
        yield score(metric=metric, score=_won(item, by))
    if item.has_styles:
        for sign, metric in _STYLES.items():
            yield score(metric=metric, score=_won_in_styles(item, values, lambda gap, sign=sign: _sign(gap) == sign))


def _won(item: Comparison, values: Sequence[float]) -> float:
    """1 where the better answers win, ½ of a tie: all pairs of styles, or the best of all against each other one."""
    if item.has_styles:
        return _won_in_styles(item, values, lambda gap: True)
    better, others = max(values[: item.num_better]), max(values[item.num_better :])
    return _beats(better, others)


def _won_in_styles(item: Comparison, values: Sequence[float], counts: Callable[[int], bool]) -> float:
    """The mean over pairs of styles whose gap counts; the gap is how much richer the better answer's style is."""
    size = item.num_better
    wins = [
        _beats(values[better], values[size + worse])
        for better, worse in product(range(size), repeat=2)
        if counts(better - worse)
    ]
    return sum(wins) / len(wins)


def _beats(better: float, other: float) -> float:
    return 0.5 if better == other else float(better > other)


def _sign(gap: int) -> int:
    return (gap > 0) - (gap < 0)


def exam(folder: Path) -> RewardPairs:
    rows = read_rows(folder / ITEMS)
    items = tuple(_comparison(row, item) for row, item in zip(rows, unique_ids(rows), strict=True))
    return RewardPairs(items_hash=hash_of_files(folder, grading=_GRADING), items=items)


def _comparison(row: Row, item: str) -> Comparison:
    better, others = _best_of(row) if "answers" in row.fields else _pair(row)
    return Comparison(
        item=item,
        turns=_turns(row),
        answers=(*better, *others),
        num_better=len(better),
        has_styles="chosen" in row.fields and len(better) > 1,
        subset=row.text("subset", "all"),
    )


def _pair(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    is_many = isinstance(row.fields.get("chosen"), list)
    better, others = (row.texts(name) if is_many else (row.text(name),) for name in ("chosen", "rejected"))
    if len(better) != len(others):
        raise row.problem("rejected", f"as many styles as of `chosen`, {len(better)}", list(others))
    return better, others


def _best_of(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    answers, best = row.texts("answers"), row.fields.get("best")
    places = cast("list[Any]", best) if isinstance(best, list) else [row.place("best", len(answers))]
    if not 0 < len(set(places)) < len(answers) or any(place not in range(len(answers)) for place in places):
        raise row.problem("best", f"numbers of answers, from 0 to {len(answers) - 1}, and not all of them", best)
    others = [answer for place, answer in enumerate(answers) if place not in places]
    return tuple(answers[place] for place in places), tuple(others)


def _turns(row: Row) -> Turns:
    """`prompt` is a text or a list of messages."""
    prompt = row.fields.get("prompt")
    if not isinstance(prompt, list):
        return (("user", row.text("prompt")),)
    turns = [
        (str(message["role"]), str(message["content"]))
        for message in cast("list[Any]", prompt)
        if isinstance(message, dict) and {"role", "content"} <= message.keys()
    ]
    if not turns or len(turns) != len(cast("list[Any]", prompt)):
        raise row.problem("prompt", "a text, or messages with role and content", prompt)
    return tuple(turns)
