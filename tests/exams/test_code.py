"""Code problems: ours are solved by their solutions and by no broken one, in the real sandbox."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kedge.core.errors import DataError
from kedge.exams import code
from kedge.exams.code import CodeExam, Problem, exam, pass_at_k, program_of
from kedge.exams.exam import OpenReply, ProgramReply
from kedge.rewards.isolation import choose
from kedge.rewards.sandbox import Job, Limits, run_all

WALLS: Any = choose("any")


def passed(programs: list[str]) -> list[bool]:
    outcomes = run_all([Job(code=program) for program in programs], Limits(isolation=WALLS), workers=2)
    return [outcome.ending == "done" for outcome in outcomes]


def shipped() -> CodeExam:
    return exam(Path(code.__file__).parent / "shipped" / "code")


class Swap(ast.NodeTransformer):
    """Changes the n-th place of a function at which a plausible slip can be made."""

    SIGNS: ClassVar[dict[Any, Any]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv}

    def __init__(self, place: int) -> None:
        self.left = place

    def is_here(self) -> bool:
        self.left -= 1
        return self.left == -1

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        swapped = self.SIGNS.get(type(node.op))
        return ast.BinOp(node.left, swapped(), node.right) if swapped and self.is_here() else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        return ast.Return(ast.Constant(None)) if self.is_here() else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, ast.USub) and self.is_here() else node


def broken(problem: Problem) -> Iterator[str]:
    solution = problem.prompt + problem.canonical_solution
    for place in range(20):
        swap = Swap(place)
        tree = ast.fix_missing_locations(swap.visit(ast.parse(solution)))
        if swap.left >= 0:
            return
        yield ast.unparse(tree)


def test_our_solutions_pass_and_broken_ones_fail() -> None:
    problems = shipped().problems
    right = [program_of(problem, problem.prompt + problem.canonical_solution) for problem in problems]
    wrong = [program_of(problem, slip) for problem in problems for slip in broken(problem)]
    assert len(right) == 10
    assert len(wrong) >= 20
    outcomes = passed(right + wrong)
    assert [place for place, is_right in enumerate(outcomes[:10]) if not is_right] == []
    assert [wrong[place] for place, is_right in enumerate(outcomes[10:]) if is_right] == []


PROBLEM = Problem(
    item="p",
    prompt='import math\n\ndef area(r: float) -> float:\n    """The area of a circle."""\n',
    entry_point="area",
    test="def check(candidate):\n    assert round(candidate(1), 4) == 3.1416\n",
    canonical_solution="    return math.pi * r * r\n",
)


def test_answers_in_every_form_become_programs() -> None:
    whole = "def area(r):\n    return math.pi * r**2"
    answers = [
        f"Here it is:\n```python\n{whole}\n```\nIt uses pi.",
        f"```\nprint(area(2))\n```\n```py\n{whole}\n```",
        f"```python\n{whole}",
        whole,
        "    return math.pi * r**2\n\nprint(undefined)",
        "return math.pi * r**2",
        "```python\n    return math.pi * r**2\n```",
    ]
    wrong = ["I cannot do that.", "", "```python\ndef area(r):\n    return r\n```"]
    assert passed([program_of(PROBLEM, answer) for answer in answers + wrong]) == [True] * 7 + [False] * 3


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    for right in range(7):
        draws = list(combinations([True] * right + [False] * (6 - right), 3))
        assert pass_at_k(6, right, 3) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="k from 1 to 4"):
        pass_at_k(4, 2, 5)


def test_the_likeliest_answer_counts_once_and_ten_samples_together() -> None:
    problem = shipped().problems[0]
    one = CodeExam(problems=(problem,), items_hash="", licence="")
    dialogue = one.take(0)
    greedy, sampled = next(dialogue)
    assert (getattr(greedy, "answers", None), getattr(sampled, "answers", None)) == (1, 10)
    replies = [OpenReply(texts=("a",) * count, is_finished=(True,) * count) for count in (1, 10)]
    programs = dialogue.send(replies)
    assert len(programs) == 11
    with pytest.raises(StopIteration) as end:
        dialogue.send([ProgramReply(passed=place in (3, 4)) for place in range(11)])
    assert [(score.metric, round(score.score, 4)) for score in end.value.value] == [("pass@1", 0.0), ("pass@5", 0.7778)]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("entry_point", "volume", "entry_point: expected the name of a function that `prompt` begins, found 'volume'"),
        ("test", "assert True", "test: expected code that defines check"),
    ],
)
def test_a_wrong_problem_is_named(tmp_path: Path, field: str, value: str, words: str) -> None:
    row = {"task_id": "p", "prompt": PROBLEM.prompt, "entry_point": "area", "test": PROBLEM.test, field: value}
    (tmp_path / "items.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=words):
        exam(tmp_path)
