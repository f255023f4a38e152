"""Programs of answers against the tests of prompts, through the real sandbox."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.rewards import isolation
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import RewardError
from kedge.rewards.isolation import choose
from kedge.rewards.settings import UnitTestsSource
from kedge.rewards.unit_tests import make, read_tests

WALLS: Any = choose("any")  # also as root on a machine without namespaces
Make = Callable[..., Answer]

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n"
SUBTRACT = ADD.replace("a + b", "a - b")
ECHO = "```\nprint(int(input()) * 2)\n```"
SUMS = ["assert add(2, 3) == 5", "assert add(2, 0) == 2"]
DOUBLES = [{"input": "4", "output": "8"}, {"input": "x", "output": "xx"}]


def test_all_or_share(answer: Make, context: RewardContext) -> None:
    rows = [
        answer(ADD, tests=SUMS),
        answer(SUBTRACT, tests=SUMS),
        answer(ECHO, tests=DOUBLES),
        answer(ECHO, tests=DOUBLES[0]),
        answer("def add(a, b): return a + b", tests=SUMS),
        answer(ADD + "```\nwhile True: pass\n```", tests=SUMS[0]),
        answer(ADD, tests=[*SUMS, DOUBLES[0]]),
    ]
    share = make(UnitTestsSource(kind="unit_tests", isolation=WALLS, give="share", timeout_s=1), context)
    assert share.score(rows) == [1.0, 0.5, 0.5, 1.0, 0.0, 0.0, 2 / 3]
    whole = make(UnitTestsSource(kind="unit_tests", isolation=WALLS, timeout_s=1), context)
    assert whole.score(rows) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "the prompt has no tests"),
        ([], "the prompt has no tests"),
        ([3], "a test must be a Python statement, or an object with `input` and `output`"),
        ([{"input": "a"}], "a test must be a Python statement, or an object with `input` and `output`"),
    ],
)
def test_rows_without_tests_have_no_score(answer: Make, context: RewardContext, tests: Any, reason: str) -> None:
    source = make(UnitTestsSource(kind="unit_tests", isolation=WALLS), context)
    first, second = source.judge([answer(ADD, tests=tests), answer(ADD, tests=SUMS)])
    assert math.isnan(first.score)
    assert first.reason == reason
    assert second.score == 1.0


@pytest.mark.parametrize("cheat", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_leaving_early_is_no_pass(answer: Make, context: RewardContext, cheat: str) -> None:
    source = make(UnitTestsSource(kind="unit_tests", isolation=WALLS), context)
    assert source.score([answer(f"```\n{cheat}\n```", tests=SUMS), answer(f"```\n{cheat}\n```", tests=DOUBLES)]) == [
        0,
        0,
    ]


def test_printing_and_then_failing_is_no_pass(answer: Make, context: RewardContext) -> None:
    source = make(UnitTestsSource(kind="unit_tests", isolation=WALLS, give="share"), context)
    right, broken = "print(8)", "print(8)\n1 / 0"
    rows = [answer(f"```\n{code}\n```", tests=DOUBLES[:1]) for code in (right, broken)]
    assert source.score(rows) == [1.0, 0.0]


def test_tests_can_live_in_another_field(answer: Make, context: RewardContext) -> None:
    source = make(UnitTestsSource(kind="unit_tests", isolation=WALLS, tests="checks", extract="whole"), context)
    assert source.score([answer("x = 1", checks="assert x == 1"), answer("x = 2", checks="assert x == 1")]) == [1, 0]


def _no_process(wall: isolation.Wall) -> isolation.Server:
    raise OSError("no process left")


def test_a_machine_in_trouble_is_no_fault_of_the_answer(
    answer: Make, context: RewardContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(UnitTestsSource(kind="unit_tests", isolation=WALLS), context)
    monkeypatch.setattr(isolation, "server_for", _no_process)
    (result,) = source.judge([answer(ADD, tests=SUMS)])
    assert math.isnan(result.score)
    assert result.reason.startswith("the sandbox did not start")
    with pytest.raises(RewardError, match="unit_tests: the sandbox did not start"):
        make(UnitTestsSource(kind="unit_tests", isolation=WALLS), context)


def test_it_says_at_its_start_which_walls_stand(context: RewardContext) -> None:
    notes: list[tuple[str, str]] = []
    heard = replace(context, note=lambda code, words: notes.append((code, words)))
    make(UnitTestsSource(kind="unit_tests", isolation=WALLS), heard)
    ((code, words),) = notes
    assert code == "reward.isolation"
    assert words.startswith(f"the code of answers runs with isolation {WALLS} (")


def test_a_machine_that_must_not_run_code_refuses(context: RewardContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "tried", lambda layer, network: isolation.Trial(locks={}, reason="not here"))
    with pytest.raises(ConfigError, match="not run here"):
        make(UnitTestsSource(kind="unit_tests"), context)


def test_an_answer_that_equals_everything_passes_nothing(answer: Make, context: RewardContext) -> None:
    cheat = "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    source = make(UnitTestsSource(kind="unit_tests", give="share", isolation=WALLS), context)
    assert source.score([answer(f"```\n{cheat}\n```", tests=SUMS)]) == [0.0]


@pytest.mark.parametrize("field", [5, 1.5, True, 0, False, {1, 2}, object])
def test_tests_that_are_no_list_have_words(field: Any) -> None:
    problem = read_tests(field)
    assert isinstance(problem, str)
    assert f"a {type(field).__name__}; expected a list of them" in problem


def test_a_field_without_tests_is_said_as_such() -> None:
    assert read_tests(None) == read_tests([]) == read_tests(()) == "the prompt has no tests"
