"""Word problems: what counts as an answer, and that ours and their worked examples are right."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.exams import gsm8k
from kedge.exams.exam import OpenReply, Score

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip


def value_of(formula: ast.AST) -> float:
    match formula:
        case ast.Expression(body):
            return value_of(body)
        case ast.Constant(int() | float() as number):
            return number
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](value_of(left), value_of(right))
        case ast.UnaryOp(sign, operand):
            return OPERATORS[type(sign)](value_of(operand))
        case _:
            raise ValueError(ast.dump(formula))


def calculated(formula: str) -> float:
    return value_of(ast.parse(formula.strip(), mode="eval"))


def test_our_problems_have_the_answers_of_their_formulas() -> None:
    folder = Path(gsm8k.__file__).parent / "shipped" / "arithmetic"
    rows = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 40
    assert len(gsm8k.arithmetic(folder).questions) == 40
    for row in rows:
        assert calculated(row["formula"]) == pytest.approx(float(row["answer"]), abs=1e-9), row["id"]


@pytest.mark.parametrize("shot", gsm8k.SHOTS, ids=lambda shot: shot[0][:30])
def test_the_worked_examples_are_right_line_by_line(shot: tuple[str, str]) -> None:
    sides: list[float] = []
    for step in shot[1].replace("$", "").replace("%", "").split("\n"):
        words = [word.strip(".,") for word in step.split()]
        for place, word in enumerate(words):
            if word != "=" or any(letter in "".join(words) for letter in "x"):
                continue
            left = [""]
            for other in reversed(words[:place]):
                if not set(other) <= set("0123456789+-*/()."):
                    break
                left.insert(0, other)
            sides.append(float(words[place + 1]))
            assert calculated(" ".join(left)) == sides[-1], step
    assert gsm8k.marked_number(shot[1]) is not None
    assert not sides or "x" in shot[1] or gsm8k.marked_number(shot[1]) == sides[-1]


def grades(folder: Path, answer: str) -> dict[str, float]:
    dialogue = gsm8k.exam(folder).take(0)
    next(dialogue)
    with pytest.raises(StopIteration) as end:
        dialogue.send([OpenReply(texts=(answer,), is_finished=(True,))])
    scores: list[Score] = end.value.value
    return {score.metric: score.score for score in scores}


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("6 * 7 = 42\n#### 42", 1, 1),
        ("So \\boxed{42}.", 1, 1),
        ("#### $42.00\n\n", 1, 1),
        ("It is 42.", 0, 1),
        ("#### 42\nThat was all.", 0, 1),
        ("#### 41\nso 42", 0, 1),
        ("42 of 50", 0, 0),
        ("#### forty-two", 0, 0),
        ("", 0, 0),
    ],
)
def test_strict_wants_the_mark_on_the_last_line(tmp_path: Path, answer: str, strict: int, flexible: int) -> None:
    (tmp_path / "items.jsonl").write_text('{"question": "6 times 7?", "answer": "Six sevens.\\n#### 42"}\n')
    assert grades(tmp_path, answer) == {"strict": strict, "flexible": flexible}


def test_turns_are_read_too_and_the_examples_stand_before(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"prompt": [{"role": "user", "content": "6 times 7?"}], "answer": 42}\n')
    turns = gsm8k.exam(tmp_path).questions[0].turns
    assert turns[-1] == ("user", "6 times 7?")
    assert len(turns) == 2 * 8 + 1
    assert turns[0][1].startswith("Solve the problem step by step.")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"question": "6 times 7?", "answer": "many"}', r"items\.jsonl:1: answer: expected a number.*found 'many'"),
        ('{"prompt": [], "answer": "1"}', r"items\.jsonl:1: prompt: expected a text, or turns"),
    ],
)
def test_a_wrong_item_is_named(tmp_path: Path, row: str, words: str) -> None:
    (tmp_path / "items.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=words):
        gsm8k.exam(tmp_path)
