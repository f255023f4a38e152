"""Code against tests: the program of an answer runs in the sandbox with the tests of its prompt.

A test is a Python statement that must not raise (`assert f(2) == 3`), or an object with `input` and `output`: then the
program runs by itself and what it prints is compared here. White space at ends of lines is ignored. Neither a
comparison of output nor an assertion that compares with a literal can be forged, and what is expected never enters the
program's process (`assertions`); other statements run there, and a program that looks for them can forge them.
A row without tests has no score; a program that fails, for whatever reason, has failed its tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.core.answers import Answer
from kedge.core.errors import RewardError
from kedge.rewards.context import RewardContext
from kedge.rewards.extraction import extract_all
from kedge.rewards.failures import ScoreResult, Source, unscored
from kedge.rewards.isolation import choose, describe
from kedge.rewards.sandbox import Job, Limits, Outcome, run, run_all
from kedge.rewards.settings import UnitTestsSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    statements: tuple[str, ...]
    printed: tuple[tuple[str, str], ...]
    """Input and expected output."""

    def __len__(self) -> int:
        return len(self.statements) + len(self.printed)


def make(settings: UnitTestsSource, context: RewardContext) -> Source:
    limits = Limits(
        wall_s=settings.timeout_s,
        cpu_s=max(1, round(settings.timeout_s)),
        memory_mb=settings.memory_mb,
        network=settings.network,
        isolation=settings.isolation,
    )
    layer = choose(settings.isolation, settings.network)
    trial = run(Job(code=""), limits)  # a machine that cannot run the sandbox says so before the first answer
    if trial.ending != "done":
        raise RewardError(f"unit_tests: {trial.detail}")
    context.note("reward.isolation", f"the code of answers runs with {describe(layer, settings.network)}")

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        programs = extract_all([answer.text for answer in answers], settings.extract)
        tests = [read_tests(answer.extra.get(settings.tests)) for answer in answers]
        jobs: list[Job] = []
        spans: list[slice] = []
        for program, its in zip(programs, tests, strict=True):
            new = jobs_of(program.text, its) if program.text is not None and isinstance(its, Tests) else []
            spans.append(slice(len(jobs), len(jobs) + len(new)))
            jobs += new
        outcomes = run_all(jobs, limits, workers=settings.workers)
        return [
            _result(program.failure, its, outcomes[span], is_share=settings.give == "share")
            for program, its, span in zip(programs, tests, spans, strict=True)
        ]

    return Source(judge)


def read_tests(field: Any) -> Tests | str:
    """The tests of a prompt, or what is wrong with them.

    >>> read_tests("assert f(1) == 2").statements
    ('assert f(1) == 2',)
    >>> read_tests([])
    'the prompt has no tests'
    >>> read_tests(5)
    'the tests of the prompt are 5, a int; expected a list of them'
    """
    tests: Sequence[Any] = [field] if isinstance(field, str | Mapping) else [] if field is None else field
    if not isinstance(tests, Sequence):
        return f"the tests of the prompt are {str(field)[:60]}, a {type(field).__name__}; expected a list of them"
    if not tests:
        return "the prompt has no tests"
    statements = tuple(test for test in tests if isinstance(test, str))
    printed = [test for test in tests if isinstance(test, Mapping) and {"input", "output"} <= set(test)]
    if len(statements) + len(printed) != len(tests):
        return "a test must be a Python statement, or an object with `input` and `output`"
    return Tests(statements=statements, printed=tuple((str(test["input"]), str(test["output"])) for test in printed))


def jobs_of(program: str, tests: Tests) -> list[Job]:
    """One run for all statements, and one for each input."""
    checked = [Job(code=program, checks=tests.statements)] if tests.statements else []
    return checked + [Job(code=program, stdin=stdin) for stdin, _ in tests.printed]


def _result(failure: str, tests: Tests | str, outcomes: Sequence[Outcome], *, is_share: bool) -> ScoreResult:
    if failure or isinstance(tests, str):
        return unscored(failure or str(tests))
    if unstarted := next((outcome for outcome in outcomes if outcome.ending == "unstarted"), None):
        return unscored(unstarted.detail)
    checked = outcomes[0].passed if tests.statements and outcomes else ()
    runs = outcomes[1 if tests.statements else 0 :]
    printed = [
        outcome.ending == "done" and _lines(outcome.stdout) == _lines(expected)
        for outcome, (_, expected) in zip(runs, tests.printed, strict=False)  # no runs where there is no program
    ]
    share = (sum(checked) + sum(printed)) / len(tests)
    return ScoreResult(share if is_share else float(share == 1.0))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
