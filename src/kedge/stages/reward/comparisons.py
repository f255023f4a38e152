"""Preferences as a reward model reads them: tokenised, held out by prompt, and weighed against length bias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.core.stats import logistic_slope
from kedge.data.batching import RankedAnswers
from kedge.data.examples import Pair, Ranking, text_of
from kedge.data.reading import prompt_key, read
from kedge.data.splitting import assign
from kedge.stages.reward.settings import LengthControl
from kedge.stages.shared.encoding import Encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One comparison: what is trained on, and what the report shows of it."""

    ranked: RankedAnswers
    prompt: int
    prompt_text: str
    answer_texts: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of the answers alone."""
    where: str
    margin: float | None


def judged(sources: Sequence[str], encoder: Encoder, *, use_margin: bool) -> list[Judged]:
    """All comparisons, one file for each objective. Rankings in which everything ties prefer nothing: left out."""
    return [
        _judged(example, encoder, objective, use_margin)
        for objective, source in enumerate(sources)
        for example in _comparisons(source)
    ]


def hold_out(items: Sequence[Judged], *, share: float, seed: int) -> tuple[list[Judged], list[Judged]]:
    """Train and held-out parts that share no prompt."""
    held = set(assign([one.prompt for one in items], share, seed).tolist())
    return [one for one in items if one.prompt not in held], [one for one in items if one.prompt in held]


def fold(items: Sequence[Judged], *, member: int, members: int, seed: int) -> list[Judged]:
    """What one member of an ensemble trains on: all but its own fold of the prompts; everything when it is alone."""
    return [one for one in items if members == 1 or fold_of(one, members=members, seed=seed) != member]


def fold_of(one: Judged, *, members: int, seed: int) -> int:
    """The member of an ensemble that never sees this comparison, nor any other of its prompt."""
    return seed_for(seed, "fold", one.prompt) % members


def length_controlled(items: Sequence[Judged], how: LengthControl, *, strength: float = 1.0) -> list[Judged]:
    """The same comparisons with weights (`balance`) or margins (`residual`) that take the length bias out of pairs.

    Of the log-odds that length alone gives to the longer answer, `strength` is the share that is taken out.
    """
    match how:
        case "none":
            return list(items)
        case "balance":
            return _balanced(items, strength)
        case "residual":
            return _residual(items, strength)


def _comparisons(source: str) -> Iterator[Pair | Ranking]:
    for example in read(source):
        if not isinstance(example, Pair | Ranking):
            raise DataError(f"{source}: holds no pairs or rankings, and a reward model learns from nothing else")
        if isinstance(example, Pair) or len(set(example.rank)) > 1:
            yield example


def _judged(example: Pair | Ranking, encoder: Encoder, objective: int, use_margin: bool) -> Judged:
    is_pair = isinstance(example, Pair)
    answers = (example.chosen, example.rejected) if is_pair else example.answers
    margin = example.margin if is_pair else None
    ranked = RankedAnswers(
        answers=[encoder.tokens(example.prompt, answer) for answer in answers],
        rank=(1, 2) if is_pair else example.rank,
        margin=(margin or 0.0) if use_margin else 0.0,
        objective=objective,
    )
    return Judged(
        ranked=ranked,
        prompt=prompt_key(example),
        prompt_text=text_of(example.prompt),
        answer_texts=tuple(text_of(answer) for answer in answers),
        lengths=tuple(encoder.length(answer) for answer in answers),
        where=str(example.origin),
        margin=margin,
    )


def _length_gap(one: Judged) -> int:
    """How much longer the preferred answer of a pair is; 0 for rankings, which length control leaves alone."""
    return one.lengths[0] - one.lengths[1] if len(one.lengths) == 2 else 0


def _balanced(items: Sequence[Judged], strength: float) -> list[Judged]:
    """Pairs whose longer answer won and pairs whose longer answer lost get the same total weight at strength 1.

    The ratio of their weights is (longer / shorter)^strength, and together they weigh as much as before.
    """
    longer = sum(_length_gap(one) > 0 for one in items)
    shorter = sum(_length_gap(one) < 0 for one in items)
    if not longer or not shorter:
        counts = f"the longer answer wins in {longer} and loses in {shorter}"
        raise DataError(f"length_control: balance needs pairs of both sorts, but {counts}; use none or residual")
    ratio = (longer / shorter) ** strength
    unit = (longer + shorter) / (longer + shorter * ratio)
    weight = {1: unit, -1: unit * ratio, 0: 1.0}
    return [_with_ranked(one, weight=weight[_sign(_length_gap(one))]) for one in items]


def _residual(items: Sequence[Judged], strength: float) -> list[Judged]:
    """A length model comes first: P(chosen) = σ(slope · asinh(gap)); what it explains is not asked of the scores.

    A product of experts (Clark et al. 2019; for reward models Shen et al. 2023): the loss is
    −log σ(score difference + slope · asinh(gap)), which is a margin of −slope · asinh(gap), times the strength.
    """
    slope = strength * logistic_slope([math.asinh(_length_gap(one)) for one in items])
    return [_with_ranked(one, margin=one.ranked.margin - slope * math.asinh(_length_gap(one))) for one in items]


def _with_ranked(one: Judged, **changes: float) -> Judged:
    return replace(one, ranked=replace(one.ranked, **changes))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
