"""Files with columns named, limits and weights: what a stage reads, and the share of each file in every RL batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import ConfigError, DataError
from kedge.data.examples import Prompt
from kedge.data.mixing import MIXTURE, Part, mix
from kedge.data.reading import load, read
from kedge.recipe.data_inputs import files_to_read
from kedge.recipe.schema import load_recipe
from kedge.recipe.wiring import connect
from kedge.stages.rl.prompts import PromptDataset, _mixture  # pyright: ignore[reportPrivateUsage]

Write = Any


def test_columns_name_the_parts_of_any_file(write_lines: Write) -> None:
    row = {"ask": "Why?", "meta": {"best": "good"}, "poor": "bad", "note": "kept"}
    columns = {"prompt": "ask", "chosen": "meta.best", "rejected": "poor"}
    (pair,) = load(write_lines("a.jsonl", [row]), columns=columns)
    assert (pair.prompt[0].content, pair.chosen[0].content, pair.rejected[0].content) == ("Why?", "good", "bad")  # type: ignore[union-attr]
    assert pair.extra["note"] == "kept"


def test_named_score_ranks_the_answers_to_a_prompt(write_lines: Write) -> None:
    rows = [{"question": q, "response": a, "stars": s} for q, a, s in (("Q", "x", 2), ("R", "z", 1), ("Q", "y", 5))]
    (ranking,) = load(write_lines("a.jsonl", rows), columns={"score": "stars"})
    assert (ranking.rank, [answer[0].content for answer in ranking.answers]) == ((2, 1), ["x", "y"])  # type: ignore[union-attr]


def test_table_with_quotes_blank_lines_and_tabs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,chosen,rejected\n"Why, and\n\nhow?",good,bad\n')
    (tmp_path / "a.tsv").write_text("question\tanswer\nWhy?\t4\n")
    (pair,) = load(tmp_path / "a.csv")
    (prompt,) = load(tmp_path / "a.tsv")
    assert pair.prompt[0].content == "Why, and\n\nhow?"  # type: ignore[union-attr]
    assert isinstance(prompt, Prompt)
    assert prompt.answer == "4"
    assert str(pair.origin) == f"{tmp_path / 'a.csv'}:2"


def test_limit_is_the_first_rows(write_lines: Write) -> None:
    reading = read(write_lines("a.jsonl", [{"prompt": f"Q{n}"} for n in range(9)]), limit=3)
    assert [example.prompt[0].content for example in reading] == ["Q0", "Q1", "Q2"]  # type: ignore[union-attr]


def demos(name: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{name}{n}", "response": "So."} for n in range(count)]


def test_weights_repeat_what_falls_short_and_drop_nothing(write_lines: Write, tmp_path: Path) -> None:
    big, small = write_lines("big.jsonl", demos("b", 30)), write_lines("small.jsonl", demos("s", 4))
    parts = [Part(source=str(big), weight=3), Part(source=str(small), weight=1)]
    mix(parts, tmp_path / "out.jsonl", kind="demonstrations", seed=7)
    counts = Counter(example.messages[0].content for example in load(tmp_path / "out.jsonl"))  # type: ignore[union-attr]
    assert [counts[f"b{n}"] for n in range(30)] == [1] * 30
    times = [counts[f"s{n}"] for n in range(4)]
    assert (sum(times), set(times)) == (10, {2, 3})


def test_weighted_prompts_have_their_share_in_every_batch(write_lines: Write, tmp_path: Path) -> None:
    chat = write_lines("chat.jsonl", [{"prompt": f"chat {n}"} for n in range(50)])
    maths = write_lines("maths.jsonl", [{"prompt": f"maths {n}", "answer": n} for n in range(5)])
    parts = [Part(source=str(chat), weight=0.75), Part(source=str(maths), weight=0.25)]
    mix(parts, tmp_path / "out.jsonl", kind="prompts", seed=7)
    prompts = [example for example in load(tmp_path / "out.jsonl") if isinstance(example, Prompt)]
    assert len(prompts) == 55
    assert prompts[-1].extra[MIXTURE] == {"part": 1, "share": 0.25}
    tokens = [[n] for n in range(55)]
    dataset = PromptDataset(prompts=prompts, tokens=tokens, batch=8, answers=1, seed=3, mixture=_mixture(prompts))
    for number in range(20):
        batch = [dataset.item(group) for group in range(number * 8, (number + 1) * 8)]
        assert sum(item >= 50 for item in batch) == 2
    first_maths = [item for group in range(20) if (item := dataset.item(group)) >= 50]
    assert sorted(first_maths) == [50, 51, 52, 53, 54]  # each once before one comes again


RECIPE = """
kedge: 1
name: mixed
seed: 1
model: tiny
stages:
  sft:
    kind: sft
    data:
      - {file: a.jsonl, weight: 1}
      - {file: b.csv, columns: {prompt: ask, completion: reply}, weight: 1, limit: 2}
