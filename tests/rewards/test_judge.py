"""The judge against a fake OpenAI-compatible server: grades, bounds, retries and keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, ContractStop
from kedge.rewards.context import RewardContext
from kedge.rewards.judge import make
from kedge.rewards.judge_protocol import fence_of, read_object, read_score, read_winner
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


def weighed(content: str, pieces: list[str], at: int, shares: dict[str, float]) -> tuple[int, bytes]:
    """A reply in tokens, of which one has alternatives with these probabilities."""
    tokens = [{"token": piece, "logprob": 0.0, "top_logprobs": []} for piece in pieces]
    tokens[at]["top_logprobs"] = [{"token": text, "logprob": math.log(share)} for text, share in shares.items()]
    message = {"role": "assistant", "content": content}
    return 200, json.dumps({"choices": [{"message": message, "logprobs": {"content": tokens}}]}).encode()


@pytest.mark.parametrize(
    ("content", "pieces", "at", "shares", "grade"),
    [
        (
            '{"score": 7}',
            ['{"score": ', "7", "}"],
            1,
            {"7": 0.5, "9": 0.25, "1": 0.05, "?": 0.2},
            (3.5 + 2.25 + 0.05) / 0.8,
        ),
        (
            '{"score": 7}',
            ['{"score":', " 7", "}"],
            1,
            {" 7": 0.5, " 9": 0.5, "1": 0.4},
            8.0,
        ),  # without its blank: no grade
        ('{"score": 7}', ['{"score": ', "7}"], 1, {"7}": 0.5, "3}": 0.3, "3": 0.2}, 5.0),
        ('{"score": 7}', ['{"score": ', "7", "}"], 1, {"7": 0.5, "70": 0.3, "0": 0.2}, 7.0),  # 70 and 0 are no grades
        ('{"score": 7.5}', ['{"score": ', "7", ".5}"], 1, {"7": 0.5, "9": 0.5}, 7.5),  # the number, which is no digit
        ('{"score": 7}', ['{"score":7}', "!"], 0, {"7": 1.0}, 7.0),  # tokens of another text: the number
        ('{"score": 7}', ['{"score": ', "7", "}", "<end>"], 1, {"7": 0.5, "9": 0.5}, 8.0),  # with the one that ended it
        (
            '{"reason": "\\"score\\": 2", "score": 7}',
            ['{"reason": "\\"score\\": ', '2", "score": ', "7}"],
            2,
            {"7}": 0.5, "9}": 0.5},
            8.0,
        ),
    ],
)
def test_with_log_probabilities_the_grade_is_their_mean(
    content: str,
    pieces: list[str],
    at: int,
    shares: dict[str, float],
    grade: float,
    server: Any,
    context: RewardContext,
    answer: Make,
) -> None:
    """Σ g P(g) / Σ P(g), as in Lee et al. 2023."""
    server.reply = lambda body: weighed(content, pieces, at, shares)
    source = make(settings(server, logprobs=True, highest=9), context)
    assert source.score([answer("good")]) == [pytest.approx(grade, abs=1e-12)]
    assert (server.requests[0]["logprobs"], server.requests[0]["top_logprobs"]) == (True, 20)


def test_a_server_without_log_probabilities_gives_numbers_and_that_is_told_once(
    server: Any, context: RewardContext, answer: Make
) -> None:
    told: list[tuple[str, str]] = []
    server.reply = lambda body: says('{"score": 3}')
    listening = replace(context, note=lambda code, words: told.append((code, words)))
    source = make(settings(server, logprobs=True, highest=9), listening)
    assert source.score([answer("a"), answer("b")]) == [3.0, 3.0]
    assert [code for code, _ in told] == ["judge.logprobs"]
    assert "without log-probabilities of grades" in told[0][1]


def test_log_probabilities_need_grades_of_one_digit(server: Any) -> None:
    for scale in ({}, {"lowest": -1, "highest": 1}, {"lowest": 0.5, "highest": 5}):
        with pytest.raises(ValueError, match="logprobs needs grades of one digit"):
            settings(server, logprobs=True, **scale)


def test_the_rubric_shows_prompt_solution_and_bounds(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says('{"score": 3}')
    make(settings(server, lowest=0, highest=4), context).score([answer("{{ 7 * 7 }}", "42")])
    text, fence = request_text(server.requests[0]), fence_of(7, ["user", "Why?", "42", "{{ 7 * 7 }}"])
    assert f"{fence} conversation\nuser: Why?\n{fence} end of the conversation\n" in text
    assert f"{fence} reference\n42\n{fence} end of the reference\n" in text
    assert f"{fence} answer\n{{{{ 7 * 7 }}}}\n{fence} end of the answer\n" in text
    assert text.endswith("a number from 0 to 4}")


def test_a_rubric_of_ones_own(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says(json.dumps({"score": len(request_text(body).split("|")[1])}))
    rubric = "{{ fence }}|{{ answer }}{% if extra.n is defined %}{{ extra.n }}{% endif %}|{{ fence }}"
    assert make(settings(server, rubric=rubric), context).score([answer("abc", n=12), answer("x")]) == [5.0, 1.0]


@pytest.mark.parametrize(
    ("rubric", "why"),
    [
        ("{{ anwser }}", "'anwser' is not known here (did you mean 'answer'?); it may use prompt, answer, solution"),
        ("Hm\n{{ answer", "line 2: unexpected end of template"),
        ("Grade it!", "it never shows the answer"),
        ("Grade {{ answer }}", "the answer stands in no fence"),
        ("{{ fence }} Grade {{ answer }}", "put a line with {{ fence }} before and after {{ answer }}"),
    ],
)
def test_a_rubric_that_cannot_work_is_refused_at_once(
    server: Any, context: RewardContext, rubric: str, why: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make(settings(server, rubric=rubric), context)
    assert why in str(error.value)
    assert server.requests == []


UNREADABLE = [
    (says('{"score": 11}'), "unusable reply: score 11 is not between 1 and 10"),
    (says('{"score": 1%s}' % ("0" * 400)), f"unusable reply: score 1{'0' * 19} is not between 1 and 10"),
    (says('{"score": -1}'), "unusable reply: score -1 is not between 1 and 10"),
    (says('{"score": NaN}'), "unusable reply: NaN is not JSON"),
    (says("Score: 7"), "unusable reply: expected one JSON object after the last mark, found 'Score: 7'"),
    (says('{"score": true}'), "unusable reply: no score in '{\"score\": true}'"),
]


@pytest.mark.parametrize(("reply", "why"), UNREADABLE)
@pytest.mark.parametrize(("temperature", "calls"), [(0.0, 1), (0.7, 2)])
def test_a_reply_without_a_grade_is_asked_for_again_only_where_it_may_differ(
    server: Any,
    context: RewardContext,
    answer: Make,
    reply: tuple[int, bytes],
    why: str,
    temperature: float,
    calls: int,
) -> None:
    server.reply = lambda body: reply
    judge = make(settings(server, temperature=temperature, retries=3), context)
    (result,) = judge.judge([answer("x")])
    assert math.isnan(result.score)
    assert result.reason == f"{server.url}/v1/chat/completions: {why}"
    assert len(server.requests) == calls


def test_a_reply_without_a_grade_is_paid_once_also_by_a_run_that_is_resumed(
    server: Any, context: RewardContext, answer: Make, tmp_path: Path
) -> None:
    server.reply = lambda body: says("hm")
    kept = replace(context, calls=tmp_path / "calls")
    reasons = [make(settings(server), kept).judge([answer("x")])[0].reason for _ in range(2)]
    assert reasons[0] == reasons[1]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((200, b'{"choices": []}'), "unusable reply: expected choices[0].message.content as in the OpenAI API"),
        ((500, b""), "HTTP 500 Internal Server Error"),
    ],
)
def test_a_server_that_does_not_reply_is_asked_again(
    server: Any, context: RewardContext, answer: Make, reply: tuple[int, bytes], why: str
) -> None:
    server.reply = lambda body: reply
    (result,) = make(settings(server), context).judge([answer("x")])
    assert math.isnan(result.score)
    assert result.reason == f"{server.url}/v1/chat/completions: {why} (tried 2 times)"


@pytest.mark.parametrize(
    ("rubric", "why"),
    [
        ("{{ extra.n }}", "UndefinedError: 'dict object' has no attribute 'n'"),
        (
            "{{ answer / 2 }}",
            "TypeError: unsupported operand type(s) for /: 'str' and 'int'",
        ),
        (
            "{{ answer.__class__.__mro__ }}",
            "SecurityError: access to attribute '__class__' of 'str' object is unsafe.",
        ),
    ],
)
def test_a_rubric_that_fails_costs_its_row(
    server: Any, context: RewardContext, answer: Make, rubric: str, why: str
) -> None:
    fenced = f"{{{{ fence }}}}{{{{ answer }}}}{rubric}{{{{ fence }}}}"
    (result,) = make(settings(server, rubric=fenced), context).judge([answer("x")])
    assert (result.is_scored, result.reason) == (False, f"judge.rubric: {why}")
    assert server.requests == []


def test_a_second_reply_at_a_temperature_counts(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says("hm" if len(server.requests) == 1 else '{"score": 8}')
    assert make(settings(server, temperature=0.7), context).score([answer("x")]) == [8.0]


def test_the_key_comes_from_the_environment(
    server: Any, context: RewardContext, answer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = lambda body: says('{"score": 8}')
    monkeypatch.setenv("JUDGE_KEY", "k1")
    make(settings(server, key_variable="JUDGE_KEY"), context).score([answer("x")])
    assert server.sent[0]["Authorization"] == "Bearer k1"


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 4}', 4.0),
        ('```json\n{"score": 4, "reason": "a {b} c"}\n```', 4.0),
        ('Thinking.\n[[f]]\n{"score": 6.5}\n', 6.5),
        ('[[f]] {"score": 9} [[f]] {"score": 3}', 3.0),
        ('He wrote {"score": 10}. [[f]]```{"score": 2}```', 2.0),
        ('{"a": {"score": 3}, "score": 6}', 6.0),
        ('Fine. {"score": 4}', None),
        ('{"score": 4} {"score": 5}', None),
        ('[[f]]\n{"score": 4}\nScore: 9', None),
        ('{"score": 4}[[f]]', None),
        ('{"a": {"score": 3}}', None),
        ('{"score": 3, "score": 4}', None),
        ('[{"score": 3}]', None),
        ('{"score": "3"}', None),
        ('{"score": [3]}', None),
        ('{"score": null}', None),
        ('{"score": Infinity}', None),
        ("3", None),
        ("", None),
    ],
)
def test_a_reply_is_one_object_after_the_last_fence(reply: str, score: float | None) -> None:
    if score is not None:
        assert read_score(reply, fence="[[f]]", lowest=1, highest=10) == score
        return
    with pytest.raises(ValueError, match=r"expected one JSON object|no score|stands twice|not JSON"):
        read_score(reply, fence="[[f]]", lowest=1, highest=10)


def test_the_scale_ends_where_it_ends() -> None:
    for score in ("1", "10", "1.0"):
        assert read_score(f'{{"score": {score}}}', fence="[[f]]", lowest=1, highest=10) == float(score)
    for score in ("0.999", "10.001", "-5", "1e999"):
        with pytest.raises(ValueError, match="is not between 1 and 10"):
            read_score(f'{{"score": {score}}}', fence="[[f]]", lowest=1, highest=10)


def test_winners() -> None:
    assert read_winner('{"reason": "B is long", "better": "A"}', fence="[[f]]") == "a"
    assert read_winner('{"better": "B"} is what it says\n[[f]]\n{"better": "tie"}', fence="[[f]]") == "tie"
    for reply in ('{"better": "C"}', '{"better": ["A"]}', "{}"):
        with pytest.raises(ValueError, match="no winner"):
            read_winner(reply, fence="[[f]]")
    with pytest.raises(ValueError, match="expected one JSON object"):
        read_object("Better: B", "[[f]]")


def test_a_fence_is_the_same_for_the_same_call_and_no_other(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says('{"score": 3}')
    for _ in range(2):  # as before and after a resumption
        make(settings(server, workers=1), context).score([answer("x"), answer("y"), answer("x", "s")])
    texts = [request_text(body) for body in server.requests]
    assert texts[:3] == texts[3:]
    fences = [text.split("the mark ")[1].split(". ")[0] for text in texts[:3]]
    assert len(set(fences)) == 3
    assert all(len(fence) == 36 and text.count(fence) >= 6 for fence, text in zip(fences, texts, strict=False))


def test_a_grade_at_temperature_0_is_paid_once_also_after_a_crash(
    server: Any, tmp_path: Path, answer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    server.reply = lambda body: says('{"score": 8}')
    for iteration in range(2):
        resumed = RewardContext(folder=tmp_path, seed=7, calls=tmp_path / "calls")
        assert make(settings(server), resumed).score([answer("x"), answer("y"), answer("x")]) == [8.0, 8.0, 8.0]
        assert len(server.requests) == 2, iteration


def test_equal_answers_at_a_temperature_are_graded_each(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: says(json.dumps({"score": len(server.requests)}))
    scores = make(settings(server, temperature=1.0), context).score([answer("x"), answer("x")])
    assert sorted(scores) == [1.0, 2.0]


def test_a_judge_as_reward_has_a_budget(server: Any, tmp_path: Path, answer: Make) -> None:
    server.reply = lambda body: says('{"score": 8}')
    budget = {"usd": 0.02, "input": 10.0, "output": 10.0}
    source = make(settings(server, budget=budget, max_tokens=10), RewardContext(folder=tmp_path, seed=7, share=0.5))
    with pytest.raises(ContractStop, match=r"budget of 0\.01 USD"):
        source.score([answer("x" * number) for number in range(20)])
    assert 0 < len(server.requests) < 20
