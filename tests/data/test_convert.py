"""Conversions: every kind survives a round trip through a file, and one kind becomes another by rule."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.errors import ConfigError, DataError
from kedge.data.converting import canonical_lines, convert, to_fields
from kedge.data.examples import (
    Demonstration,
    Example,
    Message,
    Messages,
    Origin,
    Pair,
    Prompt,
    Ranking,
    Role,
    Thumb,
    prompt_of,
)
from kedge.data.formats import KNOWN_FIELDS, parse, recognise
from kedge.data.kinds import as_kind, kind_of
from kedge.data.reading import load

HERE = Origin("a.jsonl", 1)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.just("\n\nHuman: x\n\nAssistant: y")
roles: st.SearchStrategy[Role] = st.sampled_from([role for role in get_args(Role) if role != "text"])


def messages(role: st.SearchStrategy[Role]) -> st.SearchStrategy[Message]:
    return st.builds(Message, role, texts)


def tail(*, max_size: int) -> st.SearchStrategy[Messages]:
    return st.lists(messages(roles), max_size=max_size).map(tuple)


prompts = st.builds(lambda head, rest: (head, *rest), messages(st.sampled_from(["system", "user"])), tail(max_size=3))
answers = st.builds(lambda head, rest: (head, *rest), messages(st.just("assistant")), tail(max_size=2))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
# Names that a reader knows are the hard case: they must come back as extra fields, not change what the row is.
extras = st.dictionaries(texts | st.sampled_from(sorted(KNOWN_FIELDS)), values, max_size=3)
ranked = st.lists(st.tuples(answers, st.integers(1, 3)), min_size=2, max_size=4)


def dense(pairs: list[tuple[Messages, int]]) -> tuple[int, ...]:
    order = sorted({rank for _, rank in pairs})
    return tuple(order.index(rank) + 1 for _, rank in pairs)


here = st.just(HERE)
examples: st.SearchStrategy[Example] = st.one_of(
    st.builds(
        Pair,
        prompt=prompts,
        chosen=answers,
        rejected=answers,
        margin=st.none() | st.floats(-5, 5),
        certainty=st.none() | st.floats(0, 1),
        origin=here,
        extra=extras,
    ),
    st.builds(
        lambda prompt, pairs, extra: Ranking(
            prompt=prompt, answers=tuple(a for a, _ in pairs), rank=dense(pairs), origin=HERE, extra=extra
        ),
        prompts,
        ranked,
        extras,
    ),
    st.builds(Thumb, prompt=prompts, answer=answers, is_good=st.booleans(), origin=here, extra=extras),
    st.builds(
        lambda prompt, last, extra: Demonstration(messages=(*prompt, last), origin=HERE, extra=extra),
        prompts,
        messages(st.just("assistant")),
        extras,
    ),
    st.builds(Prompt, prompt=prompts, answer=st.none() | texts, origin=here, extra=extras),
)


@given(examples)
def test_canonical_row_reads_back_as_the_same_example(example: Example) -> None:
    row = json.loads(json.dumps(to_fields(example)))
    fmt = recognise([row])
    assert fmt.kind == kind_of(example)
    assert parse(row, fmt, HERE) == example


def turn(text: str) -> Messages:
    return (Message("user", text),)


def reply(text: str) -> Messages:
    return (Message("assistant", text),)


MADE = Pair(prompt=turn("Q"), chosen=reply("good"), rejected=reply("bad"), origin=HERE, extra={"by": "me"})


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "sub/out.parquet"])
def test_convert_writes_the_form_that_the_name_says(write_lines: Any, tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any]] = [{"question": f"Q{n}", "chosen": "x", "rejected": "y", "n": n} for n in range(1500)]
    rows[1400] |= {"margin": 0.5}
    source, out = write_lines("a.jsonl", rows), tmp_path / name
    done = convert(source, out)
    assert (done.kind, done.num_rows, done.num_examples, done.num_broken) == ("pairs", 1500, 1500, 0)
    back = load(out)
    assert len(back) == 1500
    assert isinstance(back[1400], Pair)
    assert (back[1400].margin, back[1400].extra) == (0.5, {"n": 1400})
    assert [(e.prompt, e.chosen, e.rejected) for e in back if isinstance(e, Pair)][7] == (
        turn("Q7"),
        reply("x"),
        reply("y"),
    )
    assert out.read_bytes()[:2] == {"out.jsonl": b'{"', "out.jsonl.gz": b"\x1f\x8b", "sub/out.parquet": b"PA"}[name]


def test_canonical_line_is_messages(write_lines: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    convert(write_lines("a.jsonl", [{"prompt": "Q", "chosen": "x", "rejected": "y", "input": "z", "by": "me"}]), out)
    assert json.loads(gzip.decompress(out.read_bytes())) == {
        "prompt": [{"role": "user", "content": "Q"}],
        "chosen": [{"role": "assistant", "content": "x"}],
        "rejected": [{"role": "assistant", "content": "y"}],
        "by": "me",
        "extra": {"input": "z"},
    }


def test_broken_rows_go_beside_the_result(write_lines: Any, tmp_path: Path) -> None:
    source = write_lines("in/a.jsonl", [{"prompt": "Q"}] * 3 + ["oops"])
    with pytest.raises(DataError, match="1 of the 4 rows"):
        convert(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    done = convert(source, tmp_path / "out.jsonl", max_broken=0.5)
    assert (done.num_examples, done.num_broken) == (3, 1)
    assert json.loads((tmp_path / "out.broken.jsonl").read_text())["line"] == 4


def test_rows_without_the_kind_are_counted(write_lines: Any, tmp_path: Path) -> None:
    source = write_lines("a.jsonl", [{"prompt": "Q", "completion": str(n), "label": n == 2} for n in range(4)])
    done = convert(source, tmp_path / "out.jsonl", kind="demonstrations")
    assert (done.num_rows, done.num_examples, done.num_without) == (4, 1, 3)
    assert "2" in (tmp_path / "out.jsonl").read_text()


def test_impossible_targets_are_refused(write_lines: Any, tmp_path: Path) -> None:
    source = write_lines("a.jsonl", [{"prompt": "Q", "completion": "A"}])
    with pytest.raises(DataError, match=r"holds demonstrations, which cannot be turned into pairs; .* prompts"):
        convert(source, tmp_path / "out.jsonl", kind="pairs")
    with pytest.raises(ConfigError, match=r"must end in \.jsonl"):
        convert(source, tmp_path / "out.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_rows_that_fit_no_columns_say_so(write_lines: Any, tmp_path: Path) -> None:
    source = write_lines("a.jsonl", [{"prompt": "Q", "tag": 1}, {"prompt": "Q", "tag": {"deep": "x"}}])
    with pytest.raises(DataError, match=r"do not fit into columns .*; write \.jsonl instead"):
        convert(source, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_pair_as_other_kinds() -> None:
    extra = {"by": "me"}
    assert as_kind(MADE, "pairs") == (MADE,)
    assert as_kind(MADE, "prompts") == (Prompt(prompt=turn("Q"), origin=HERE, extra=extra),)
    assert as_kind(MADE, "demonstrations") == (
        Demonstration(messages=turn("Q") + reply("good"), origin=HERE, extra=extra),
    )
    both = (reply("good"), reply("bad"))
    assert as_kind(MADE, "rankings") == (
        Ranking(prompt=turn("Q"), answers=both, rank=(1, 2), origin=HERE, extra=extra),
    )
    assert as_kind(MADE, "thumbs") == tuple(
        Thumb(prompt=turn("Q"), answer=answer, is_good=is_good, origin=HERE, extra=extra)
        for answer, is_good in zip(both, (True, False), strict=True)
    )


def test_ranking_as_pairs_leaves_ties_out() -> None:
    ranking = Ranking(
        prompt=turn("Q"), answers=(reply("c"), reply("a"), reply("b"), reply("b2")), rank=(3, 1, 2, 2), origin=HERE
    )
    pairs = [(p.chosen[0].content, p.rejected[0].content) for p in as_kind(ranking, "pairs") if isinstance(p, Pair)]
    assert pairs == [("a", "b"), ("a", "b2"), ("a", "c"), ("b", "c"), ("b2", "c")]
    (best,) = as_kind(ranking, "demonstrations")
    assert isinstance(best, Demonstration)
    assert best.messages[-1].content == "a"


def test_prompt_with_a_solution_becomes_a_demonstration() -> None:
    solved = Prompt(prompt=turn("2+2?"), answer="4", origin=HERE, extra={"solution": "It is 4."})
    (converted,) = as_kind(solved, "demonstrations")
    assert converted == Demonstration(
        messages=turn("2+2?") + reply("It is 4."), origin=HERE, extra={"answer": "4", "solution": "It is 4."}
    )
    bare = as_kind(Prompt(prompt=turn("2+2?"), answer="4", origin=HERE), "demonstrations")
    assert bare == (Demonstration(messages=turn("2+2?") + reply("4"), origin=HERE, extra={"answer": "4"}),)
    with pytest.raises(DataError, match="neither a 'solution' nor an 'answer'"):
        as_kind(Prompt(prompt=turn("2+2?"), origin=HERE), "demonstrations")
    with pytest.raises(DataError, match="prompts cannot be turned into thumbs; they can become: demonstrations"):
        as_kind(solved, "thumbs")


def test_rows_in_memory_become_the_file_that_reads_back_as_the_same_examples(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?", "answer": "4", "level": np.int64(3), "note": None},
        "Why?",
        [{"role": "user", "content": "Hi"}],
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"".join(canonical_lines(rows, ["prompts"], name="prompts")))
    first, second, third = load(file, kind="prompts")
    assert isinstance(first, Prompt)
    assert (first.prompt, first.answer, first.extra) == (turn("2 + 2?"), "4", {"level": 3})
    assert [prompt_of(one) for one in (second, third)] == [turn("Why?"), turn("Hi")]
    pairs = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    assert json.loads(canonical_lines(pairs, ["prompts"], name="p")[0]) == {"prompt": [user("q")]}
    assert json.loads(canonical_lines(pairs, [], name="p")[0]) == {
        "prompt": [user("q")],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("rows", "kinds", "message"),
    [
        ([], ["prompts"], "rows: there are no rows in it"),
        ([{"prompt": "a"}, {"prompt": ""}, 3], ["pairs"], r"rows\[2\]: expected a dict of fields, found 3 \(int\)"),
        ([{"prompt": "a"}, {"question": "b"}], ["prompts"], "rows: the first rows have two formats in equal number"),
        ([{"prompt": "a"}] * 2 + [{"question": "b"}], ["prompts"], r"rows\[2\]: field 'prompt' is missing"),
        ([{"prompt": "a", "bad": "\ud800"}], ["prompts"], r"rows\[0\]: .*surrogates"),
        (
            [{"prompt": "a", "completion": "b"}],
            ["pairs", "rankings"],
            "holds demonstrations.*pairs or rankings are",
        ),
    ],
)
def test_one_broken_row_in_memory_is_an_error_that_names_it(rows: list[Any], kinds: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        canonical_lines(rows, kinds, name="rows")
