"""Preferences on their way to a reward model: tokens, folds, held-out prompts, and weights against length bias."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from kedge.core.errors import DataError
from kedge.data.encoding.store import LazyRows
from kedge.data.examples import Message
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.reward.comparisons import EncodedComparison, fold, folds, length_controlled, read_comparisons
from kedge.stages.shared.encoding import Encoder
from kedge.stages.shared.held_out import hold_out

Write = Callable[[str, str], Path]
END = 258


def encoder(max_length: int = 200, *, refuse: bool = False) -> Encoder:
    return Encoder(tokenizer=tiny_tokenizer(), max_length=max_length, truncate="refuse" if refuse else "left")


def jsonl(*rows: Mapping[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def pair(number: int, chosen: str, rejected: str, **extra: object) -> dict[str, object]:
    return {"prompt": f"question {number}", "chosen": chosen, "rejected": rejected, **extra}


def pairs(write: Write, gaps: Sequence[int], *, use_margin: bool = False) -> LazyRows[EncodedComparison]:
    """Pairs whose chosen answer is so many tokens longer than the rejected one; one token is one byte here."""
    rows = [pair(i, "x" * (50 + gap), "y" * 50, margin=0.25) for i, gap in enumerate(gaps)]
    return read_comparisons([str(write("pairs.jsonl", jsonl(*rows)))], encoder(), use_margin=use_margin)


# Tokens


def test_an_answer_is_read_up_to_its_end_of_turn_token() -> None:
    found = encoder().tokens((Message("user", "Hi"),), (Message("assistant", "Yo."),))
    user, assistant = list(b"user\nHi"), list(b"assistant\nYo.")
    # The template writes a newline after the last turn, which is not part of what is scored.
    assert found == [257, *user, END, *b"\n", 257, *assistant, END]


def test_a_long_text_loses_its_beginning_and_never_its_end() -> None:
    prompt, answer = (Message("user", "Hi"),), (Message("assistant", "Yo."),)
    assert encoder(6).tokens(prompt, answer) == [*b"t\nYo.", END]
    assert len(encoder(200).tokens(prompt, answer)) == 25
    assert encoder(25, refuse=True).tokens(prompt, answer) == encoder(200).tokens(prompt, answer)
    with pytest.raises(DataError, match=r"a text of 25 tokens is longer than the window of 24"):
        encoder(24, refuse=True).tokens(prompt, answer)


def test_pairs_and_rankings_become_comparisons_with_their_own_facts(write: Write) -> None:
    helpful = write("helpful.jsonl", jsonl(pair(1, "good", "bad!!", margin=0.5), pair(2, "fine", "no")))
    ranking = {"prompt": "question 3", "answers": ["a", "bb", "ccc"], "rank": [2, 1, 2]}
    tied = {"prompt": "question 4", "answers": ["a", "b", "c"], "rank": [1, 1, 1]}
    harmless = write("harmless.jsonl", jsonl(ranking, tied))

    found = read_comparisons([str(helpful), str(harmless)], encoder(), use_margin=True, objectives=2)
    assert [one.ranked.objective for one in found] == [0, 0, 1]  # everything ties in the last ranking: left out
    assert [one.ranked.rank for one in found] == [(1, 2), (1, 2), (2, 1, 2)]
    assert [one.ranked.margin for one in found] == [0.5, 0.0, 0.0]
    assert [one.ranked.weight for one in found] == [1.0, 1.0, 1.0]
    assert [one.lengths for one in found] == [(4, 5), (4, 2), (1, 2, 3)]
    assert [one.where for one in found] == [f"{helpful}:1", f"{helpful}:2", f"{harmless}:1"]
    assert found[2].answer_texts == ("assistant: a", "assistant: bb", "assistant: ccc")
    assert [bytes(answer[-4:-1]) for answer in found[2].ranked.answers] == [b"t\na", b"\nbb", b"ccc"]

    of_one = read_comparisons([str(helpful), str(harmless)], encoder(), use_margin=True)
    assert [item.ranked.objective for item in of_one] == [0, 0, 0]
    assert [item.where for item in of_one] == [item.where for item in found]

    unasked = read_comparisons([str(helpful)], encoder(), use_margin=False)
    assert [one.ranked.margin for one in unasked] == [0.0, 0.0]
    assert [one.margin for one in unasked] == [0.5, None]  # the report shows it all the same


CERTAIN = (1.0, None, 0.75, 0.5, 0.25)


def certain(write: Write, **options: Any) -> LazyRows[EncodedComparison]:
    """Pairs of these certainties, and two answers on one rank."""
    rows = [pair(i, "good", "bad") | ({} if c is None else {"certainty": c}) for i, c in enumerate(CERTAIN)]
    tied = {"prompt": "question 5", "answers": ["a", "bb"], "rank": [1, 1]}
    files = [write("certain.jsonl", jsonl(*rows)), write("tied.jsonl", jsonl(tied, tied | {"rank": [2, 1]}))]
    return read_comparisons([str(file) for file in files], encoder(), use_margin=False, **options)


def test_soft_labels_have_the_certainty_of_their_pairs(write: Write) -> None:
    counts: list[int] = []
    items = certain(write, labels="soft", report_ties=counts.append)
    assert [item.ranked.certainty for item in items] == [1.0, 1.0, 0.75, 0.75, 1.0]
    assert counts == [2]
    # The likelier answer comes first, and what is known of the answers goes with it.
    assert [item.answer_texts[0] for item in items][2:] == ["assistant: good", "assistant: bad", "assistant: bb"]
    assert [item.lengths for item in items][2:] == [(4, 3), (3, 4), (2, 1)]
    assert {item.ranked.rank for item in items} == {(1, 2)}
    assert items.column("gap").tolist() == [1, 1, 1, -1, 1]


def test_hard_labels_believe_every_pair(write: Write) -> None:
    items = certain(write)
    assert [item.ranked.certainty for item in items] == [1.0] * 5
    assert not any(item.is_tie for item in items)


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_ties_count_half_where_asked(write: Write, labels: Literal["hard", "soft"]) -> None:
    counts: list[int] = []
    items = certain(write, labels=labels, ties="half", report_ties=counts.append)
    assert counts == [0]
    assert [item.is_tie for item in items] == [False, False, False, True, False, True, False]
    assert items.column("gap").tolist() == [1, 1, 1, 0, -1, 0, 1]
    balanced = length_controlled(items, "balance")
    assert [balanced[place].ranked.weight for place in (3, 5)] == [1.0, 1.0]


def test_nothing_but_ties_is_refused(write: Write) -> None:
    file = write("ties.jsonl", jsonl(pair(1, "a", "b", certainty=0.5), pair(2, "a", "b", certainty=0.5)))
    with pytest.raises(DataError, match="all 2 comparisons tie, so that there is nothing to prefer"):
        read_comparisons([str(file)], encoder(), use_margin=False)


def test_a_file_without_comparisons_is_refused(write: Write) -> None:
    file = write("demos.jsonl", jsonl({"prompt": "a question", "completion": "an answer"}))
    with pytest.raises(DataError, match="holds no pairs or rankings"):
        read_comparisons([str(file)], encoder(), use_margin=False)


# Parts


def many(write: Write) -> LazyRows[EncodedComparison]:
    """40 prompts with 3 pairs each."""
    rows = [pair(i % 40, f"good {i}", f"bad {i}") for i in range(120)]
    return read_comparisons([str(write("many.jsonl", jsonl(*rows)))], encoder(), use_margin=False)


def test_what_is_held_out_shares_no_prompt_with_the_rest(write: Write) -> None:
    items = many(write)
    train, held = hold_out(items, share=0.25, seed=1)
    assert (len(train), len(held)) == (90, 30)
    assert {one.prompt_key for one in train}.isdisjoint({one.prompt_key for one in held})
    assert sorted([*train, *held], key=lambda one: one.where) == sorted(items, key=lambda one: one.where)
    assert hold_out(items, share=0.25, seed=1) == (train, held)
    assert hold_out(items, share=0.25, seed=2) != (train, held)


def test_each_prompt_is_kept_from_exactly_one_member(write: Write) -> None:
    items = many(write)
    parts = [fold(items, member=member, members=3, seed=1) for member in range(3)]
    for one in items:
        assert sum(one in part for part in parts) == 2
    for part in parts:
        prompts = {one.prompt_key for one in part}
        assert len(part) == 3 * len(prompts)  # a prompt is in a part as a whole
        assert 15 < len(prompts) < 38
    assert fold(items, member=0, members=1, seed=1) == items
    for member, part in enumerate(parts):
        unseen = items.take(folds(items, members=3, seed=1) == member)
        assert sorted([*part, *unseen], key=lambda one: one.where) == sorted(items, key=lambda one: one.where)


# Length control


def test_balanced_weights_by_hand(write: Write) -> None:
    # Longer wins 3 times, loses once, one tie: both sorts shall weigh (3 + 1) / 2 = 2 in all, the tie 1.
    found = length_controlled(pairs(write, [5, 1, -3, 0, 20]), "balance")
    assert [one.ranked.weight for one in found] == pytest.approx([2 / 3, 2 / 3, 2.0, 1.0, 2 / 3])
    assert [one.ranked.margin for one in found] == [0.0] * 5


def test_a_part_of_the_balance(write: Write) -> None:
    # Longer wins 9 times and loses once. Half of log 9 is log 3: the loser weighs three times, and 9u + 3u = 10 in all.
    found = length_controlled(pairs(write, [5, 1, -3, 0, 20, 7, 2, 2, 9, 4, 1]), "balance", strength=0.5)
    assert [one.ranked.weight for one in found] == pytest.approx([5 / 6, 5 / 6, 5 / 2, 1.0, *[5 / 6] * 7])


def test_a_part_of_the_residual(write: Write) -> None:
    found = length_controlled(pairs(write, [6] * 7 + [-6] * 3), "residual", strength=0.25)
    expected = [-0.25 * math.log(7 / 3)] * 7 + [0.25 * math.log(7 / 3)] * 3
    assert [one.ranked.margin for one in found] == pytest.approx(expected, rel=1e-6)


def test_balance_needs_both_sorts(write: Write) -> None:
    with pytest.raises(DataError, match=r"the longer answer wins in 2 and loses in 0; use none or residual"):
        length_controlled(pairs(write, [5, 1]), "balance")


def test_no_control_changes_nothing(write: Write) -> None:
    items = pairs(write, [5, -1])
    assert length_controlled(items, "none") == items


def test_the_residual_margin_has_a_closed_form_for_one_gap(write: Write) -> None:
    # Seven of ten longer answers win by the same gap: P = σ(slope · asinh(6)) = 0.7, so slope · asinh(6) = log(7/3).
    items = pairs(write, [6] * 7 + [-6] * 3, use_margin=True)
    found = length_controlled(items, "residual")
    expected = [0.25 - math.log(7 / 3)] * 7 + [0.25 + math.log(7 / 3)] * 3
    assert [one.ranked.margin for one in found] == pytest.approx(expected, rel=1e-6)
    assert [one.ranked.weight for one in found] == [1.0] * 10


# Gaps of every size with a tendency, few that are huge and the other way round, and one sort alone in all but a pair.
GAPS = {
    "mixed": [1, 2, -1, 3, 30, -12, 7, 7, -2, 40, 1, 0],
    "a few huge ones the other way": [1] * 60 + [-45] * 9,
    "nearly all": [3, 9, 27, 40] * 6 + [-1],
}


@pytest.mark.parametrize("gaps", GAPS.values(), ids=GAPS.keys())
def test_the_residual_slope_is_the_most_likely_one(write: Write, gaps: list[int]) -> None:
    """Against a bisection of the slope of the log-likelihood, which falls as the slope of the length model grows."""

    def steepness(slope: float) -> float:
        return sum(math.asinh(gap) / (1 + math.exp(slope * math.asinh(gap))) for gap in gaps)

    low, high = -20.0, 20.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if steepness(middle) > 0 else (low, middle)
    found = length_controlled(pairs(write, gaps), "residual")
    expected = [-low * math.asinh(gap) for gap in gaps]
    assert [one.ranked.margin for one in found] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_rankings_are_left_alone_by_length_control(write: Write) -> None:
    ranking = {"prompt": "question 3", "answers": ["a", "bb", "ccc"], "rank": [2, 1, 3]}
    both = [write("p.jsonl", jsonl(pair(1, "xx", "y"), pair(2, "x", "yy"))), write("r.jsonl", jsonl(ranking))]
    items = read_comparisons([str(file) for file in both], encoder(), use_margin=False)
    for how in ("balance", "residual"):
        assert length_controlled(items, how)[2] == items[2]
