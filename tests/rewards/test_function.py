"""Functions of the user's: loaded by file and name, called as they ask to be, believed only where they make sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kedge.core import plugins
from kedge.core.answers import Answer, TextSource
from kedge.core.errors import ConfigError, PluginError
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import RewardError, Source
from kedge.rewards.function import make, source
from kedge.rewards.settings import FunctionSource

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

def nothing(answer, more):
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


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "f returned 1 scores for 2 answers; one for each is needed"),
        (1.0, "f returned a float, expected a list of 2 numbers"),
        (None, "f returned a NoneType, expected a list of 2 numbers"),
        ([1.0, "2"], "f returned '2' as a score, a str; expected a number or None"),
    ],
)
def test_a_wrong_kind_of_result_is_an_error(answer: Make, returned: Any, message: str) -> None:
    def score(answers: Sequence[Answer]) -> Any:
        return returned

    with pytest.raises(RewardError) as error:
        source(score, name="f").score([answer("x"), answer("y")])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine.py:lenghts", "has no function 'lenghts' (did you mean 'lengths'?); it has: lengths, first, nothing"),
        ("mine.py:nothing", "mine.py:nothing: found parameters (answer, more), expected `answers`"),
        ("exact", "function.path: 'exact' is a kind of its own; write `kind: exact`"),
        ("other.py:f", "other.py; expected `file.py:function`, relative to the recipe"),
    ],
)
def test_what_cannot_be_loaded(context: RewardContext, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(context, path)
    assert message in str(error.value)


def test_a_file_that_cannot_be_imported(context: RewardContext) -> None:
    with pytest.raises(ConfigError, match=r"mine.py cannot be imported: ZeroDivisionError: division by zero"):
        load(context, "mine.py:f", "1 / 0")
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


def test_options_are_for_plugins(context: RewardContext) -> None:
    (context.folder / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match="only a plugin takes options"):
        make(FunctionSource(kind="function", path="mine.py:first", options={"a": 1}), context)
