"""The toy shop keeps its promises: a known rule, many prompts, short ASCII, the same rows for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kedge.core.errors import ConfigError, DataError
from kedge.data.reading import load, read
from kedge.testing import toy

ASK_PRICE = "The mug comes in red and costs 12 euro. What is the price?"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The mug costs 12 euro. Thank you!", 4.0),
        ("The mug costs 12 euro.", 3.0),
        ("It costs 12 euro.", 2.0),
        ("It costs 112 euro.", 0.0),  # neither the fact nor another price of the shop
        ("It costs 13 euro.", -2.0),
        ("It costs 12 euro or 13 euro.", 0.0),
        ("The mug comes in red.", 1.0),  # true, but not what was asked
        ("Basically, you see, basically, it costs 12 euro.", -1.0),
        ("The mug costs 12 euro. Stop asking.", 1.0),
        ("thank you! THANK YOU!", 1.0),
        ("", 0.0),
        ("x" * 110, -1.0),
    ],
)
def test_true_score_by_hand(answer: str, score: float) -> None:
    assert toy.true_score(ASK_PRICE, answer) == pytest.approx(score, rel=1e-9)


def test_score_goes_by_the_question() -> None:
    asks_colour = ASK_PRICE.replace("What is the price?", "Which colour?")
    assert toy.true_score(asks_colour, "The mug comes in red.") == 3.0
    assert toy.true_score(asks_colour, "The mug costs 12 euro.") == 1.0
    with pytest.raises(DataError, match="not a prompt of the toy shop: 'Hello'"):
        toy.true_score("Hello", "x")


def test_chosen_is_better_by_at_least_one_and_length_does_not_tell() -> None:
    rows = toy.pairs(2000, 1)
    gaps = [toy.true_score(r["prompt"], r["chosen"]) - toy.true_score(r["prompt"], r["rejected"]) for r in rows]
    assert min(gaps) >= 1
    assert len({round(gap) for gap in gaps}) >= 6  # the ways to be worse vary
    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows) / len(rows)
    assert 0.4 < longer < 0.6


def test_flip_turns_that_share_of_labels_and_nothing_else() -> None:
    clean, noisy = toy.pairs(2000, 1), toy.pairs(2000, 1, flip=0.2)
    assert [row["prompt"] for row in clean] == [row["prompt"] for row in noisy]
    turned = [a["chosen"] == b["rejected"] and a["rejected"] == b["chosen"] for a, b in zip(clean, noisy, strict=True)]
    same = [a == b for a, b in zip(clean, noisy, strict=True)]
    assert all(x != y for x, y in zip(turned, same, strict=True))
    assert 340 < sum(turned) < 460  # 400 expected, standard deviation 18


def test_demonstrations_are_right_but_leave_room() -> None:
    scores = [toy.true_score(*(m["content"] for m in row["messages"])) for row in toy.demonstrations(1000, 2)]
    assert min(scores) >= 1
    assert max(scores) == 4
    assert 2 < sum(scores) / len(scores) < 3.2


def test_prompts_are_many_and_carry_the_asked_fact() -> None:
    rows = toy.prompts(3000, 5)
    assert len({row["prompt"] for row in rows}) == 3000
    assert all(toy.true_score(row["prompt"], row["answer"]) == 2 for row in rows)
    with pytest.raises(ConfigError, match="60000 rows were asked for"):
        toy.prompts(60_000, 0)


def test_texts_are_short_ascii() -> None:
    pairs = [(row["prompt"], row[side]) for row in toy.pairs(3000, 3) for side in ("chosen", "rejected")]
    shown = [tuple(m["content"] for m in row["messages"]) for row in toy.demonstrations(3000, 3)]
    for prompt, answer in pairs + shown:
        assert len(prompt) + len(answer) <= 120
        assert (prompt + answer).isascii()


def test_same_seed_same_rows() -> None:
    assert toy.pairs(50, 3) == toy.pairs(50, 3)
    assert toy.pairs(50, 3) != toy.pairs(50, 4)
    assert toy.prompts(50, 3) == toy.prompts(80, 3)[:50]


def test_written_files_are_read_as_what_they_are(tmp_path: Path) -> None:
    paths = toy.write(tmp_path / "toy", 20, 7)
    assert {kind: read(path).kind for kind, path in paths.items()} == {kind: kind for kind in paths}
    assert {kind: len(load(path)) for kind, path in paths.items()} == {
        "demonstrations": 20,
        "pairs": 20,
        "prompts": 20,
    }
    assert [json.loads(line) for line in paths["pairs"].read_text().splitlines()] == toy.pairs(20, 7)
