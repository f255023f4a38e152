"""The door: examples one at a time, broken rows set aside and counted, kinds checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kedge.core.errors import ConfigError, DataError
from kedge.data.examples import Demonstration, Message, Origin, Pair, Prompt
from kedge.data.reading import load, normalise, prompt_key, read

ORIGIN = Origin("x", 1)
PAIR = {"prompt": "Q", "chosen": "good", "rejected": "bad"}


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def refusal(source: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(source, **settings)
    return str(caught.value)


def test_one_broken_line_is_set_aside_with_line_and_reason(write_lines: Any, tmp_path: Path) -> None:
    values: list[Any] = [{**PAIR, "n": n} for n in range(300)]
    values[41] = '{"prompt": "Q", "chosen"'
    values[99] = {"prompt": "Q", "chosen": "x"}
    path, aside = write_lines("pairs.jsonl", values), tmp_path / "new" / "pairs.broken.jsonl"
    reading = read(path, set_aside=aside)
    examples = list(reading)
    assert [example.extra["n"] for example in examples] == [n for n in range(300) if n not in (41, 99)]
    assert (reading.count, reading.num_rows, reading.num_broken) == (298, 300, 2)
    assert reading.format.name == "pairs"
    assert [broken.origin.line for broken in reading.broken] == [42, 100]
    written = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [line["line"] for line in written] == [42, 100]
    assert written[0]["file"] == str(path)
    assert written[0]["reason"].startswith("invalid JSON")
    assert written[0]["raw"] == values[41]
    assert written[1]["reason"] == "field 'rejected' is missing (found: prompt, chosen)"
    assert json.loads(written[1]["raw"]) == values[99]


def test_reading_again_counts_anew(write_lines: Any) -> None:
    reading = read(write_lines("a.jsonl", [PAIR] * 7))
    assert len(list(reading)) == len(list(reading)) == reading.count == 7


def test_clean_reading_leaves_no_file_of_broken_rows(write_lines: Any, tmp_path: Path) -> None:
    stale = write_lines("old.broken.jsonl", [{"reason": "an earlier reading"}])
    load(write_lines("a.jsonl", [PAIR]), set_aside=stale)
    assert not stale.exists()


def test_the_source_is_never_taken_for_the_file_of_broken_rows(write_lines: Any) -> None:
    path = write_lines("a.broken.jsonl", [PAIR])
    with pytest.raises(ConfigError, match="cannot be set aside into the file that is read"):
        read(path, set_aside=path.parent / "." / path.name)
    assert path.exists()


def test_too_many_broken_rows_are_an_error_that_lists_the_first(write_lines: Any, tmp_path: Path) -> None:
    path = write_lines("a.jsonl", [PAIR] * 90 + ["oops"] * 10)
    aside = tmp_path / "aside.jsonl"
    message = refusal(path, set_aside=aside)
    assert f"{path}: 10 of the 100 rows read are broken (10.0%; at most 1.0% may be: max_broken)" in message
    assert f"{path}:91: invalid JSON" in message
    assert "… and 5 more" in message
    assert f"All are in {aside}" in message
    assert len(aside.read_text().splitlines()) == 10
    assert len(load(path, max_broken=0.1)) == 90


def test_hopeless_file_is_given_up_early(write_lines: Any) -> None:
    path = write_lines("a.jsonl", [PAIR] * 60 + ["oops"] * 5000)
    assert "940 of the 1000 rows read are broken" in refusal(path)


def test_nothing_readable_at_the_start(write_lines: Any) -> None:
    path = write_lines("a.jsonl", [PAIR, *(["[1]"] * 3)])
    assert "3 of the 4 rows" in refusal(path)
    path = write_lines("b.txt", [b"\xff", b"\xfe"])
    assert f"none of the first 2 rows can be read. {path}:1: invalid UTF-8" in refusal(path)


def test_unknown_format_is_refused_when_opened_with_the_file_named(write_lines: Any) -> None:
    path = write_lines("a.jsonl", [{"foo": 1}])
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: no known format has these fields: foo.")


def test_other_kinds_serve_as_prompts(write_lines: Any) -> None:
    pairs = write_lines("a.jsonl", [{**PAIR, "by": "me"}])
    assert load(pairs, kind="prompts") == [Prompt(prompt=user("Q"), origin=Origin(str(pairs), 1), extra={"by": "me"})]
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    demos = write_lines("b.jsonl", [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    (prompt,) = load(demos, kind="prompts")
    assert isinstance(prompt, Prompt)
    assert [message.content for message in prompt.prompt] == ["1", "2", "3"]


def test_wrong_kind_names_the_command_that_converts(write_lines: Any) -> None:
    path = write_lines("a.jsonl", [{"prompt": "Q", "solution": "2+2=4", "answer": "4"}])
    message = refusal(path, kind="demonstrations")
    assert "holds prompts, recognised by prompt; demonstrations are needed here" in message
    assert f"kedge data convert '{path}' --kind demonstrations" in message
    assert "They cannot be made from prompts." in refusal(path, kind="pairs")


def test_share_of_broken_rows_must_be_a_share(write_lines: Any) -> None:
    with pytest.raises(ConfigError, match="max_broken is 5"):
        read(write_lines("a.jsonl", [PAIR]), max_broken=5)


def test_prompt_key_ignores_case_space_and_answers_but_not_roles_or_order() -> None:
    prompt = Prompt(prompt=user("What  IS\nthis?"), origin=ORIGIN)
    pair = Pair(
        prompt=user(" what is this? "),
        chosen=(Message("assistant", "a"),),
        rejected=(Message("assistant", "b"),),
        origin=Origin("y", 9),
    )
    shown = Demonstration(messages=(*user("ｗhat is THIS?"), Message("assistant", "c")), origin=ORIGIN)
    assert prompt_key(prompt) == prompt_key(pair) == prompt_key(shown)
    others = [
        user("what is that?"),
        (Message("system", "What is this?"),),
        (*user("what"), *user("is this?")),
        (*user("is this?"), *user("what")),
        (),
    ]
    keys = {prompt_key(Prompt(prompt=other, origin=ORIGIN)) for other in others} | {prompt_key(prompt)}
    assert len(keys) == len(others) + 1


def test_prompt_key_is_the_same_on_every_machine() -> None:
    # These bytes, hashed by the library itself: a held-out set must not move between releases.
    assert prompt_key(Prompt(prompt=user("Hello"), origin=ORIGIN)) == xxhash.xxh3_64(b"user\x1fhello").intdigest()


def test_normalise() -> None:
    assert normalise("\u00a0Straße\t ﬁn ") == "strasse fin"
