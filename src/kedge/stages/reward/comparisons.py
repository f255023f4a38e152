"""Preferences as a reward model reads them: tokenised, folded by prompt, and weighed against length bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.core.stage import TooLong
from kedge.core.stats import logistic_slope
from kedge.data.batching import RankedAnswers
from kedge.data.examples import Messages, Pair, Ranking, text_of
from kedge.data.long_prompts import place_of
from kedge.data.reading import prompt_key, read
from kedge.stages.reward.settings import LengthControl
from kedge.stages.shared.encoding import Encoder, refuse_long


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedComparison:
    """One comparison: what is trained on, and what the report shows of it."""

    ranked: RankedAnswers
    prompt_key: int
    """Equal for equal prompts."""
    prompt_text: str
    answer_texts: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of the answers alone."""
    where: str
    margin: float | None


def read_comparisons(
    sources: Sequence[str],
    encoder: Encoder,
    *,
    use_margin: bool,
    too_long: TooLong = "cut",
    report: Callable[[int], None] = lambda _: None,
) -> list[EncodedComparison]:
    """All comparisons, one file for each objective. Rankings in which everything ties prefer nothing: left out.

    `report` is told how many have an answer that is too long, which is cut or left out with its comparison.
    """
    items: list[EncodedComparison] = []
    num_long = 0
    for objective, source in enumerate(sources):
        places: list[tuple[str, int]] = []
        total = 0
        for example in _comparisons(source):
            total += 1
            answers = (example.chosen, example.rejected) if isinstance(example, Pair) else example.answers
            whole = [encoder.whole(example.prompt, answer) for answer in answers]
            if (longest := max(map(len, whole))) > encoder.max_length:
                places.append((place_of(example.origin), longest))
                if too_long != "cut":
                    continue
            tokens = [answer[-encoder.max_length :] for answer in whole]
            items.append(_encoded(example, answers, tokens, encoder, objective, use_margin))
        refuse_long(source, places, too_long, total=total, limit=encoder.max_length, noun="comparison")
        num_long += len(places)
    if num_long and not items:
        raise DataError(
            f"{', '.join(sources)}: all {num_long:,} comparisons are longer than {encoder.max_length:,} tokens "
            "(max_length), and too_long: drop leaves none; raise it, or set too_long: cut"
        )
    report(num_long)
    return items


def fold(items: Sequence[EncodedComparison], *, member: int, members: int, seed: int) -> list[EncodedComparison]:
    """What one member of an ensemble trains on: all but its own fold of the prompts; everything when it is alone."""
    return [item for item in items if members == 1 or fold_of(item, members=members, seed=seed) != member]


def fold_of(item: EncodedComparison, *, members: int, seed: int) -> int:
    """The member of an ensemble that never sees this comparison, nor any other of its prompt."""
    return seed_for(seed, "fold", item.prompt_key) % members


def length_controlled(
    items: Sequence[EncodedComparison], how: LengthControl, *, strength: float = 1.0
) -> list[EncodedComparison]:
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


def _encoded(
    example: Pair | Ranking,
    answers: Sequence[Messages],
    tokens: Sequence[Sequence[int]],
    encoder: Encoder,
    objective: int,
    use_margin: bool,
) -> EncodedComparison:
    is_pair = isinstance(example, Pair)
    margin = example.margin if is_pair else None
    ranked = RankedAnswers(
        answers=tokens,
        rank=(1, 2) if is_pair else example.rank,
        margin=(margin or 0.0) if use_margin else 0.0,
        objective=objective,
    )
    return EncodedComparison(
        ranked=ranked,
        prompt_key=prompt_key(example),
        prompt_text=text_of(example.prompt),
        answer_texts=tuple(text_of(answer) for answer in answers),
        lengths=tuple(encoder.length(answer) for answer in answers),
        where=str(example.origin),
        margin=margin,
    )


def _length_gap(item: EncodedComparison) -> int:
    """How much longer the preferred answer of a pair is; 0 for rankings, which length control leaves alone."""
    return item.lengths[0] - item.lengths[1] if len(item.lengths) == 2 else 0


def _balanced(items: Sequence[EncodedComparison], strength: float) -> list[EncodedComparison]:
    """Pairs whose longer answer won and pairs whose longer answer lost get the same total weight at strength 1.

    The ratio of their weights is (longer / shorter)^strength, and together they weigh as much as before.
    """
    longer = sum(_length_gap(item) > 0 for item in items)
    shorter = sum(_length_gap(item) < 0 for item in items)
    if not longer or not shorter:
        counts = f"the longer answer wins in {longer} and loses in {shorter}"
        raise DataError(f"length_control: balance needs pairs of both sorts, but {counts}; use none or residual")
    ratio = (longer / shorter) ** strength
    unit = (longer + shorter) / (longer + shorter * ratio)
    weight = {1: unit, -1: unit * ratio, 0: 1.0}
    return [_with_ranked(item, weight=weight[_sign(_length_gap(item))]) for item in items]


def _residual(items: Sequence[EncodedComparison], strength: float) -> list[EncodedComparison]:
    """A length model comes first: P(chosen) = σ(slope · asinh(gap)); what it explains is not asked of the scores.

    A product of experts (Clark et al. 2019; for reward models Shen et al. 2023): the loss is
    −log σ(score difference + slope · asinh(gap)), which is a margin of −slope · asinh(gap), times the strength.
    """
    slope = strength * logistic_slope([math.asinh(_length_gap(item)) for item in items])
    return [_with_ranked(item, margin=item.ranked.margin - slope * math.asinh(_length_gap(item))) for item in items]


def _with_ranked(item: EncodedComparison, **changes: float) -> EncodedComparison:
    return replace(item, ranked=replace(item.ranked, **changes))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
