"""What `kedge score` does: the answers in a data file, scored and written with their scores.

Left out: what the scores say about the judge, which is `score_summary`.
Shape letters: M members, N answers, K objectives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.core.errors import ConfigError, DataError, NumericsError
from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Example, Kind, Messages, Pair, Prompt, Ranking, Thumb
from kedge.data.reading import read, recognised
from kedge.data.sources import SET_ASIDE_SUFFIX, stem_of
from kedge.data.writing import WRITABLE, row_writer
from kedge.models.reward.ensemble import combined, disagreement
from kedge.stages.rl.judge import Judge
from kedge.stages.rl.judge import load_judge as load_judge
from kedge.stages.rl.scoring import score_sequences
from kedge.stages.shared.encoding import Encoder

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of a file, all in one row: `counts[i]` of them belong to `examples[i]`."""

    source: str
    kind: Kind
    examples: tuple[Example, ...]
    counts: tuple[int, ...]
    tokens: tuple[list[int], ...]
    num_cut: int
    """How many were longer than the judge reads."""
    num_broken: int
    set_aside: Path
    """Where the broken rows are, if there are any."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def by_example(self) -> Iterator[tuple[Example, slice]]:
        """Each example with the places of its answers."""
        start = 0
        for example, count in zip(self.examples, self.counts, strict=True):
            yield example, slice(start, start + count)
            start += count


def target_for(file: str, to: Path | None) -> Path:
    """Where the scores go: `to`, or `<stem>.scores.jsonl` here. Refused now rather than after an hour of scoring."""
    target = to or Path(f"{stem_of(file)}.scores.jsonl")
    if not target.name.endswith(WRITABLE):
        raise ConfigError(f"--to {target}: the name must end in {', '.join(WRITABLE)}")
    return target


def kind_to_score(file: str) -> Kind:
    """What `file` holds, if there is something to score in it."""
    layout = recognised(file, None, is_strict=False)  # whatever else is known of an answer, it can be scored
    if layout.kind == "prompts":
        raise DataError(
            f"{file}: holds prompts alone (read as {layout}), so there is nothing to score: a reward model scores "
            "answers, in pairs, rankings, thumbs or demonstrations. Where prompts have solutions, this makes answers "
            f"of them: kedge data convert '{file}' --kind demonstrations"
        )
    return layout.kind


def read_answers(file: str, kind: Kind, judge: Judge, *, beside: Path, progress: Progress = lambda _: None) -> Answers:
    """Every answer as the judge reads it; broken rows go to a file beside `beside`."""
    set_aside = beside.with_name(stem_of(beside) + SET_ASIDE_SUFFIX)
    reading = read(file, kind=kind, set_aside=set_aside, is_strict=False)
    encoder = judge.encoder
    examples: list[Example] = []
    counts: list[int] = []
    tokens: list[list[int]] = []
    num_cut = 0
    for example in reading:
        answers = answers_of(example)
        for prompt, answer in answers:
            one, is_cut = _encoded(encoder, example, prompt, answer)
            tokens.append(one)
            num_cut += is_cut
        examples.append(example)
        counts.append(len(answers))
        progress(len(examples))
    return Answers(
        source=file,
        kind=kind,
        examples=tuple(examples),
        counts=tuple(counts),
        tokens=tuple(tokens),
        num_cut=num_cut,
        num_broken=reading.num_broken,
        set_aside=set_aside,
    )


def answers_of(example: Example) -> tuple[tuple[Messages, Messages], ...]:
    """Prompt and answer of each text to score; of a pair the chosen one first, of a demonstration the last message."""
    match example:
        case Pair(prompt=prompt, chosen=chosen, rejected=rejected):
            return (prompt, chosen), (prompt, rejected)
        case Ranking(prompt=prompt, answers=answers):
            return tuple((prompt, answer) for answer in answers)
        case Thumb(prompt=prompt, answer=answer):
            return ((prompt, answer),)
        case Demonstration(messages=messages):
            return ((messages[:-1], messages[-1:]),)
        case Prompt():
            return ()


def score_answers(judge: Judge, answers: Answers, *, is_raw: bool, progress: Progress = lambda _: None) -> Tensor:
    """`scores_MNK`, normalised unless raw; every one of them is finite."""
    scores_MNK = score_sequences(judge.members, answers.tokens, normalised=not is_raw, progress=progress)
    is_bad_N = ~scores_MNK.isfinite().all(dim=2).all(dim=0)
    if bad := int(is_bad_N.sum()):
        first = int(is_bad_N.nonzero()[0])
        where = next(example.origin for example, own in answers.by_example() if own.start <= first < own.stop)
        raise NumericsError(
            f"{where}: the score is not a finite number, as for {bad} of {len(is_bad_N)} answers; nothing was written. "
            f"The weights in {judge.place} may be damaged, or overflow on this device"
        )
    return scores_MNK


def write_scores(to: Path, judge: Judge, answers: Answers, scores_MNK: Tensor) -> None:
    """The examples in canonical form with `scores`, an object for each answer in its order; whole or not at all."""
    combined_NK = combined(scores_MNK, judge.combine).tolist()
    spread_NK = disagreement(scores_MNK).tolist()
    members_NKM = scores_MNK.permute(1, 2, 0).tolist()
    several = len(judge.members) > 1

    def about(n: int) -> dict[str, Any]:
        each = [
            {"score": score} | ({"members": members, "disagreement": spread} if several else {})
            for score, members, spread in zip(combined_NK[n], members_NKM[n], spread_NK[n], strict=True)
        ]
        names = judge.facts.objectives
        return dict(zip(names, each, strict=True)) if len(names) > 1 else each[0]

    with row_writer(to) as write:
        for example, own in answers.by_example():
            write(to_fields(example) | {"scores": [about(n) for n in range(own.start, own.stop)]})


def _encoded(encoder: Encoder, example: Example, prompt: Messages, answer: Messages) -> tuple[list[int], bool]:
    """The tokens, and whether they are not all there."""
    try:
        tokens = encoder.tokens(prompt, answer)
    except DataError as error:
        raise DataError(f"{example.origin}: {error}") from error
    # Only a text that fills the window can have been cut.
    is_full = len(tokens) == encoder.max_length
    return tokens, is_full and len(replace(encoder, max_length=sys.maxsize).tokens(prompt, answer)) > len(tokens)
