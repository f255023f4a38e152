"""Functions of the user's: loaded by file and name, called as they ask to be, believed only where they make sense."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from kedge.core import plugins
from kedge.core.answers import Answer, TextSource
from kedge.core.errors import ConfigError, PluginError
from kedge.rewards.callables import identity_of
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import RewardError, Source
from kedge.rewards.function import make, make_callable, source
from kedge.rewards.settings import CallableSource, FunctionSource

Make = Callable[..., Answer]

FILE = """
from dataclasses import dataclass

@dataclass
class Helper:
    word: str

def lengths(answers):
    return [len(answer.text) for answer in answers]

def first(answer):
    return ord(answer.text[0])

def other(text):
    return 0
"""


def load(context: RewardContext, path: str, text: str = FILE) -> TextSource:
    (context.folder / "mine.py").write_text(text)
    return make(FunctionSource(kind="function", path=path), context)


def test_a_list_at_once_or_one_by_one(context: RewardContext, answer: Make) -> None:
    rows = [answer("bb"), answer(""), answer("a")]
    assert load(context, "mine.py:lengths").score(rows) == [2.0, 0.0, 1.0]
    loaded = load(context, "mine.py:first")
    assert isinstance(loaded, Source)
    results = loaded.judge(rows)
    assert [result.score for result in results if result.is_scored] == [98.0, 97.0]
    assert results[1].reason == "IndexError: string index out of range"


def test_an_exception_costs_the_rows_it_was_called_with(answer: Make) -> None:
    def score(answers: Sequence[Answer]) -> list[float]:
        raise KeyError("gone")

    results = source(score, name="f").judge([answer("x"), answer("y")])
    assert [(math.isnan(v.score), v.reason) for v in results] == [(True, "KeyError: 'gone'")] * 2
    assert source(score, name="f").judge([]) == []


@pytest.mark.parametrize("returned", [[0.5, None, 2], torch.tensor([0.5, math.nan, 2]), (0.5, math.inf, True + 1)])
def test_numbers_of_any_make(answer: Make, returned: Any) -> None:
    def score(answers: Sequence[Answer]) -> Any:
        return returned

    scores = source(score, name="f").score([answer("x")] * 3)
    assert (scores[0], scores[2]) == (0.5, 2.0)
    assert math.isnan(scores[1])


def two_of(kind: str) -> Any:
    """A generator or coroutine, made anew for each test."""

    async def later() -> list[float]:
        return [1.0, 2.0]

    coroutine = later()
    coroutine.close()
    return {"generator": (float(row) for row in range(2)), "map": map(float, "12"), "coroutine": coroutine}[kind]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "f returned 1 scores for 2 answers; one for each is needed"),
        ([1.0] * 3, "f returned 3 scores for 2 answers; one for each is needed"),
        (1.0, "f returned a float, expected a list of 2 numbers"),
        (None, "f returned a NoneType, expected a list of 2 numbers"),
        ("12", "f returned a str, expected a list of 2 numbers"),
        ({0: 1.0, 1: 2.0}, "f returned a dict, expected a list of 2 numbers"),
        ({1.0, 2.0}, "f returned a set, expected a list of 2 numbers"),
        (two_of("generator"), "f returned a generator, expected a list of 2 numbers; put list(…) around it"),
        (two_of("map"), "f returned a map, expected a list of 2 numbers; put list(…) around it"),
        (two_of("coroutine"), "f returned a coroutine, expected a list of 2 numbers"),
        (torch.zeros(2, 2), "f returned a Tensor of shape (2, 2), expected a list of 2 numbers"),
        (np.zeros((2, 2)), "f returned a ndarray of shape (2, 2), expected a list of 2 numbers"),
        (np.zeros((2, 1)), "f returned a ndarray of shape (2, 1), expected a list of 2 numbers"),
        (torch.tensor(1.0), "f returned a Tensor of shape (), expected a list of 2 numbers"),
        ([1.0, "2"], "f returned '2' as the score of answer 2 of 2, a str; expected a number or None"),
        ([1.0, [2.0]], "f returned [2.0] as the score of answer 2 of 2, a list; expected a number or None"),
        ([1j, 1.0], "f returned 1j as the score of answer 1 of 2, a complex; expected a number or None"),
        (
            [torch.zeros(2), 1.0],
            "f returned tensor([0., 0.]) as the score of answer 1 of 2, a Tensor of shape (2,); expected a number or "
            "None",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_kind_of_result_is_an_error(answer: Make, returned: Any, message: str) -> None:
    def score(answers: Sequence[Answer]) -> Any:
        return returned

    with pytest.raises(RewardError) as error:
        source(score, name="f").score([answer("x"), answer("y")])
    assert str(error.value) == message


def test_a_wrong_kind_of_one_score_names_its_row(answer: Make) -> None:
    def score(answer: Answer) -> Any:
        return answer.text if answer.text == "b" else 1.0

    with pytest.raises(RewardError, match=r"f returned 'b' as the score of answer 2 of 3, a str"):
        source(score, name="f").score([answer("a"), answer("b"), answer("c")])


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (10**400, "the function gave a number too large for a score"),
        (Fraction(10**400), "the function gave a number too large for a score"),
        (1e300, "the function gave 1e+300, too large for a score"),
        (-(10**39), "the function gave -1e+39, too large for a score"),
        (math.nan, "the function gave nan"),
        (np.float32("inf"), "the function gave inf"),
        (torch.tensor(-math.inf), "the function gave -inf"),
        (None, "the function gave None"),
    ],
)
def test_a_number_that_is_no_score(answer: Make, returned: Any, reason: str) -> None:
    (result,) = source(lambda answer: returned, name="f").judge([answer("x")])
    assert (result.is_scored, result.reason) == (False, reason)


@pytest.mark.parametrize("returned", [True, np.bool_(True), np.int64(1), torch.tensor([1.0]), Fraction(1), 1])
def test_a_number_that_is_one(answer: Make, returned: Any) -> None:
    assert source(lambda answer: returned, name="f").score([answer("x")]) == [1.0]


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), GeneratorExit(), asyncio.CancelledError()])
def test_a_function_that_ends_the_program_costs_its_rows(answer: Make, error: BaseException) -> None:
    """And not the run, which would look as if it were done."""

    def one(answer: Answer) -> float:
        raise error

    def all_of(answers: Sequence[Answer]) -> list[float]:
        raise error

    for function in (one, all_of):
        (result,) = source(function, name="f").judge([answer("x")])
        assert result.reason == f"{type(error).__name__}: {error}"


def test_who_is_at_the_keyboard_is_heard(answer: Make) -> None:
    def score(answer: Answer) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source(score, name="f").judge([answer("x")])


def test_a_function_that_answers_later_is_refused_at_once() -> None:
    async def score(answer: Answer) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="f is an `async def`"):
        source(score, name="f")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine.py:lenghts", "has no function 'lenghts' (did you mean 'lengths'?); it has: lengths, first, other"),
        ("mine.py:other", "mine.py:other: found parameters (text), expected `answers`"),
        ("exact", "function.path: 'exact' is a kind of its own; write `kind: exact`"),
        ("other.py:f", "other.py; expected `file.py:function`, relative to the recipe"),
    ],
)
def test_what_cannot_be_loaded(context: RewardContext, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(context, path)
    assert message in str(error.value)


def test_a_file_that_cannot_be_imported(context: RewardContext) -> None:
    with pytest.raises(ConfigError, match=r"mine.py cannot be imported: line 1: ZeroDivisionError: division by zero"):
        load(context, "mine.py:f", "1 / 0")
    with pytest.raises(ConfigError, match=r"mine.py cannot be imported: line 1: SystemExit: 0"):
        load(context, "mine.py:f", "raise SystemExit(0)")
    (context.folder / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match="is not a Python file"):
        make(FunctionSource(kind="function", path="mine.txt:f"), context)


def make_plugin(options: dict[str, Any], context: RewardContext) -> Source:
    def score(answer: Answer) -> float:
        return options["factor"] * len(answer.text)

    return source(score, name="plugin")


def test_an_installed_plugin(context: RewardContext, answer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> Any:
            return make_plugin

    monkeypatch.setattr(plugins, "_installed", lambda kind: {"mine": Point()})
    settings = FunctionSource(kind="function", path="mine", options={"factor": 3})
    assert make(settings, context).score([answer("ab")]) == [6.0]
    with pytest.raises(PluginError, match="Did you mean 'mine'"):
        make(FunctionSource(kind="function", path="mien"), context)


UNITS = """
def one(answer, unit, solution=None, *, factor=1):
    return factor * (answer.text == f"{solution} {unit}")

