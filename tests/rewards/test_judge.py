"""The judge against a fake OpenAI-compatible server: grades, bounds, retries, keys, and comparisons in both orders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.rewards.context import RewardContext
from kedge.rewards.judge import Preference, compare, make, preference, read_score, read_winner
from kedge.rewards.settings import JudgeSource

Make = Callable[..., Answer]


def settings(server: Any, **changes: Any) -> JudgeSource:
    how = {"kind": "judge", "url": f"{server.url}/v1/", "model": "m", "backoff_s": 0.001, "retries": 1} | changes
    return JudgeSource.model_validate(how)


def says(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def request_text(body: Any) -> str:
    return body["messages"][0]["content"]


def test_grades_in_order(server: Any, context: RewardContext, answer: Make) -> None:
    grades = {"good": 9, "bad": 2, "fair": 5.5}
    server.reply = lambda body: says(
        next(f'{{"reason": "r", "score": {n}}}' for word, n in grades.items() if f"\n{word}\n" in request_text(body))
    )
    source = make(settings(server), context)
    assert source.score([answer(word) for word in ("bad", "good", "fair", "bad")]) == [2.0, 9.0, 5.5, 2.0]
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {key: server.requests[0][key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 512,
    }


def test_the_rubric_shows_prompt_solution_and_bounds(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says("Score: 3")
    make(settings(server, lowest=0, highest=4), context).score([answer("{{ 7 * 7 }}", "42")])
    text = request_text(server.requests[0])
    assert "user: Why?\n</conversation>\n<reference>\n42\n</reference>\n<answer>\n{{ 7 * 7 }}\n</answer>" in text
    assert text.endswith("a number from 0 to 4}")


def test_a_rubric_of_ones_own(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says(f"Score: {len(request_text(body))}")
    rubric = "{{ answer }}{% if extra.n is defined %}{{ extra.n }}{% endif %}"
    assert make(settings(server, rubric=rubric), context).score([answer("abc", n=12), answer("x")]) == [5.0, 1.0]


@pytest.mark.parametrize(
    ("rubric", "why"),
    [
        ("{{ anwser }}", "'anwser' is not known here (did you mean 'answer'?); it may use prompt, answer, solution"),
        ("Hm\n{{ answer", "line 2: unexpected end of template"),
        ("Grade it!", "it never shows the answer"),
    ],
)
def test_a_rubric_that_cannot_work_is_refused_at_once(
    server: Any, context: RewardContext, rubric: str, why: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make(settings(server, rubric=rubric), context)
    assert why in str(error.value)
    assert server.requests == []


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (says("Score: 11"), "unusable reply: score 11 is not between 1 and 10"),
        (says('{"score": -1}'), "unusable reply: score -1 is not between 1 and 10"),
        (says('{"score": NaN}'), "unusable reply: score nan is not between 1 and 10"),
        (says("I cannot judge this."), "unusable reply: no score in 'I cannot judge this.'"),
        (says('{"score": true}'), "unusable reply: no score in '{\"score\": true}'"),
        ((200, b'{"choices": []}'), "unusable reply: expected choices[0].message.content as in the OpenAI API"),
        ((500, b""), "HTTP 500 Internal Server Error"),
    ],
)
def test_a_grade_that_is_none(
    server: Any, context: RewardContext, answer: Make, reply: tuple[int, bytes], why: str
) -> None:
    server.reply = lambda body: reply
    (result,) = make(settings(server), context).judge([answer("x")])
    assert math.isnan(result.score)
    assert result.reason == f"{server.url}/v1/chat/completions: {why} (tried 2 times)"


@pytest.mark.parametrize(
    ("rubric", "why"),
    [
        ("{{ answer }}{{ extra.n }}", "UndefinedError: 'dict object' has no attribute 'n'"),
        ("{{ answer }}{{ answer / 2 }}", "TypeError: unsupported operand type(s) for /: 'str' and 'int'"),
        ("{{ answer.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe."),
    ],
)
def test_a_rubric_that_fails_costs_its_row(
    server: Any, context: RewardContext, answer: Make, rubric: str, why: str
) -> None:
    (result,) = make(settings(server, rubric=rubric), context).judge([answer("x")])
    assert (result.is_scored, result.reason) == (False, f"judge.rubric: {why}")
    assert server.requests == []


def test_a_bad_reply_is_asked_again(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says("hm" if len(server.requests) == 1 else "Score: 8")
    assert make(settings(server), context).score([answer("x")]) == [8.0]


def test_the_key_comes_from_the_environment(
    server: Any, context: RewardContext, answer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = lambda body: says("Score: 8")
    monkeypatch.setenv("JUDGE_KEY", "k1")
    make(settings(server, key_variable="JUDGE_KEY"), context).score([answer("x")])
    assert server.sent[0]["Authorization"] == "Bearer k1"


def test_scores_are_read_from_many_shapes() -> None:
    assert read_score('```json\n{"score": 4, "reason": "a {b} c"}\n```', lowest=1, highest=10) == 4.0
    assert read_score('{"a": {"score": 3}} {"score": 6}', lowest=1, highest=10) == 6.0
    assert read_score("**Score**: 7/10", lowest=1, highest=10) == 7.0
    assert read_score("score = -2.5", lowest=-5, highest=5) == -2.5


def test_winners_are_read_from_many_shapes() -> None:
    assert read_winner('{"reason": "B is long", "better": "A"}') == "a"
    assert read_winner("Better: B") == "b"
    assert read_winner('{"better": "tie"}') == "tie"
    with pytest.raises(ValueError, match="no winner"):
        read_winner("Both are better than nothing")


def shown(body: Any) -> tuple[str, str]:
    text = request_text(body)
    return text.split("<answer_a>\n")[1].split("\n")[0], text.split("<answer_b>\n")[1].split("\n")[0]


def test_a_fair_judge_is_consistent(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says('{"better": "%s"}' % ("A" if len(shown(body)[0]) > len(shown(body)[1]) else "B"))
    pairs = [(answer("long one"), answer("short")), (answer("x"), answer("yy"))]
    assert compare(pairs, settings(server, workers=1), context) == [
        Preference(first=1.0, is_consistent=True),
        Preference(first=0.0, is_consistent=True),
    ]
    assert [shown(body) for body in server.requests[:2]] == [("long one", "short"), ("short", "long one")]


def test_a_judge_that_likes_the_first_place_says_nothing(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says('{"better": "A"}')
    assert compare([(answer("x"), answer("y"))], settings(server), context) == [
        Preference(first=0.5, is_consistent=False)
    ]


def test_a_comparison_that_fails_has_no_number(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says("pass")
    (preference,) = compare([(answer("x"), answer("y"))], settings(server), context)
    assert math.isnan(preference.first)
    assert "no winner in 'pass'" in preference.reason


@pytest.mark.parametrize(
    ("as_a", "as_b", "first", "agree"), [(1, 1, 1, True), (0, 0, 0, True), (0.5, 0.5, 0.5, True), (1, 0.5, 0.5, False)]
)
def test_preference(as_a: float, as_b: float, first: float, agree: bool) -> None:
    assert preference(as_a, as_b) == Preference(first=first, is_consistent=agree)
