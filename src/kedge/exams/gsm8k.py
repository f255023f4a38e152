"""GSM8K (Cobbe et al. 2021) and our own word problems: the number at the end of a worked answer.

`strict` wants it marked on the last line, as #### N or \\boxed{N}, which the examples show; `flexible` takes the last
number of the answer, so that a model that can calculate but ignores the form is told from one that cannot. All answers
are numbers and are compared as such.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from kedge.exams.checks import last_number
from kedge.exams.exam import Metric, OpenQuestion, OpenReply, Score, Turns
from kedge.exams.items import ITEMS, Row, hash_of_files, read_rows
from kedge.exams.written import WrittenExam

METRICS: Final[Mapping[str, Metric]] = {
    "strict": Metric(better="more", summary="right answers, marked on the last line as #### N or \\boxed{N}"),
    "flexible": Metric(better="more", summary="answers whose last number is right"),
}
_GRADING = 1
_MARK = re.compile(r"####\s*([^\n]+)|\\boxed\{([^{}]*)\}")
_ASK = "Solve the problem step by step. End with a line that has #### and the answer as a number."

SHOTS: Final[tuple[tuple[str, str], ...]] = (
    (
        "A baker puts 6 rolls into each bag and fills 7 bags. She sells 30 rolls. How many rolls are left?",
        "She bakes 6 * 7 = 42 rolls.\nAfter selling 30 there are 42 - 30 = 12 left.\n#### 12",
    ),
    (
        "Tickets cost $9 for adults and $5 for children. What do 2 adults and 4 children pay?",
        "The adults pay 2 * 9 = $18.\nThe children pay 4 * 5 = $20.\nTogether that is 18 + 20 = $38.\n#### 38",
    ),
    (
        "A train leaves at 8:40 and arrives at 10:15. How many minutes does it travel?",
        "From 8:40 to 9:00 are 20 minutes.\nFrom 9:00 to 10:15 are 75 minutes.\n20 + 75 = 95 minutes.\n#### 95",
    ),
    (
        "Nora reads 24 pages on Monday and half as many on Tuesday. On Wednesday she reads as many as on both days "
        "together. How many pages does she read in all?",
        "On Tuesday she reads 24 / 2 = 12 pages.\nOn both days she reads 24 + 12 = 36 pages.\n"
        "With Wednesday that is 36 + 36 = 72 pages.\n#### 72",
    ),
    (
        "A tank holds 240 litres and is 3/4 full. A pump takes out 15 litres a minute. After how many minutes is it "
        "empty?",
        "There are 240 * 3 / 4 = 180 litres in it.\nThe pump needs 180 / 15 = 12 minutes.\n#### 12",
    ),
    (
        "A jacket costs $80. It is reduced by 25%, then $5 more are taken off. What does it cost now?",
        "25% of 80 is $20, which leaves 80 - 20 = $60.\nThen it costs 60 - 5 = $55.\n#### 55",
    ),
    (
        "Three friends share 50 marbles. Ali gets 4 more than Ben, and Cem gets twice as many as Ben, with 2 marbles "
        "left over. How many does Cem get?",
        "They get 50 - 2 = 48 marbles.\nIf Ben gets x, then x + 4 + x + 2x = 48, so 4x = 44 and x = 11.\n"
        "Cem gets 2 * 11 = 22.\n#### 22",
    ),
    (
        "A garden is 12 m long and 8 m wide. A fence costs $3 a metre. What does a fence around it cost?",
        "Around the garden are 2 * (12 + 8) = 40 metres.\nThe fence costs 40 * 3 = $120.\n#### 120",
    ),
)
"""Worked examples of our own, which stand before every question in this order."""


def exam(folder: Path) -> WrittenExam:
    """From `items.jsonl`: a `question` (or a `prompt` of turns) and its `answer`, a number or a text with #### N."""
    return _exam(folder, name="gsm8k", title="GSM8K: word problems", licence="MIT", tokens=320)


def arithmetic(folder: Path) -> WrittenExam:
    """Our own small set, which ships."""
    return _exam(
        folder, name="arithmetic", title="Arithmetic: short word problems", licence="Apache-2.0 (Kedge)", tokens=160
    )


def _exam(folder: Path, *, name: str, title: str, licence: str, tokens: int) -> WrittenExam:
    rows = read_rows(folder / ITEMS)
    items = {row.text("id", str(number)): row for number, row in enumerate(rows)}
    if len(items) < len(rows):
        raise rows[0].problem("id", "another one in every row", "the same one in two")
    return WrittenExam(
        name=name,
        title=title,
        licence=licence,
        metrics=METRICS,
        items_hash=hash_of_files(folder, grading=_GRADING, shots=SHOTS, ask=_ASK, tokens=tokens),
        questions=tuple(
            OpenQuestion(item=item, turns=turns_of(_question(row)), max_new_tokens=tokens)
            for item, row in items.items()
        ),
        grade=partial(_grade, {item: _answer(row) for item, row in items.items()}),
    )


def turns_of(question: str) -> Turns:
    """The examples as turns that were answered, then the question; what is wanted stands at the start."""
    shots = [turn for asked, answer in SHOTS for turn in (("user", asked), ("assistant", answer))]
    turns = [*shots, ("user", question)]
    turns[0] = ("user", f"{_ASK}\n\n{turns[0][1]}")
    return tuple(turns)


def _question(row: Row) -> str:
    if "question" in row.fields:
        return row.text("question").strip()
    turns = row.fields.get("prompt")
    last: Any = cast(list[Any], turns)[-1] if isinstance(turns, list) and turns else turns
    content = cast(dict[str, Any], last).get("content") if isinstance(last, dict) else last
    if not isinstance(content, str) or not content.strip():
        raise row.problem("prompt", "a text, or turns with role and content (or a field `question`)", turns)
    return content.strip()


def _answer(row: Row) -> float:
    text = row.text("answer")
    number = last_number(text)
    if number is None:
        raise row.problem("answer", "a number, or a text that ends with #### and one", text)
    return number


def marked_number(answer: str) -> float | None:
    """The number that the last line marks as the answer.

    >>> marked_number("6 * 7 = 42\\n#### 42\\n"), marked_number("So \\\\boxed{1,200}."), marked_number("It is 42.")
    (42.0, 1200.0, None)
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    marks = list(_MARK.finditer(lines[-1])) if lines else []
    return last_number(marks[-1][1] or marks[-1][2] or "") if marks else None


def _grade(answers: Mapping[str, float], item: str, reply: OpenReply) -> Iterator[Score]:
    text = reply.texts[0]
    for metric, number in (("strict", marked_number(text)), ("flexible", last_number(text))):
        is_right = number is not None and math.isclose(number, answers[item], rel_tol=1e-9, abs_tol=1e-9)
        yield Score(item=item, metric=metric, score=float(is_right), answer=text)