def many(answers, unit, solution):
    return [answer.text == f"{known} {unit}" for answer, known in zip(answers, solution, strict=True)]

def rest(answer, **others):
    return sum(map(len, others))

def place(answer, /, unit):
    return len(unit)

def hidden(answer, unit, /):
    return 0
"""


def units(context: RewardContext, name: str, fields: set[str] | None = None, **options: Any) -> TextSource:
    (context.folder / "units.py").write_text(UNITS)
    settings = FunctionSource(kind="function", path=f"units.py:{name}", options=options)
    return make(settings, replace(context, fields=None if fields is None else frozenset(fields)))


def test_options_fill_parameters_by_name(context: RewardContext, answer: Make) -> None:
    rows = [answer("3 km", solution="3"), answer("3 km", solution="4"), answer("None km")]
    assert units(context, "one", unit="km", factor=5).score(rows) == [5.0, 0.0, 5.0]
    assert units(context, "place", unit="km").score(rows[:1]) == [2.0]


def test_fields_of_the_prompts_record_fill_parameters_by_name(context: RewardContext, answer: Make) -> None:
    rows = [answer("3 m", solution="3", unit="m"), answer("3 km", solution="3", unit="m")]
    assert units(context, "one").score(rows) == [1.0, 0.0]
    assert units(context, "one", unit="km").score(rows) == [0.0, 1.0]  # an option goes before the record
    assert units(context, "rest").score(rows[:1]) == [len("unit") + len("solution")]


def test_a_function_of_the_whole_list_is_given_lists_and_only_complete_rows(
    context: RewardContext, answer: Make
) -> None:
    rows = [answer("3 km", solution="3"), answer("4 km"), answer("5", solution="5")]
    source = units(context, "many", unit="km")
    assert isinstance(source, Source)
    results = source.judge(rows)
    assert [result.score for result in results if result.is_scored] == [1.0, 0.0]
    assert results[1].reason == "the prompt's record has no field solution"
    one = units(context, "one")
    assert isinstance(one, Source)
    assert one.judge([answer("x")])[0].reason == "the prompt's record has no field unit"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "one",
            {},
            "units.py:one: nothing fills its parameter `unit` (did you mean 'units'?): the prompts' records have "
            "solution, units; the options have nothing. Put it into one of them, or give it a default",
        ),
        ("one", {"unit": "km", "facter": 2}, "options.facter is no parameter of the function (did you mean 'factor'?)"),
        ("hidden", {"unit": "km"}, "parameter `unit` cannot be given by name; leave out the `/`"),
    ],
)
def test_a_parameter_that_nothing_fills_is_an_error_at_once(
    context: RewardContext, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        units(context, name, {"solution", "units"}, **options)
    assert message in str(error.value)


def test_what_a_partial_has_bound_stays_bound(answer: Make) -> None:
    def score(answer: Answer, unit: str, factor: float = 1.0) -> float:
        return factor * (answer.text == unit)

    row = answer("km", unit="m", factor=3.0)
    assert source(partial(score, unit="km"), name="f").score([row]) == [3.0]
    assert source(partial(score, unit="km"), name="f", options={"factor": 2.0}).score([row]) == [2.0]


def outer(answer: Answer) -> float:
    return 1.0


class Counter:
    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, answer: Answer) -> float:
        return answer.text.count(self.word)


def test_a_callable_is_written_down_by_name_and_source(answer: Make) -> None:
    def inner(limit: int) -> Callable[[Answer], float]:
        return lambda answer: float(len(answer.text) > limit)

    def settings(function: Any) -> CallableSource:
        return CallableSource.model_validate({"kind": "callable", "function": function})

    dumped = settings(outer).model_dump(mode="json")
    assert dumped == {
        "kind": "callable",
        "options": {},
        "name": f"{__name__}.outer",
        "source": settings(outer).source,
        "importable": True,
    }
    assert not settings(inner(3)).importable
    assert not settings(Counter("a")).importable
    assert settings(Counter("a")).name.endswith(".Counter")
    sources = [settings(one).source for one in (outer, inner(3), inner(4), Counter("a"), Counter("b"))]
    assert len(set(sources)) == 5
    assert settings(inner(3)).source == sources[1]
    assert settings(partial(outer)).source != sources[0]
    context = RewardContext(folder=Path(), seed=0)
    assert make_callable(settings(Counter("a")), context).score([answer("banana")]) == [3.0]


def test_a_function_without_source_text_is_known_by_its_instructions() -> None:
    def compiled(text: str) -> Any:
        names: dict[str, Any] = {}
        exec(text, names)
        return names["f"]

    one, same, other = (compiled(f"def f(answer): return {n}") for n in (1000, 1000, 1001))
    assert identity_of(one)["source"] == identity_of(same)["source"] != identity_of(other)["source"]


def test_a_recipe_cannot_name_a_callable() -> None:
    with pytest.raises(ValidationError, match=r'write \{kind: function, path: "file.py:name"\}'):
        CallableSource.model_validate({"kind": "callable", "name": "rules.score"})
