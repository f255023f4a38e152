"""Preferences as a policy reads them: tokenised, and for KTO with answers to other prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stage import TooLong
from kedge.data.batching import LabelledAnswers, TokenSequence
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.encoding.rows import IDENTICAL, TOO_LONG, PreferenceEncoder, messages_of_text
from kedge.data.encoding.store import LazyRows, TokenTable
from kedge.data.examples import Messages, Pair, Ranking, Thumb
from kedge.data.kinds import as_kind
from kedge.data.reading import read
from kedge.stages.shared.encoding import refuse_long
from kedge.stages.shared.held_out import PROMPT_KEY, prompt_keys
from kedge.stages.shared.token_cache import encoded_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A pair, or one answer that somebody liked or did not."""

    answers: LabelledAnswers
    prompt: Messages
    prompt_key: int
    """Equal for equal prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """What a file holds, and how many of its preferences were left out."""

    items: Sequence[Preference]
    num_too_long: int = 0
    num_cut: int = 0
    num_identical: int = 0


def read_preferences(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    wants_thumbs: bool,
    too_long: TooLong = "drop",
) -> Preferences:
    """The strict pairs of a file, or its single answers; pairs of equal answers are left out."""
    items_of = _thumbs if wants_thumbs else _pairs

    def encoder(tokenise: TextTokenizer) -> PreferenceEncoder:
        return PreferenceEncoder(tokenise=tokenise, max_length=max_length, too_long=too_long)

    kind = "thumbs" if wants_thumbs else "pairs"
    settings = {"kind": kind, "max_length": max_length, "too_long": too_long}
    data = encoded_data(source, items_of(source), encoder, tokenizer, settings=settings, code=(__name__,))
    num_too_long, num_identical = data.left_out.get(TOO_LONG, 0), data.left_out.get(IDENTICAL, 0)
    if num_too_long and too_long == "refuse":
        again = encoder(TextTokenizer(tokenizer))
        refuse_long(source, items_of(source), again, limit=max_length, noun="preference")
    if not len(data.table):
        raise DataError(
            f"{source}: nothing to learn from: {num_too_long} preferences are longer than {max_length} tokens "
            f"(max_length) and {num_identical} are pairs of equal answers; raise max_length, or look at it with "
            "kedge data check"
        )
    keys = {PROMPT_KEY: data.table.column(PROMPT_KEY)}
    items = LazyRows(partial(_preference, data.table), range(len(data.table)), keys)
    num_cut = int(data.table.column("is_cut").sum())
    return Preferences(items=items, num_too_long=num_too_long, num_cut=num_cut, num_identical=num_identical)


def _preference(table: TokenTable, row: int) -> Preference:
    rows = zip(table.value("tokens", row), table.value("counted", row), strict=True)
    sequences = tuple(TokenSequence(tokens=tokens, counted=counted) for tokens, counted in rows)
    return Preference(
        answers=LabelledAnswers(
            sequences=sequences, is_good=tuple(table.value("is_good", row)), ref_logp=(0.0,) * len(sequences)
        ),
        prompt=messages_of_text(table.value("prompt", row)),
        prompt_key=table.value(PROMPT_KEY, row),
    )


def mismatched(items: Sequence[Preference], *, max_length: int) -> Sequence[LabelledAnswers]:
    """For each item its prompt with the answer of the next item of another prompt, cut at `max_length`.

    What KTO's reference point is estimated on. The partner is fixed by the data and not by the step, so that the
    reference is asked once, and a step's estimate depends on neither its order nor its micro-batches.
    """
    keys = prompt_keys(items)
    first_of_runs = np.flatnonzero(keys != np.roll(keys, 1))
    if not len(first_of_runs):
        raise DataError("kto compares answers with answers to other prompts, and all of these have the same prompt")

    def anchor(place: int) -> LabelledAnswers:
        following = np.searchsorted(first_of_runs, place, side="right") % len(first_of_runs)
        partner = items[int(first_of_runs[following])]
        prompt = _cut(items[place].answers.sequences[0])[0]
        answer = _cut(partner.answers.sequences[0])[1]
        tokens = [*prompt.tokens, *answer.tokens][:max_length]
        counted = [*prompt.counted, *answer.counted][:max_length]
        sequence = TokenSequence(tokens=tokens, counted=counted)
        return LabelledAnswers(sequences=(sequence,), is_good=(True,), ref_logp=(0.0,))

    return LazyRows(anchor, range(len(items)))


def sequences_of(items: Sequence[LabelledAnswers]) -> Sequence[TokenSequence]:
    """The answers of all items in their order; each item has as many as the first."""
    count = len(items[0].sequences) if items else 1
    return LazyRows(lambda place: items[place // count].sequences[place % count], range(count * len(items)))


def with_reference_logprobs(items: Sequence[LabelledAnswers], logp: Sequence[float]) -> Sequence[LabelledAnswers]:
    """The items with the reference's log-probs, which are in the order of `sequences_of`."""
    logp_S = np.asarray(logp, dtype=np.float64)
    count = len(items[0].sequences) if items else 1

    def with_logp(place: int) -> LabelledAnswers:
        return replace(items[place], ref_logp=tuple(logp_S[place * count : (place + 1) * count].tolist()))

    return LazyRows(with_logp, range(len(items)))


def _pairs(source: str) -> Iterator[Pair]:
    for example in read(source):
        if not isinstance(example, Pair | Ranking):
            hint = "; method kto learns from thumbs" if isinstance(example, Thumb) else ""
            raise DataError(f"{source}: holds no pairs or rankings, and this method learns from nothing else{hint}")
        pairs = cast("tuple[Pair, ...]", as_kind(example, "pairs"))
        yield from (pair for pair in pairs if not pair.is_tie)


def _thumbs(source: str) -> Iterator[Thumb]:
    for example in read(source):
        if not isinstance(example, Pair | Thumb):
            raise DataError(
                f"{source}: holds no thumbs or pairs, and kto learns from nothing else; of rankings make pairs first: "
                f"kedge data convert '{source}' --kind pairs"
            )
        yield from cast("tuple[Thumb, ...]", as_kind(example, "thumbs"))


def _cut(sequence: TokenSequence) -> tuple[TokenSequence, TokenSequence]:
    """Prompt and answer, cut before the first counted token."""
    at = list(sequence.counted).index(True)
    return (
        TokenSequence(tokens=sequence.tokens[:at], counted=sequence.counted[:at]),
        TokenSequence(tokens=sequence.tokens[at:], counted=sequence.counted[at:]),
    )
