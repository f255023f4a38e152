"""Which format a file has, and what one row of it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.data.columns import Columns
from kedge.data.examples import Demonstration, Example, Message, Origin, Pair, Prompt, Ranking, Thumb
from kedge.data.formats import parse, recognise
from kedge.data.kinds import as_kind

HERE = Origin("a.jsonl", 7)


def messages_of(*turns: str) -> tuple[Message, ...]:
    """`s:`, `u:`, `a:` and `t:` for the four roles."""
    roles: dict[str, Any] = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return tuple(Message(roles[turn[0]], turn[2:]) for turn in turns)


def plain(*turns: str) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages_of(*turns)]


def parse_row(row: dict[str, Any]) -> Example:
    return parse(row, recognise([row]), HERE)


def reason(row: dict[str, Any], like: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        parse(row, recognise([like]), HERE)
    return str(caught.value)


def pair(prompt: Any, chosen: Any, rejected: Any, **rest: Any) -> Pair:
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected, origin=HERE, **rest)


Q, GOOD, BAD = "u:Q", "a:good", "a:bad"
PLAIN_PAIR = pair(messages_of(Q), messages_of(GOOD), messages_of(BAD))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param({"prompt": "Q", "chosen": "good", "rejected": "bad"}, PLAIN_PAIR, id="text"),
        pytest.param(
            {"prompt": plain(Q), "chosen": "good", "rejected": plain(BAD)}, PLAIN_PAIR, id="prompt and one as messages"
        ),
        pytest.param({"prompt": "Q", "chosen": plain(GOOD)[0], "rejected": "bad"}, PLAIN_PAIR, id="bare message"),
        pytest.param(
            {"prompt": "Q ", "chosen": plain(Q, GOOD), "rejected": plain(Q, BAD)},
            pair(messages_of("u:Q "), messages_of(GOOD), messages_of(BAD)),
            id="ultrafeedback: whole conversations beside the prompt",
        ),
        pytest.param(
            {"prompt": "Q", "chosen": plain("s:S", Q, GOOD), "rejected": plain("s:S", Q, BAD)},
            pair(messages_of("s:S", Q), messages_of(GOOD), messages_of(BAD)),
            id="system only in the conversations",
        ),
        pytest.param(
            {"system": "S", "question": "Q", "chosen": "good", "rejected": "bad"},
            pair(messages_of("s:S", Q), messages_of(GOOD), messages_of(BAD)),
            id="orca: system and question",
        ),
        pytest.param(
            {"system": "S", "prompt": "Q", "chosen": plain(Q, GOOD), "rejected": plain(Q, BAD)},
            pair(messages_of("s:S", Q), messages_of(GOOD), messages_of(BAD)),
            id="system field beside whole conversations without it",
        ),
        pytest.param(
            {"instruction": "Do", "input": "this", "chosen": "good", "rejected": "bad"},
            pair(messages_of("u:Do\n\nthis"), messages_of(GOOD), messages_of(BAD)),
            id="instruction with input",
        ),
        pytest.param(
            {"prompt": "Q", "input": "x", "system": 3, "chosen": "good", "rejected": "bad", "margin": 2, "by": "me"},
            pair(
                messages_of(Q),
                messages_of(GOOD),
                messages_of(BAD),
                margin=2.0,
                extra={"input": "x", "system": 3, "by": "me"},
            ),
            id="margin is read, the rest is extra",
        ),
        pytest.param(
            {"chosen": plain("u:1", "a:2", Q, GOOD), "rejected": plain("u:1", "a:2", Q, BAD, "u:more", "a:end")},
            pair(messages_of("u:1", "a:2", Q), messages_of(GOOD), messages_of(BAD, "u:more", "a:end")),
            id="implicit prompt",
        ),
        pytest.param(
            {"chosen": plain(Q, GOOD), "rejected": plain(Q, GOOD)},
            pair(messages_of(Q), messages_of(GOOD), messages_of(GOOD)),
            id="identical conversations stay a pair",
        ),
        pytest.param(
            {"chosen": plain(Q, GOOD), "rejected": plain(Q, GOOD, "u:more", "a:end")},
            pair(messages_of(Q), messages_of(GOOD), messages_of(GOOD, "u:more", "a:end")),
            id="one conversation begins the other",
        ),
        pytest.param(
            {"prompt": "Q", "chosen": "", "rejected": "bad"},
            pair(messages_of(Q), messages_of("a:"), messages_of(BAD)),
            id="empty answer",
        ),
    ],
)
def test_pairs(row: dict[str, Any], expected: Pair) -> None:
    assert parse_row(row) == expected


HH = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Q"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(
            {"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant: bad\n\npart two\n"},
            pair(messages_of("u:Hi", "a:Yes?", Q), messages_of(GOOD), messages_of("a:bad\n\npart two")),
            id="part at the last turn",
        ),
        pytest.param(
            {"chosen": f"{HH}\n\nAssistant: good", "rejected": "\n\nHuman: Hi\n\nAssistant: What?"},
            pair(messages_of("u:Hi"), messages_of("a:Yes?", Q, GOOD), messages_of("a:What?")),
            id="part early: an answer of several turns",
        ),
        pytest.param(
            {"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant: good"},
            pair(messages_of("u:Hi", "a:Yes?", Q), messages_of(GOOD), messages_of(GOOD)),
            id="identical",
        ),
        pytest.param(
            {"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant:"},
            pair(messages_of("u:Hi", "a:Yes?", Q), messages_of(GOOD), messages_of("a:")),
            id="empty answer",
        ),
        pytest.param(
            {"chosen": f"{HH}\n\nAssistant: go on", "rejected": f"{HH}\n\nAssistant: go"},
            pair(messages_of("u:Hi", "a:Yes?", Q), messages_of("a:go on"), messages_of("a:go")),
            id="whole turns, not characters",
        ),
        pytest.param(
            {"prompt": f"{HH}\n\nAssistant:", "chosen": " good", "rejected": f"{HH}\n\nAssistant: bad"},
            pair(messages_of("u:Hi", "a:Yes?", Q), messages_of(GOOD), messages_of(BAD)),
            id="transcript as an explicit prompt",
        ),
    ],
)
def test_transcript_pairs(row: dict[str, Any], expected: Pair) -> None:
    assert parse_row(row) == expected


def test_transcripts_that_part_at_the_human_are_broken() -> None:
    like = {"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant: bad"}
    row = {"chosen": "\n\nHuman: A\n\nAssistant: x", "rejected": "\n\nHuman: B\n\nAssistant: y"}
    assert "part at message 1, where 'chosen' has a user message" in reason(row, like)


def test_conversations_that_share_nothing_are_broken() -> None:
    like = {"chosen": plain(Q, GOOD), "rejected": plain(Q, BAD)}
    row = {"chosen": plain(GOOD, "u:x"), "rejected": plain(BAD, "u:x")}
    assert "share no prompt" in reason(row, like)


@pytest.mark.parametrize(
    ("rest", "rank"),
    [
        ({"answers": ["x", "y", "z"], "rank": [2, 1, 2]}, (2, 1, 2)),
        ({"responses": ["x", "y", "z"], "ranking": [4, 9, 1]}, (2, 3, 1)),
        ({"completions": ["x", plain("a:y"), plain(Q, "a:z")], "scores": [0.5, -1, 0.5]}, (1, 2, 1)),
    ],
)
def test_rankings(rest: dict[str, Any], rank: tuple[int, ...]) -> None:
    answers = (messages_of("a:x"), messages_of("a:y"), messages_of("a:z"))
    assert parse_row({"prompt": "Q", **rest}) == Ranking(prompt=messages_of(Q), answers=answers, rank=rank, origin=HERE)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ({"answers": ["x", "y"], "rank": [1]}, "'answers' has 2 answers and 'rank' 1 numbers"),
        ({"answers": ["x"], "rank": [1]}, "at least two answers"),
        ({"answers": ["x", "y"], "rank": [0, 1]}, "places count from 1"),
        ({"answers": ["x", "y"], "rank": [1, "two"]}, "'rank[1]' is 'two'; it must be a finite number"),
        ({"answers": ["x", 5], "rank": [1, 2]}, "'answers[1]' is 5"),
    ],
)
def test_broken_rankings(rest: dict[str, Any], expected: str) -> None:
    assert expected in reason({"prompt": "Q", **rest}, {"prompt": "Q", "answers": ["x", "y"], "rank": [1, 2]})


@pytest.mark.parametrize(
    ("label", "is_good"), [(True, True), (False, False), (1, True), (0, False), ("up", True), ("down", False)]
)
@pytest.mark.parametrize("name", ["completion", "answer", "response"])
def test_thumbs(name: str, label: Any, is_good: bool) -> None:
    expected = Thumb(prompt=messages_of(Q), answer=messages_of("a:A"), is_good=is_good, origin=HERE)
    assert parse_row({"prompt": "Q", name: "A", "label": label}) == expected
    assert parse_row({"messages": plain(Q, "a:A"), "label": label}) == expected


def test_label_of_another_sort_is_named() -> None:
    like = {"prompt": "Q", "completion": "A", "label": True}
    assert "field 'label' is 2; it must be good/bad, yes/no" in reason({**like, "label": 2}, like)


@pytest.mark.parametrize(
    ("row", "messages", "extra"),
    [
        ({"messages": plain("s:S", Q, "a:A"), "source": "x"}, messages_of("s:S", Q, "a:A"), {"source": "x"}),
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S"},
            messages_of("s:S", Q, "a:A"),
            {},
        ),
        ({"prompt": "Q", "completion": "A"}, messages_of(Q, "a:A"), {}),
        ({"prompt": None, "question": "Q", "response": "A"}, messages_of(Q, "a:A"), {"prompt": None}),
        ({"messages": plain("s:S", Q, "a:A"), "system": "T"}, messages_of("s:S", Q, "a:A"), {"system": "T"}),
        ({"prompt": "Q", "completion": "A", "n": 1, "extra": {"m": 2}}, messages_of(Q, "a:A"), {"n": 1, "m": 2}),
        (
            {"prompt": "Q", "completion": "A", "n": 1, "extra": {"n": 2}},
            messages_of(Q, "a:A"),
            {"n": 1, "extra": {"n": 2}},
        ),
        ({"prompt": plain("u:1", "a:2", Q), "completion": plain("a:A")}, messages_of("u:1", "a:2", Q, "a:A"), {}),
        ({"instruction": "Do", "input": "", "output": "A"}, messages_of("u:Do", "a:A"), {"input": ""}),
        ({"instruction": "Do", "input": "this", "output": "A"}, messages_of("u:Do\n\nthis", "a:A"), {}),
        ({"instruction": "Do", "context": "this", "response": "A"}, messages_of("u:Do\n\nthis", "a:A"), {}),
        ({"prompt": "Q", "messages": plain(Q, "a:A")}, messages_of(Q, "a:A"), {"prompt": "Q"}),
        ({"prompt": "Q", "completion": "A", "topic": "sport"}, messages_of(Q, "a:A"), {"topic": "sport"}),
    ],
)
def test_demonstrations(row: dict[str, Any], messages: Any, extra: dict[str, Any]) -> None:
    assert parse_row(row) == Demonstration(messages=messages, origin=HERE, extra=extra)


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "extra"),
    [
        ({"prompt": "Q"}, messages_of(Q), None, {}),
        ({"prompt": plain("s:S", Q), "source": "x"}, messages_of("s:S", Q), None, {"source": "x"}),
        ({"prompt": "Q", "solution": "2+2=4", "answer": "4"}, messages_of(Q), "4", {"solution": "2+2=4"}),
        ({"problem": "Q", "answer": 4}, messages_of(Q), "4", {}),
        ({"messages": plain("u:1", "a:2", Q)}, messages_of("u:1", "a:2", Q), None, {}),
        ({"prompt": f"{HH}\n\nAssistant:"}, messages_of("u:Hi", "a:Yes?", Q), None, {}),
        ({"prompt": ""}, messages_of("u:"), None, {}),
        ({"prompt": "Q", "completion": None}, messages_of(Q), None, {"completion": None}),
    ],
)
def test_prompts(row: dict[str, Any], prompt: Any, answer: str | None, extra: dict[str, Any]) -> None:
    assert parse_row(row) == Prompt(prompt=prompt, answer=answer, origin=HERE, extra=extra)


def test_format_says_what_it_was_recognised_by() -> None:
    fmt = recognise([{"question": "Q", "response": "A", "id": 3}])
    assert (fmt.kind, fmt.columns) == ("demonstrations", {"prompt": "question", "completion": "response"})


def test_most_rows_decide_and_a_tie_does_not() -> None:
    good, odd = {"prompt": "Q", "chosen": "x", "rejected": "y"}, {"prompt": "Q", "completion": "x"}
    assert recognise([odd, good, good]).kind == "pairs"
    with pytest.raises(DataError, match=r"two formats in equal number: 1 × pairs .* and 1 × completions"):
        recognise([good, odd])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q", "choosen": "x", "rejected": "y"}, ["'choosen' → 'chosen'", "'chosen' is missing"]),
        ({"prompt": "Q", "choosen": "x", "rejectd": "y"}, ["'choosen' → 'chosen', 'rejectd' → 'rejected'"]),
        ({"prompt": "Q", "chosen": 5, "rejected": "y"}, ["'chosen' is 5 but must be text or messages"]),
        ({"prompt": "Q", "chosen": "x"}, ["'rejected' is missing"]),
        ({"promt": "Q"}, ["'promt' → 'prompt'"]),
        ({"texts": "x", "id": 1}, ["no known format has these fields: id, texts.", "demonstrations: messages or"]),
        ({}, ["these fields: none"]),
    ],
)
def test_unknown_fields_are_listed_with_the_nearest_names(row: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        recognise([row])
    for part in expected:
        assert part in str(caught.value)


def test_asked_for_prompts_half_a_pair_is_one() -> None:
    assert recognise([{"prompt": "Q", "choosen": "x"}], kind="prompts").kind == "prompts"


END = plain("a:end")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [{"role": "usr", "content": "x"}, *END],
            "'messages[0].role' is 'usr' (did you mean 'user'?); known roles: system",
        ),
        ([{"role": "user"}, *END], "'messages[0]' has no 'content' (found: role)"),
        ([{"role": "user", "content": None}, *END], "'messages[0].content' is None"),
        (
            [*plain(Q), {"role": "assistant", "content": "", "tool_calls": [{}]}],
            "'messages[1].tool_calls[0]' is {}; a call has",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}, *END], "a part of type 'image'; only text parts"),
        (plain("a:only"), "there must be a prompt before the answer"),
        (plain(Q), "it must be messages that end with the assistant's"),
        ([], "field 'messages' is []"),
        ("text", "field 'messages' is 'text'"),
    ],
)
def test_broken_messages(messages: Any, expected: str) -> None:
    assert expected in reason({"messages": messages}, {"messages": plain(Q, "a:A")})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert parse_row({"prompt": [{"role": "user", "content": parts}]}) == Prompt(
        prompt=messages_of("u:one two"), origin=HERE
    )


@pytest.mark.parametrize("margin", ["one", True, float("nan")])
def test_margin_must_be_a_number(margin: Any) -> None:
    row = {"prompt": "Q", "chosen": "x", "rejected": "y", "margin": margin}
    assert "'margin' is" in reason(row, row)


@pytest.mark.parametrize("certainty", ["sure", True, float("nan"), -0.1, 1.5])
def test_certainty_must_be_a_probability(certainty: Any) -> None:
    row = {"prompt": "Q", "chosen": "x", "rejected": "y", "certainty": certainty}
    assert "'certainty' is" in reason(row, row)


@pytest.mark.parametrize("chosen", ["x", [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "x"}]])
def test_certainty_is_read_of_every_layout_of_pairs(chosen: Any) -> None:
    rejected = "y" if isinstance(chosen, str) else [chosen[0], {"role": "assistant", "content": "y"}]
    row = {"chosen": chosen, "rejected": rejected, "certainty": 0.75} | ({"prompt": "Q"} if chosen == "x" else {})
    example = parse_row(row)
    assert isinstance(example, Pair)
    assert (example.certainty, example.extra) == (0.75, {})


def test_certainty_may_have_another_column() -> None:
    columns = Columns.parse({"certainty": "posterior"})
    row = {"prompt": "Q", "chosen": "x", "rejected": "y", "posterior": 0.9}
    example = parse_row(columns.applied(row))
    assert isinstance(example, Pair)
    assert example.certainty == 0.9


def test_a_tie_likes_neither_answer() -> None:
    tie = parse_row({"prompt": "Q", "chosen": "x", "rejected": "y", "certainty": 0.5})
    (ranking,) = as_kind(tie, "rankings")
    assert isinstance(ranking, Ranking)
    assert ranking.rank == (1, 1)
    assert as_kind(tie, "thumbs") == as_kind(tie, "demonstrations") == ()


def test_answer_that_is_no_answer() -> None:
    like = {"prompt": "Q", "chosen": "x", "rejected": "y"}
    assert "'chosen' starts with a user message, which is not the prompt's" in reason(
        {**like, "chosen": plain("u:other", "a:x")}, like
    )
    assert "field 'rejected' is missing (found: prompt, chosen)" in reason({"prompt": "Q", "chosen": "x"}, like)
    assert "'answer' is ['4', 'four']" in reason({"prompt": "Q", "answer": ["4", "four"]}, {"prompt": "Q"})