"""


def test_recipe_mixes_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demos("a", 4)))
    (tmp_path / "b.csv").write_text("ask,reply\nb0,So.\nb1,So.\nb2,So.\n")
    (tmp_path / "r.yaml").write_text(RECIPE)
    links = connect(load_recipe(tmp_path / "r.yaml")).links["sft"]
    sources = [link.source() for link in links]
    files = files_to_read(links, sources, tmp_path / "home", seed=1)
    assert files["data"] == [str(tmp_path / "home/inputs/data.jsonl")]
    counts = Counter(example.messages[0].content[0] for example in load(files["data"][0]))  # type: ignore[union-attr]
    assert counts == {"a": 4, "b": 4}


def test_stage_that_takes_several_files_gets_them_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demos("a", 4)))
    (tmp_path / "b.csv").write_text("ask,reply\nb0,So.\n")
    head = RECIPE.partition("stages:")[0]
    files = "[a.jsonl, {file: b.csv, columns: {prompt: ask, completion: reply}}]"
    (tmp_path / "r.yaml").write_text(f"{head}stages:\n  clean: {{kind: data, files: {files}}}\n")
    links = connect(load_recipe(tmp_path / "r.yaml")).links["clean"]
    sources = [link.source() for link in links]
    read_files = files_to_read(links, sources, tmp_path / "home", seed=1)["files"]
    assert read_files == [sources[0], str(tmp_path / "home/inputs/files-2.jsonl")]
    assert len(load(read_files[1])) == 1


def test_half_weighted_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.replace("a.jsonl, weight: 1", "a.jsonl"))
    with pytest.raises(ConfigError, match=r"sft\.data: some of the files have a weight and some have none"):
        connect(load_recipe(tmp_path / "r.yaml"))


def test_kinds_are_not_mixed(write_lines: Write, tmp_path: Path) -> None:
    pairs = write_lines("p.jsonl", [{"prompt": "Q", "chosen": "a", "rejected": "b"}])
    thumbs = write_lines("t.jsonl", [{"prompt": "Q", "response": "a", "label": "good"}])
    with pytest.raises(DataError, match="must hold the same kind of examples"):
        mix([Part(source=str(pairs)), Part(source=str(thumbs))], tmp_path / "out.jsonl", kind=None, seed=1)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("5", "stages.sft.data: must be text, found 5"),
        ("[]", "stages.sft.data: needs at least 1 item(s), found 0"),
        ("{file: a.jsonl, weigt: 2}", "stages.sft.data.weigt: not a setting here (did you mean 'weight'?)"),
        ("[a.jsonl, {file: b.jsonl, limit: 0}]", "stages.sft.data.1.limit: must be at least 1, found 0"),
    ],
)
def test_mistake_in_a_list_of_files_is_told_once(data: str, problem: str, tmp_path: Path) -> None:
    head = "kedge: 1\nname: m\nseed: 1\nmodel: tiny\nstages:\n  sft:\n    kind: sft\n"
    (tmp_path / "r.yaml").write_text(f"{head}    data: {data}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert str(caught.value).splitlines()[1:] == [f"  line 8: {problem}"]
