"""Preferences as a policy reads them: tokenised, and for KTO with answers to other prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from kedge.core.errors import DataError
from kedge.core.stage import TooLong
from kedge.data.batching import LabelledAnswers, TokenSequence
from kedge.data.examples import Messages, Pair, Ranking, Thumb
from kedge.data.kinds import as_kind
from kedge.data.long_prompts import place_of, prompt_before
from kedge.data.reading import prompt_key, read
from kedge.data.template import encode_conversation
from kedge.stages.shared.encoding import refuse_long

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
    items: list[Preference] = []
    places: list[tuple[str, int]] = []
    total = num_too_long = num_identical = 0
    for example in _thumbs(source) if wants_thumbs else _pairs(source):
        total += 1
        labelled = [(example.answer, example.is_good)] if isinstance(example, Thumb) else _sides(example)
        prompt, origin = example.prompt, example.origin
        sequences = tuple(_encode(tokenizer, prompt, answer, str(origin)) for answer, _ in labelled)
        if (longest := max(len(sequence.tokens) for sequence in sequences)) > max_length:
            places.append((place_of(origin), longest))
            sides = [answer for answer, _ in labelled]
            is_cut = too_long == "cut"
            shorter = prompt_before(tokenizer, prompt, sides, max_length=max_length, origin=origin) if is_cut else None
            if shorter is None:
                num_too_long += 1
                continue
            prompt = shorter
            sequences = tuple(_encode(tokenizer, prompt, answer, str(origin)) for answer in sides)
        if len(sequences) == 2 and sequences[0].tokens == sequences[1].tokens:
            num_identical += 1
        else:
            is_good = tuple(good for _, good in labelled)
            answers = LabelledAnswers(sequences=sequences, is_good=is_good, ref_logp=(0.0,) * len(sequences))
            items.append(Preference(answers=answers, prompt=prompt, prompt_key=prompt_key(example)))
    refuse_long(source, places, too_long, total=total, limit=max_length, noun="preference")
    if not items:
        raise DataError(
            f"{source}: nothing to learn from: {num_too_long} preferences are longer than {max_length} tokens "
            f"(max_length) and {num_identical} are pairs of equal answers; raise max_length, or look at it with "
            "kedge data check"
        )
    num_cut = len(places) - num_too_long
    return Preferences(items=items, num_too_long=num_too_long, num_cut=num_cut, num_identical=num_identical)


def mismatched(items: Sequence[Preference], *, max_length: int) -> list[LabelledAnswers]:
    """For each item its prompt with the answer of the next item of another prompt, cut at `max_length`.

    What KTO's reference point is estimated on. The partner is fixed by the data and not by the step, so that the
    reference is asked once, and a step's estimate depends on neither its order nor its micro-batches.
    """
    if len({item.prompt_key for item in items}) < 2:
        raise DataError("kto compares answers with answers to other prompts, and all of these have the same prompt")
    anchors: list[LabelledAnswers] = []
    for index, item in enumerate(items):
        following = (items[(index + step) % len(items)] for step in range(1, len(items)))
        partner = next(other for other in following if other.prompt_key != item.prompt_key)
        prompt, answer = _cut(item.answers.sequences[0])[0], _cut(partner.answers.sequences[0])[1]
        tokens = [*prompt.tokens, *answer.tokens][:max_length]
        counted = [*prompt.counted, *answer.counted][:max_length]
        anchors.append(
            LabelledAnswers(
                sequences=(TokenSequence(tokens=tokens, counted=counted),), is_good=(True,), ref_logp=(0.0,)
            )
        )
    return anchors


def sequences_of(items: Sequence[LabelledAnswers]) -> list[TokenSequence]:
    return [sequence for item in items for sequence in item.sequences]


def with_reference_logprobs(answers: LabelledAnswers, logp: Iterator[float]) -> LabelledAnswers:
    """The next of the reference's log-probs become those of these answers."""
    return replace(answers, ref_logp=tuple(next(logp) for _ in answers.sequences))


def _pairs(source: str) -> Iterator[Pair]:
    for example in read(source):
        if not isinstance(example, Pair | Ranking):
            hint = "; method kto learns from thumbs" if isinstance(example, Thumb) else ""
            raise DataError(f"{source}: holds no pairs or rankings, and this method learns from nothing else{hint}")
        yield from cast("tuple[Pair, ...]", as_kind(example, "pairs"))


def _thumbs(source: str) -> Iterator[Thumb]:
    for example in read(source):
        if not isinstance(example, Pair | Thumb):
            raise DataError(
                f"{source}: holds no thumbs or pairs, and kto learns from nothing else; of rankings make pairs first: "
                f"kedge data convert '{source}' --kind pairs"
            )
        yield from cast("tuple[Thumb, ...]", as_kind(example, "thumbs"))


def _sides(pair: Pair) -> list[tuple[Messages, bool]]:
    return [(pair.chosen, True), (pair.rejected, False)]


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: Messages, where: str) -> TokenSequence:
    encoded = encode_conversation(tokenizer, prompt + answer, trained_from=len(prompt))
    if not any(encoded.assistant_mask[1:]):
        raise DataError(f"{where}: an answer has no token of the assistant's, so there is nothing to learn from it")
    return TokenSequence(tokens=encoded.tokens, counted=encoded.assistant_mask)


def _cut(sequence: TokenSequence) -> tuple[TokenSequence, TokenSequence]:
    """Prompt and answer, cut before the first counted token."""
    at = list(sequence.counted).index(True)
    return (
        TokenSequence(tokens=sequence.tokens[:at], counted=sequence.counted[:at]),
        TokenSequence(tokens=sequence.tokens[at:], counted=sequence.counted[at:]),
    )
