"""Code problems in HumanEval's layout (Chen et al. 2021): a function to complete, run with its tests in the sandbox.

`pass@1` is the likeliest answer; `pass@5` is estimated without bias from ten sampled ones. Ten problems of ours ship.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kedge.core.quoting import quoted
from kedge.exams.exam import Dialogue, Metric, OpenQuestion, ProgramQuestion, ProgramReply, Reply, Score
from kedge.exams.items import ITEMS, Row, hash_of_files, read_rows, unique_ids
from kedge.exams.written import open_reply

SAMPLES: Final = 10
K: Final = 5
TEMPERATURE: Final = 0.8
TOKENS: Final = 384
_GRADING = 1
_FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    item: str
    prompt: str
    """The head of the function with its docstring, and what it needs above it."""
    entry_point: str
    test: str
    """Defines `check(candidate)`, which raises where the function is wrong."""
    canonical_solution: str
    """The body of a right function: not needed to grade."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExam:
    problems: tuple[Problem, ...]
    items_hash: str
    licence: str
    name: str = "code"
    title: str = "Code: functions that must pass their tests"

    @property
    def metrics(self) -> dict[str, Metric]:
        return {
            "pass@1": Metric(better="more", summary="problems that the likeliest answer solves"),
            f"pass@{K}": Metric(better="more", summary=f"problems that one of {K} sampled answers solves, expected"),
        }

    def take(self, seed: int) -> Dialogue:
        del seed  # the engine draws
        greedy = [_ask(problem) for problem in self.problems]
        sampled = [_ask(problem, answers=SAMPLES, temperature=TEMPERATURE) for problem in self.problems]
        replies = yield [*greedy, *sampled]
        texts = [open_reply(reply).texts for reply in replies]
        owners = [*self.problems, *self.problems]
        programs = [
            ProgramQuestion(item=f"{problem.item}:{number}", program=program_of(problem, text))
            for problem, answers in zip(owners, texts, strict=True)
            for number, text in enumerate(answers)
        ]
        outcomes = iter(_passed((yield programs)))
        scores: list[Score] = []
        for index, (problem, answers) in enumerate(zip(owners, texts, strict=True)):
            right = sum(next(outcomes) for _ in answers)
            k = 1 if index < len(self.problems) else K
            share = pass_at_k(len(answers), right, k)
            scores.append(Score(item=problem.item, metric=f"pass@{k}", score=share, answer="\n\n".join(answers)))
        return scores


def exam(folder: Path) -> CodeExam:
    """From `items.jsonl`: task_id, prompt, entry_point, canonical_solution, test."""
    rows = read_rows(folder / ITEMS)
    problems = tuple(_problem(item, row) for item, row in zip(unique_ids(rows, "task_id"), rows, strict=True))
    how = {"grading": _GRADING, "samples": SAMPLES, "temperature": TEMPERATURE, "tokens": TOKENS}
    return CodeExam(problems=problems, items_hash=hash_of_files(folder, **how), licence="as its files say")


def _problem(item: str, row: Row) -> Problem:
    problem = Problem(
        item=item,
        prompt=row.text("prompt"),
        entry_point=row.text("entry_point"),
        test=row.text("test"),
        canonical_solution=row.text("canonical_solution", ""),
    )
    if not problem.entry_point.isidentifier() or not _head(problem.entry_point).search(problem.prompt):
        raise row.problem("entry_point", "the name of a function that `prompt` begins", problem.entry_point)
    if not _head("check").search(problem.test):
        raise row.problem("test", "code that defines check(candidate)", problem.test)
    return problem


def _head(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async )?def {re.escape(name)}\b", re.MULTILINE)


def _ask(problem: Problem, *, answers: int = 1, temperature: float = 0.0) -> OpenQuestion:
    words = f"Complete the Python function {problem.entry_point}. Reply with the whole function in a code block.\n\n"
    return OpenQuestion(
        item=problem.item,
        turns=(("user", f"{words}```python\n{problem.prompt.rstrip()}\n```"),),
        max_new_tokens=TOKENS,
        answers=answers,
        temperature=temperature,
    )


def program_of(problem: Problem, answer: str) -> str:
    """What is run: the answer's function, or the prompt with the answer as its body, and then the tests."""
    blocks = _FENCE.findall(answer) or [answer]
    head = _head(problem.entry_point)
    code = next((block for block in blocks if head.search(block)), None)
    if code is None:
        code = problem.prompt + _body(blocks[0])
    else:  # imports and helpers that the prompt has above the function
        start = head.search(problem.prompt)
        code = f"{problem.prompt[: start.start() if start else 0]}\n{code}"
    return f"{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def _body(text: str) -> str:
    """The indented lines at the start; whatever follows at the margin is no part of the function."""
    lines = text.strip("\n").split("\n")
    if lines and lines[0][:1].strip():  # a model that goes on after the prompt's last space has indented the first line
        lines[0] = "    " + lines[0]
    margin = next((number for number, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:margin]) + "\n"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k answers, drawn from the samples without replacement, is right: 1 − C(n−c, k)/C(n, k).

    >>> pass_at_k(4, 1, 1), round(pass_at_k(10, 2, 5), 4), pass_at_k(10, 6, 5)
    (0.25, 0.7778, 1.0)
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"k from 1 to {samples} and right answers from 0 to that: found {quoted((k, right))}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def _passed(replies: Sequence[Reply]) -> Iterator[bool]:
    for reply in replies:
        assert isinstance(reply, ProgramReply)
        yield reply.passed
