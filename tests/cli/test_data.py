"""`kedge data` as a user runs it: check, convert, split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kedge = Callable[..., Any]

TOPICS = ("apples", "boats", "clouds", "drums", "eagles", "forks", "gates", "hills", "inks", "jars")


def pairs(count: int) -> list[dict[str, str]]:
    """Pairs that the audit finds nothing fatal in: every other one prefers the shorter answer."""
    return [
        {
            "prompt": f"What do you know about {TOPICS[i % 10]} in the year {1000 + 37 * i}?",
            "chosen": f"Something {i}" + " and more" * (i % 2),
            "rejected": f"Nothing {i}" + " at all" * ((i + 1) % 2),
        }
        for i in range(count)
    ]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, list[Any]], Path]:
    def write_lines(name: str, rows: list[Any]) -> Path:
        file = tmp_path / name
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return file

    return write_lines


Write = Callable[[str, list[Any]], Path]


def test_a_sound_file_passes_with_its_counts(kedge: Kedge, write: Write) -> None:
    write("a.jsonl", pairs(60))
    done = kedge("data", "check", "a.jsonl")
    assert done.code == 0
    assert "a.jsonl: pairs, read as pairs (prompt, chosen, rejected)" in done.out
    words = next(line for line in done.out.splitlines() if line.startswith("a.jsonl ")).split()
    assert words[:4] == ["a.jsonl", "60", "0", "60"]
    assert "fatal" not in done.out


def test_output_without_a_terminal_has_no_escape_codes(kedge: Kedge, write: Write) -> None:
    write("a.jsonl", [*pairs(60), {"prompt": "q", "chosen": "[bold]same[/]", "rejected": "[bold]same[/]"}])
    done = kedge("data", "check", "a.jsonl", "--model", "tiny")
    assert "\x1b" not in done.out + done.err
    assert done.err == ""


def test_json_is_all_that_is_printed_and_parses(kedge: Kedge, write: Write) -> None:
    write("a.jsonl", pairs(60))
    write("b.jsonl", pairs(3))
    done = kedge("data", "check", "a.jsonl", "--heldout", "b.jsonl", "--json")
    assert done.code == 2
    found = json.loads(done.out)
    assert [(file["file"], file["items"], file["part"]) for file in found["files"]] == [
        ("a.jsonl", 60, "train"),
        ("b.jsonl", 3, "heldout"),
    ]
    fatal = [finding for finding in found["findings"] if finding["level"] == "fatal"]
    assert [finding["code"] for finding in fatal] == ["leakage.exact"]
    assert fatal[0]["message"].startswith("3 of 3 held-out items")


def test_one_page_is_written_for_html(kedge: Kedge, write: Write, tmp_path: Path) -> None:
    write("a.jsonl", pairs(60))
    done = kedge("data", "check", "a.jsonl", "--html", "reports/a.html")
    assert done.code == 0
    assert done.out.rstrip().endswith("wrote reports/a.html")
    page = (tmp_path / "reports/a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "a.jsonl" in page
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["a.html"]


def test_a_page_is_written_for_fatal_findings_too(kedge: Kedge, write: Write, tmp_path: Path) -> None:
    write("a.jsonl", [{"prompt": "q", "chosen": "same", "rejected": "same"}])
    assert kedge("data", "check", "a.jsonl", "--html", "a.html").code == 2
    assert (tmp_path / "a.html").is_file()


def test_a_model_counts_tokens_and_the_window_is_measured_in_them(kedge: Kedge, write: Write) -> None:
    write("a.jsonl", pairs(60))
    done = kedge("data", "check", "a.jsonl", "--model", "tiny", "--window", "20", "--json")
    assert done.code == 2
    found = json.loads(done.out)
    assert {lengths["unit"] for lengths in found["files"][0]["lengths"]} == {"characters", "words", "tokens"}
    over = next(finding for finding in found["findings"] if finding["code"] == "length.prompt_over_window")
    assert (over["level"], over["evidence"]["count"]) == ("fatal", 60)


def test_a_window_without_a_model_is_bad_input(kedge: Kedge, write: Write) -> None:
    write("a.jsonl", pairs(3))
    done = kedge("data", "check", "a.jsonl", "--window", "20")
    assert done.code == 2
    assert done.err.startswith("error: --window 20: tokens can only be counted with a tokenizer; name one with --model")


def test_convert_writes_the_canonical_form_here(kedge: Kedge, write: Write, tmp_path: Path) -> None:
    write("alpaca.jsonl", [{"instruction": "Add", "input": "1 and 2", "output": "3"}])
    done = kedge("data", "convert", "alpaca.jsonl")
    assert done.code == 0
    assert "wrote 1 demonstrations to alpaca.demonstrations.jsonl" in done.out
    (row,) = (tmp_path / "alpaca.demonstrations.jsonl").read_text().splitlines()
    assert json.loads(row) == {
        "messages": [{"role": "user", "content": "Add\n\n1 and 2"}, {"role": "assistant", "content": "3"}]
    }


def test_convert_sets_a_broken_line_aside_and_says_where(kedge: Kedge, write: Write, tmp_path: Path) -> None:
    rows: list[Any] = list(pairs(150))
    write("a.jsonl", [*rows[:70], '{"prompt": "cut', *rows[70:]])
    done = kedge("data", "convert", "a.jsonl", "--to", "out/b.jsonl", "--kind", "prompts")
    assert done.code == 0
    assert "broken rows set aside beside it in *.broken.jsonl, with line and reason: 1" in done.out
    (aside,) = (tmp_path / "out/b.broken.jsonl").read_text().splitlines()
    assert {"file": "a.jsonl", "line": 71, "raw": '{"prompt": "cut'}.items() <= json.loads(aside).items()
    assert len((tmp_path / "out/b.jsonl").read_text().splitlines()) == 150


def test_names_with_square_brackets_are_no_markup(kedge: Kedge, write: Write, tmp_path: Path) -> None:
    write("a[bold].jsonl", pairs(5))
    done = kedge("data", "convert", "a[bold].jsonl", "--to", "b[/s].jsonl")
    assert done.code == 0
    assert "wrote 5 pairs to b[/s].jsonl" in done.out
    assert (tmp_path / "b[/s].jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "pair"), "--kind pair: there is no such kind (did you mean 'pairs'?); one of pairs, rankings"),
        (("--to", "b.csv"), "b.csv: cannot write this kind of file; the name must end in .jsonl"),
        (("--kind", "rankings", "--to", "b.csv"), "b.csv: cannot write this kind of file"),
    ],
)
def test_convert_refuses_what_it_cannot_make(
    kedge: Kedge, write: Write, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write("a.jsonl", pairs(3))
    done = kedge("data", "convert", "a.jsonl", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_split_writes_two_parts_that_share_no_prompt(kedge: Kedge, write: Write, tmp_path: Path) -> None:
    write("a.jsonl", pairs(50) * 2)
    done = kedge("data", "split", "a.jsonl", "--to", "parts", "--heldout", "0.2", "--seed", "5")
    assert done.code == 0
    assert done.out.splitlines() == [
        "50 prompts, 10 of them held out (seed 5)",
        "parts/a.train.jsonl: 80",
        "parts/a.heldout.jsonl: 20",
    ]
    train, held = (
        {json.loads(line)["prompt"] for line in (tmp_path / f"parts/a.{part}.jsonl").read_text().splitlines()}
        for part in ("train", "heldout")
    )
    assert (len(train), len(held), train & held) == (40, 10, set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heldout", "1.5"), "heldout is 1.5; it is a share between 0 and 1"),
        (("--by", "promt"), "no field 'promt' to split by (did you mean 'prompt'?)"),
    ],
)
def test_split_refuses_what_makes_no_sense(
    kedge: Kedge, write: Write, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write("a.jsonl", pairs(20))
    done = kedge("data", "split", "a.jsonl", *arguments)
    assert done.code == 2
    assert message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_prompts_with_instructions_are_made(kedge: Kedge, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    done = kedge("data", "instructions", "--to", str(file), "--count", "30", "--kind", "untrained", "--heldout")
    assert done.code == 0
    assert "wrote 30 prompts with 9 kinds of instructions" in done.out
    first = file.read_bytes()
    assert {"prompt", "request", "instruction_id_list", "kwargs"} <= set(json.loads(first.splitlines()[0]))
    again = kedge("data", "instructions", "--to", str(file), "--count", "30")
    assert again.code == 2
    assert file.read_bytes() == first


def test_a_kind_of_instruction_that_is_none_is_named(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("data", "instructions", "--to", str(tmp_path / "p.jsonl"), "--kind", "punctuation:no_coma")
    assert done.code == 2
    assert "did you mean 'punctuation:no_comma'" in done.err
    assert not (tmp_path / "p.jsonl").exists()
