"""The `data` stage: what is left out and why, what is held out, and that nothing is lost on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

from kedge.core.errors import DataError
from kedge.data.prepare import Fault, prepare

WriteLines = Callable[[str, Iterable[Any]], Path]

EVERY_FAULT: tuple[Fault, ...] = ("empty", "identical", "contradictory", "duplicate")


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


FAULTY = [
    pair("one?", "yes", "no"),
    pair("two?", "", "no"),  # line 2: empty
    pair("three?", "same  words", "same words"),  # line 3: identical but for spacing
    pair("four?", "left", "right"),  # line 4: contradicted by line 5
    pair("four?", "right", "left"),
    pair("ONE? ", "yes", "no"),  # line 6: line 1 again, in other spelling of the prompt
    pair("one?", "yes", "never"),  # the same prompt with another answer is no duplicate
    pair("asked in the evaluation?", "a", "b"),  # line 8
    pair("five?", "c", "d"),
]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(path: Path) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows(path)]


def test_each_example_is_left_out_for_its_own_reason_with_its_place(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", FAULTY)
    evaluation = write_lines("eval.jsonl", [{"prompt": "Asked in the  evaluation?"}])
    out = tmp_path / "out"
    made = prepare([str(source)], out, heldout=0, drop=EVERY_FAULT, decontaminate=[str(evaluation)])
    assert made == {"train": out / "train.jsonl", "heldout": out / "heldout.jsonl"}
    aside = [(row["set_aside_for"], row["from"]) for row in rows(out / "set-aside.jsonl")]
    assert aside == [
        ("empty", f"{source}:2"),
        ("identical", f"{source}:3"),
        ("contradictory", f"{source}:4"),
        ("contradictory", f"{source}:5"),
        ("duplicate", f"{source}:6"),
        ("contaminated", f"{source}:8"),
    ]
    assert prompts(made["train"]) == ["one?", "one?", "five?"]
    assert rows(made["heldout"]) == []


@pytest.mark.parametrize(("kept", "lines"), [("empty", {2}), ("identical", {3}), ("contradictory", {4, 5})])
def test_what_is_not_to_be_dropped_stays(write_lines: WriteLines, tmp_path: Path, kept: Fault, lines: set[int]) -> None:
    source = write_lines("pairs.jsonl", FAULTY)
    drop: list[Fault] = [fault for fault in EVERY_FAULT if fault != kept]
    made = prepare([str(source)], tmp_path / "out", heldout=0, drop=drop)
    wanted = {FAULTY[line - 1]["prompt"] for line in lines}
    assert wanted <= set(prompts(made["train"]))
    assert kept not in {row["set_aside_for"] for row in rows(tmp_path / "out" / "set-aside.jsonl")}


def test_duplicates_stay_when_asked(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", FAULTY)
    made = prepare([str(source)], tmp_path / "out", heldout=0, drop=())
    assert len(rows(made["train"])) == len(FAULTY)


def test_evaluation_prompts_are_left_out_whatever_is_dropped(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", FAULTY)
    evaluation = write_lines("eval.jsonl", [{"prompt": "five?"}])
    made = prepare([str(source)], tmp_path / "out", heldout=0, drop=(), decontaminate=[str(evaluation)])
    assert "five?" not in prompts(made["train"])
    assert len(rows(made["train"])) == len(FAULTY) - 1


def test_a_prompt_is_trained_on_or_held_out_never_both(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", [pair(f"q{i % 40}", f"good {i}", f"bad {i}") for i in range(120)])
    made = prepare([str(source)], tmp_path / "out", heldout=0.25, drop=EVERY_FAULT)
    train, held = set(prompts(made["train"])), set(prompts(made["heldout"]))
    assert (len(train), len(held)) == (30, 10)
    assert not train & held
    assert (len(rows(made["train"])), len(rows(made["heldout"]))) == (90, 30)


def test_the_same_seed_splits_alike_and_another_does_not(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", [pair(f"q{i}", f"good {i}", f"bad {i}") for i in range(40)])

    def held(name: str, seed: int) -> bytes:
        made = prepare([str(source)], tmp_path / name, heldout=0.25, drop=EVERY_FAULT, seed=seed)
        return made["heldout"].read_bytes()

    assert held("a", 3) == held("b", 3)
    assert held("c", 4) != held("a", 3)


def test_several_files_are_cleaned_and_split_together(write_lines: WriteLines, tmp_path: Path) -> None:
    one = write_lines("one.jsonl", [pair("shared?", "yes", "no"), pair("a?", "1", "2")])
    other = write_lines("other.jsonl", [pair("shared?", "no", "yes"), pair("b?", "1", "2")])
    made = prepare([str(one), str(other)], tmp_path / "out", heldout=0, drop=EVERY_FAULT)
    assert prompts(made["train"]) == ["a?", "b?"]
    assert Counter(row["from"] for row in rows(tmp_path / "out" / "set-aside.jsonl")) == {
        f"{one}:1": 1,
        f"{other}:1": 1,
    }


def test_files_of_different_kinds_are_refused_by_name(write_lines: WriteLines, tmp_path: Path) -> None:
    pairs = write_lines("pairs.jsonl", [pair("a?", "1", "2")])
    asked = write_lines("prompts.jsonl", [{"prompt": "a?"}])
    with pytest.raises(
        DataError, match=r"pairs\.jsonl holds pairs, .*prompts\.jsonl holds prompts; use one stage each"
    ):
        prepare([str(pairs), str(asked)], tmp_path / "out", heldout=0, drop=EVERY_FAULT)


def test_nothing_left_says_what_went_where_and_writes_nothing(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", [pair("a?", "same", "same"), pair("b?", "", "x"), pair("c?", "x", "x")])
    with pytest.raises(DataError, match=r"pairs\.jsonl: nothing is left of 3 pairs: 2 identical, 1 empty"):
        prepare([str(source)], tmp_path / "out", heldout=0.1, drop=EVERY_FAULT)
    assert list((tmp_path / "out").iterdir()) == []


def test_thumbs_with_the_same_answer_and_another_label_are_no_duplicates(
    write_lines: WriteLines, tmp_path: Path
) -> None:
    liked = {"prompt": "a?", "completion": "b", "label": True}
    source = write_lines("thumbs.jsonl", [liked, {**liked, "label": False}, liked])
    made = prepare([str(source)], tmp_path / "out", heldout=0, drop=EVERY_FAULT)
    assert [row["label"] for row in rows(made["train"])] == [True, False]


def test_the_report_counts_every_example_once(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", FAULTY)
    told: list[tuple[Any, ...]] = []
    prepare(
        [str(source)],
        tmp_path / "out",
        heldout=0.25,
        drop=EVERY_FAULT,
        report=lambda *words, **evidence: told.append((*words, evidence)),
    )
    ((level, code, message, evidence),) = told
    assert (level, code) == ("info", "data.prepared")
    # four examples of three prompts are left; a quarter of three prompts is one
    assert message.endswith("5 set aside: 2 contradictory, 1 empty, 1 identical, 1 duplicate")
    assert evidence["counts"]["train"] + evidence["counts"]["heldout"] == 4
    assert evidence["left_out"] == {"contradictory": 2, "empty": 1, "identical": 1, "duplicate": 1}


def test_broken_lines_are_set_aside_and_too_many_refused(write_lines: WriteLines, tmp_path: Path) -> None:
    lines = [pair(f"q{i}", "x", f"y{i}") for i in range(9)]
    source = write_lines("pairs.jsonl", [*lines[:4], '{"prompt": "cut', *lines[4:]])
    with pytest.raises(DataError, match=r"1 of the 10 rows read are broken \(10\.0%; at most 1\.0% may be"):
        prepare([str(source)], tmp_path / "strict", heldout=0, drop=EVERY_FAULT)
    assert not (tmp_path / "strict" / "train.jsonl").exists()
    made = prepare([str(source)], tmp_path / "lax", heldout=0, drop=EVERY_FAULT, max_broken=0.1)
    assert len(rows(made["train"])) == 9
    assert [row["line"] for row in rows(tmp_path / "lax" / "broken-0.jsonl")] == [5]


def test_every_fault_has_a_name_that_these_tests_know() -> None:
    assert set(get_args(Fault)) == {*EVERY_FAULT, "contaminated"}


def in_languages(german: int, english: int) -> list[dict[str, Any]]:
    named = [("de", number) for number in range(german)] + [("en", number) for number in range(english)]
    return [pair(f"{language} {number}?", "yes", "no") | {"language": language} for language, number in named]


def test_balanced_examples_of_rare_groups_are_repeated(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", in_languages(3, 10))
    made = prepare([str(source)], tmp_path / "out", heldout=0, drop=EVERY_FAULT, balance="language", seed=2)
    written = Counter(prompts(made["train"]))
    by_language = {name: [count for text, count in written.items() if text.startswith(name)] for name in ("de", "en")}
    assert sorted(by_language["de"]) == [3, 3, 4]
    assert by_language["en"] == [1] * 10


def test_what_is_held_out_is_never_repeated(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", in_languages(10, 40))
    made = prepare([str(source)], tmp_path / "out", heldout=0.2, drop=EVERY_FAULT, balance="language", seed=2)
    assert max(Counter(prompts(made["heldout"])).values()) == 1
    languages = Counter(row["language"] for row in rows(made["train"]))
    assert languages["de"] == languages["en"]
    assert not {*prompts(made["heldout"])} & {*prompts(made["train"])}


def test_balanced_prompts_are_marked_and_not_repeated(write_lines: WriteLines, tmp_path: Path) -> None:
    asked = [{"prompt": f"{row['prompt']}", "language": row["language"]} for row in in_languages(1, 3)]
    made = prepare([str(write_lines("p.jsonl", asked))], tmp_path / "out", heldout=0, drop=(), balance="language")
    marks = [(row["language"], row["mixture"]) for row in rows(made["train"])]
    assert marks == [
        ("de", {"part": 0, "share": 0.5}),
        *[("en", {"part": 1, "share": 0.5})] * 3,
    ]


def test_a_field_that_no_example_has_cannot_be_balanced(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines("pairs.jsonl", in_languages(2, 2))
    with pytest.raises(DataError, match=r"balance: no example has a field 'lang' .*they have language"):
        prepare([str(source)], tmp_path / "out", heldout=0, drop=(), balance="lang")
