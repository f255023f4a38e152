"""Preferences as a reward model reads them: tokenised, folded by prompt, and weighed against length bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kedge.core.batches import TIE
from kedge.core.errors import DataError
from kedge.core.quoting import quoted
from kedge.core.seeds import seed_for
from kedge.core.stage import TooLong
from kedge.core.stats import logistic_slope
from kedge.data.batching import RankedAnswers
from kedge.data.encoding.rows import TOO_LONG, absolute_place, relative_place
from kedge.data.encoding.store import Columns, LazyRows, TokenTable, joined
from kedge.data.encoding.workers import LeftOut
from kedge.data.examples import Messages, Pair, Ranking, answers_of, text_of
from kedge.data.mixing import group_values
from kedge.data.reading import prompt_key, read
from kedge.models.reward.reward_model import reward_tokens
from kedge.stages.reward.settings import Labels, LengthControl, Ties
from kedge.stages.shared.encoding import Encoder, refuse_long
from kedge.stages.shared.held_out import PROMPT_KEY
from kedge.stages.shared.token_cache import EncodedData, encoded_data

ValueT = TypeVar("ValueT")

_GAP: Final = "gap"
"""The column with how much longer the preferred answer of a pair is."""
_TIED: Final = "tied"
"""Why a comparison is left out that prefers nothing."""


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

    @property
    def is_tie(self) -> bool:
        return self.ranked.certainty == TIE


def read_comparisons(
    sources: Sequence[str],
    encoder: Encoder,
    *,
    use_margin: bool,
    objectives: int = 1,
    labels: Labels = "hard",
    ties: Ties = "drop",
    weights: str | None = None,
    too_long: TooLong = "cut",
    report: Callable[[int], None] = lambda _: None,
    report_ties: Callable[[int], None] = lambda _: None,
) -> LazyRows[EncodedComparison]:
    """All comparisons: of one objective, whatever the number of files, or one file for each of several. Rankings of
    three and more in which everything ties prefer nothing, and are left out; those of two, and pairs of certainty ½, as
    `ties` says. `weights` names the field of the records that says how much a comparison counts.

    `report` is told how many have an answer that is too long, which is cut or left out with its comparison, and
    `report_ties` how many were left out because they prefer nothing.
    """
    read = [_read(source, encoder, too_long, ties, weights) for source in sources]
    tables = [data.table for data in read]
    num_long = sum(data.left_out.get(TOO_LONG, 0) + int(data.table.column("is_cut").sum()) for data in read)
    columns = {name: np.concatenate([table.column(name) for table in tables]) for name in (PROMPT_KEY, _GAP)}
    parts = [
        LazyRows(partial(_comparison, table, source, objective, use_margin, labels), range(len(table)))
        for objective, table, source in zip(
            [0] * len(sources) if objectives == 1 else range(objectives), tables, sources, strict=True
        )
    ]
    items = joined(parts)
    if num_long and not len(items):
        raise DataError(
            f"{', '.join(sources)}: all {num_long:,} comparisons are longer than {encoder.max_length:,} tokens "
            "(max_length), and too_long: drop leaves none; raise it, or set too_long: cut"
        )
    num_tied = sum(data.left_out.get(_TIED, 0) for data in read)
    if num_tied and not len(items):
        raise DataError(f"{', '.join(sources)}: all {num_tied:,} comparisons tie, so that there is nothing to prefer")
    report(num_long)
    report_ties(num_tied)
    return LazyRows(items.__getitem__, range(len(items)), columns)


def _read(source: str, encoder: Encoder, too_long: TooLong, ties: Ties, weights: str | None) -> EncodedData:
    settings = {"kind": "comparisons", "max_length": encoder.max_length, "too_long": too_long, "ties": ties}
    data = encoded_data(
        source,
        _comparisons(source),
        lambda tokenise: ComparisonEncoder(replace(encoder, tokenise=tokenise), source, too_long, ties, weights),
        encoder.tokenizer,
        settings={**settings, "weights": weights},
        code=(__name__, Encoder.__module__, reward_tokens.__module__),
    )
    if data.left_out.get(TOO_LONG) and too_long == "refuse":
        again = ComparisonEncoder(encoder, source, too_long, ties)
        refuse_long(source, _comparisons(source), again, limit=encoder.max_length, noun="comparison")
    return data


@dataclass(frozen=True, slots=True)
class ComparisonEncoder:
    """A pair or a ranking as a row: its texts in tokens and as they are, for the report.

    The likelier answer of a pair comes first, also where its certainty is below ½. Of a tie either may.
    """

    encoder: Encoder
    source: str
    too_long: TooLong
    ties: Ties = "drop"
    weights: str | None = None

    columns: ClassVar[Columns] = {
        "answers": "token_lists",
        "rank": "numbers",
        "margin": "fraction",
        "certainty": "fraction",
        "weight": "fraction",
        PROMPT_KEY: "key",
        "prompt_text": "text",
        "answer_texts": "texts",
        "lengths": "numbers",
        "place": "text",
        _GAP: "number",
        "is_cut": "number",
    }

    def __call__(self, examples: Sequence[Pair | Ranking]) -> list[Mapping[str, Any] | LeftOut]:
        lengths = iter(self.encoder.lengths([answer for example in examples for answer in answers_of(example)]))
        whole = self.encoder.whole([(example.prompt, answer) for example in examples for answer in answers_of(example)])
        return [self._row(example, answers_of(example), lengths, whole) for example in examples]

    def _row(
        self,
        example: Pair | Ranking,
        answers: Sequence[Messages],
        all_lengths: Iterator[int],
        all_tokens: Iterator[list[int]],
    ) -> Mapping[str, Any] | LeftOut:
        lengths, whole = list(islice(all_lengths, len(answers))), list(islice(all_tokens, len(answers)))
        rank, certainty = _order(example)
        if len(set(rank)) == 1 and (self.ties == "drop" or len(rank) != 2):
            return LeftOut(_TIED, str(example.origin))
        longest, limit = max(map(len, whole)), self.encoder.max_length
        if longest > limit and self.too_long != "cut":
            return LeftOut(TOO_LONG, str(example.origin), longest)
        return {
            "answers": _turned([tokens[-limit:] for tokens in whole], rank),
            "rank": rank if len(rank) > 2 else (1, 2),
            "margin": example.margin if isinstance(example, Pair) else None,
            "certainty": certainty,
            "weight": _weight(example, self.weights),
            PROMPT_KEY: prompt_key(example),
            "prompt_text": text_of(example.prompt),
            "answer_texts": _turned([text_of(answer) for answer in answers], rank),
            "lengths": _turned(lengths, rank),
            "place": relative_place(str(example.origin), self.source),
            _GAP: _length_gap(_turned(lengths, rank), certainty),
            "is_cut": int(longest > limit),
        }


def _comparison(
    table: TokenTable, source: str, objective: int, use_margin: bool, labels: Labels, row: int
) -> EncodedComparison:
    margin, certainty = table.value("margin", row), table.value("certainty", row)
    if certainty is None or (labels == "hard" and certainty != TIE):
        certainty = 1.0
    weight = table.value("weight", row)
    weight = 1.0 if weight is None else weight
    ranked = RankedAnswers(
        answers=table.value("answers", row),
        rank=tuple(table.value("rank", row)),
        margin=(margin or 0.0) if use_margin else 0.0,
        certainty=certainty,
        weight=weight,
        objective=objective,
    )
    return EncodedComparison(
        ranked=ranked,
        prompt_key=table.value(PROMPT_KEY, row),
        prompt_text=table.value("prompt_text", row),
        answer_texts=tuple(table.value("answer_texts", row)),
        lengths=tuple(table.value("lengths", row)),
        where=absolute_place(table.value("place", row), source),
        margin=margin,
    )


def group_of_place(
    sources: Sequence[str], items: Sequence[EncodedComparison], fields: Sequence[str]
) -> dict[str, dict[str, str]]:
    """For each field its value by the place of an item; a field that no item has is refused."""
    if not fields:
        return {}
    places = {item.where for item in items}
    records = {
        str(example.origin): example.extra
        for source in sources
        for example in _comparisons(source)
        if str(example.origin) in places
    }
    return {
        field: dict(zip(records, group_values(list(records.values()), field, setting="groups"), strict=True))
        for field in fields
    }


def fold(items: LazyRows[EncodedComparison], *, member: int, members: int, seed: int) -> LazyRows[EncodedComparison]:
    """What one member of an ensemble trains on: all but its own fold of the prompts; everything when it is alone."""
    if members == 1:
        return items
    return items.take(folds(items, members=members, seed=seed) != member)


def folds(items: LazyRows[EncodedComparison], *, members: int, seed: int) -> NDArray[np.int64]:
    """For each comparison the member of an ensemble that never sees it, nor any other of its prompt."""
    keys, places = np.unique(items.column(PROMPT_KEY), return_inverse=True)
    member_of_key = [seed_for(seed, "fold", int(key)) % members for key in keys]
    return np.asarray(member_of_key, dtype=np.int64)[places]


def length_controlled(
    items: LazyRows[EncodedComparison], how: LengthControl, *, strength: float = 1.0
) -> LazyRows[EncodedComparison]:
    """The same comparisons with weights (`balance`) or margins (`residual`) that take the length bias out of pairs.

    Of the log-odds that length alone gives to the longer answer, `strength` is the share that is taken out.
    """
    match how:
        case "none":
            return items
        case "balance":
            return _balanced(items, strength)
        case "residual":
            return _residual(items, strength)


def _comparisons(source: str) -> Iterator[Pair | Ranking]:
    for example in read(source):
        if not isinstance(example, Pair | Ranking):
            raise DataError(f"{source}: holds no pairs or rankings, and a reward model learns from nothing else")
        yield example


def _order(example: Pair | Ranking) -> tuple[tuple[int, ...], float | None]:
    """The ranks of the answers, and how certain the order of a pair is, where the data says so."""
    if isinstance(example, Ranking):
        is_tied_pair = len(example.rank) == 2 and len(set(example.rank)) == 1
        return example.rank, TIE if is_tied_pair else None
    certainty = example.certainty
    if example.is_tie:
        return (1, 1), TIE
    return ((1, 2), certainty) if certainty is None or certainty > TIE else ((2, 1), 1 - certainty)


def _weight(example: Pair | Ranking, field: str | None) -> float | None:
    """How much a comparison counts, by a field of its record."""
    if field is None:
        return None
    weight = example.extra.get(field)
    if isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf:
        return float(weight)
    where = f"{example.origin}: weights: {field}"
    raise DataError(f"{where} is {quoted(weight)}, and a weight is a number above 0; correct it, or leave it out")


def _turned(of_answers: list[ValueT], rank: Sequence[int]) -> list[ValueT]:
    """What is known of two answers, the better one first; more answers stay in the order of their file."""
    return of_answers[::-1] if len(rank) == 2 and rank[1] < rank[0] else of_answers


def _length_gap(lengths: Sequence[int], certainty: float | None) -> int:
    """How much longer the preferred answer of a pair is; 0 for ties and rankings, which length control leaves alone."""
    return lengths[0] - lengths[1] if len(lengths) == 2 and certainty != TIE else 0


def _balanced(items: LazyRows[EncodedComparison], strength: float) -> LazyRows[EncodedComparison]:
    """Pairs whose longer answer won and pairs whose longer answer lost get the same total weight at strength 1.

    The ratio of their weights is (longer / shorter)^strength, and together they weigh as much as before.
    """
    gaps = items.column(_GAP)
    longer, shorter = int((gaps > 0).sum()), int((gaps < 0).sum())
    if not longer or not shorter:
        counts = f"the longer answer wins in {longer} and loses in {shorter}"
        raise DataError(f"length_control: balance needs pairs of both sorts, but {counts}; use none or residual")
    ratio = (longer / shorter) ** strength
    unit = (longer + shorter) / (longer + shorter * ratio)
    weight = {1: unit, -1: unit * ratio, 0: 1.0}
    return items.map(
        lambda item: _with_ranked(
            item, weight=item.ranked.weight * weight[_sign(_length_gap(item.lengths, item.ranked.certainty))]
        )
    )


def _residual(items: LazyRows[EncodedComparison], strength: float) -> LazyRows[EncodedComparison]:
    """A length model comes first: P(chosen) = σ(slope · asinh(gap)); what it explains is not asked of the scores.

    A product of experts (Clark et al. 2019; for reward models Shen et al. 2023): the loss is
    −log σ(score difference + slope · asinh(gap)), which is a margin of −slope · asinh(gap), times the strength.
    """
    slope = strength * logistic_slope([math.asinh(gap) for gap in items.column(_GAP).tolist()])

    def with_margin(item: EncodedComparison) -> EncodedComparison:
        gap = _length_gap(item.lengths, item.ranked.certainty)
        return _with_ranked(item, margin=item.ranked.margin - slope * math.asinh(gap))

    return items.map(with_margin)


def _with_ranked(item: EncodedComparison, **changes: float) -> EncodedComparison:
    return replace(item, ranked=replace(item.ranked, **changes))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
