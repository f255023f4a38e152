"""How unlike a model's answers to one prompt are: collapse shows here before it shows in scores.

Eight answers to each open prompt are sampled. Words, not tokens, are counted, so that models with other tokenizers can
be compared. A toxicity scorer has no place here: any reward source can score the same answers in a stage of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kedge.core.text_measures import distinct
from kedge.exams.exam import Metric, OpenQuestion, OpenReply, Score
from kedge.exams.items import ITEMS, hash_of_files, read_rows, unique_ids
from kedge.exams.written import WrittenExam

ANSWERS: Final = 8
TEMPERATURE: Final = 1.0
TOKENS: Final = 96
OPENING: Final = 4
"""Words of an opening."""
METRICS: Final[Mapping[str, Metric]] = {
    "distinct_2": Metric(better="more", summary="different pairs of words among all pairs in eight answers"),
    "distinct_1": Metric(better="more", summary="different words among all words in eight answers"),
    "self_bleu": Metric(better="less", summary="BLEU of an answer with the other seven as references"),
    "same_opening": Metric(better="less", summary=f"answers whose first {OPENING} words another one has too"),
}
_GRADING = 1
Words = Sequence[str]


def exam(folder: Path) -> WrittenExam:
    """From `items.jsonl`: id, prompt. Thirty prompts of our own ship."""
    rows = read_rows(folder / ITEMS)
    how = {"grading": _GRADING, "answers": ANSWERS, "temperature": TEMPERATURE, "tokens": TOKENS}
    return WrittenExam(
        name="diversity",
        title="Diversity: eight answers to each open prompt",
        licence="Apache-2.0 (Kedge)",
        metrics=METRICS,
        items_hash=hash_of_files(folder, **how),
        questions=tuple(
            OpenQuestion(
                item=item,
                turns=(("user", row.text("prompt")),),
                max_new_tokens=TOKENS,
                answers=ANSWERS,
                temperature=TEMPERATURE,
            )
            for item, row in zip(unique_ids(rows), rows, strict=True)
        ),
        grade=_grade,
    )


def _grade(item: str, reply: OpenReply) -> Iterator[Score]:
    answers = [words_of(text) for text in reply.texts]
    number: dict[str, int] = {}
    ids = [[number.setdefault(word, len(number)) for word in answer] for answer in answers]
    values = {
        "distinct_2": distinct(ids, 2),
        "distinct_1": distinct(ids, 1),
        "self_bleu": self_bleu(answers),
        "same_opening": same_opening(answers),
    }
    for metric, value in values.items():
        yield Score(item=item, metric=metric, score=value, answer="\n\n".join(reply.texts))


def words_of(text: str) -> list[str]:
    """Words and signs, in small letters.

    >>> words_of("It's late, go!")
    ["it's", 'late', ',', 'go', '!']
    """
    return re.findall(r"[\w'’]+|[^\w\s]", text.lower())


def same_opening(answers: Sequence[Words]) -> float:
    """The share of answers whose first words are those of another answer too.

    >>> same_opening([["a"], ["a"], ["b"], ["c"]])
    0.5
    """
    openings = Counter(tuple(answer[:OPENING]) for answer in answers)
    return sum(count for count in openings.values() if count > 1) / len(answers) if answers else 0.0


def self_bleu(answers: Sequence[Words]) -> float:
    """The mean BLEU-4 of each answer with all others as references (Zhu et al. 2018); 0 for a single one.

    >>> round(self_bleu([["a", "b", "c", "d"], ["a", "b", "c", "d"]]), 6)
    1.0
    """
    if len(answers) < 2:
        return 0.0
    return sum(bleu(answer, [*answers[:i], *answers[i + 1 :]]) for i, answer in enumerate(answers)) / len(answers)


def bleu(answer: Words, references: Sequence[Words], longest: int = 4) -> float:
    """Sentence BLEU (Papineni et al. 2002); from pairs on, a count of one is added on both sides (Lin and Och 2004).

    The words of "a b x" against "a b c": 2/3, (1+1)/(2+1), (0+1)/(1+1), (0+1)/(0+1), and no penalty for length.

    >>> round(bleu("abx", ["abc"]), 6) == round((2/3 * 2/3 * 1/2 * 1) ** 0.25, 6)
    True
    """
    if not answer or not any(references):
        return float(not answer and not all(references))
    total = 0.0
    for n in range(1, longest + 1):
        grams = _grams(answer, n)
        most: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            most |= _grams(reference, n)
        added = int(n > 1)
        hits = (grams & most).total() + added
        if not hits:
            return 0.0
        total += math.log(hits / (grams.total() + added))
    nearest = min((abs(len(reference) - len(answer)), len(reference)) for reference in references)[1]
    return min(1.0, math.exp(1 - nearest / len(answer))) * math.exp(total / longest)


def _grams(words: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
