"""The prompts of a PPO run: which come when, how many answers each gets, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.data.examples import Message, Origin, Prompt
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.rl.prompts import PromptDataset, fields_of, read_prompts

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
LETTERS = "abcdefg"


def book(folder: Path, *, seed: int = 3, batch: int = 3, answers: int = 1, max_tokens: int = 40) -> PromptDataset:
    file = folder / "letters.jsonl"
    rows = [{"prompt": f"Say {letter}", "answer": letter.upper(), "level": 2} for letter in LETTERS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(
        str(file),
        tiny_tokenizer(),
        batch=batch,
        answers=answers,
        max_tokens=max_tokens,
        seed=seed,
        set_aside=folder / "broken.jsonl",
    )


def asked(found: PromptDataset, start: int, end: int) -> list[str]:
    """The letters that are asked for, in order, by the tokens themselves."""
    decode = tiny_tokenizer().decode
    texts = [str(decode(list(row))) for batch in found.batches(start, end) for row in batch.tokens]
    assert all(text.startswith("<|im_start|>user\nSay ") for text in texts)
    return [text.removeprefix("<|im_start|>user\nSay ")[0] for text in texts]


def test_every_epoch_is_another_permutation_and_a_seed_gives_the_same_again(tmp_path: Path) -> None:
    order = asked(book(tmp_path), 0, 7)  # 21 prompts: three times through the seven
    epochs = [order[:7], order[7:14], order[14:]]
    assert all(sorted(epoch) == list(LETTERS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert asked(book(tmp_path), 0, 7) == order
    assert asked(book(tmp_path, seed=4), 0, 7) != order
    assert asked(book(tmp_path, batch=7), 0, 3) == order  # how they are cut changes nothing


def test_a_resumed_run_asks_what_the_other_would_have_asked(tmp_path: Path) -> None:
    found = book(tmp_path)
    assert asked(found, 4, 7) == asked(found, 0, 7)[12:]


def test_answers_to_a_prompt_share_a_group_and_a_prompt_that_comes_again_is_another_one(tmp_path: Path) -> None:
    found = book(tmp_path, answers=2, batch=7)
    first, second = found.batches(0, 2)
    assert list(first.group) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert list(second.group) == [number for number in range(7, 14) for _ in range(2)]
    letters = asked(found, 0, 1)
    assert letters[0::2] == letters[1::2]
    for group, letter in enumerate(letters[0::2]):
        case = found.case(group)
        assert case.prompt == (("user", f"Say {letter}"),)
        assert (case.solution, case.extra) == (letter.upper(), {"level": 2})


def test_prompts_that_are_too_long_are_refused_by_place(tmp_path: Path) -> None:
    # <|im_start|> user \n S a y _ a <|im_end|> \n <|im_start|> assistant \n, a byte a token
    length = 1 + 5 + 5 + 1 + 1 + 1 + 10
    assert book(tmp_path, max_tokens=length)
    with pytest.raises(DataError) as refused:
        book(tmp_path, max_tokens=length - 1)
    message = str(refused.value)
    assert f"7 of 7 prompts are longer than max_prompt_tokens {length - 1}; the longest has {length} (" in message
    assert f"(letters.jsonl:1); also letters.jsonl:2 ({length}), letters.jsonl:3 ({length})" in message
    assert f"raise it to {length}, shorten the prompts, or set too_long: drop (or cut)" in message


def test_prompts_that_are_dropped_are_not_asked_and_an_event_has_their_number(
    tmp_path: Path, run_ppo: RunPPO, records: Records
) -> None:
    rows = [{"prompt": "Say " + letter * count} for letter, count in (("a", 1), ("b", 60), ("c", 2), ("d", 70))]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"prompts": str(file), "max_prompt_tokens": 40, "iterations": 1, "batch": 4}
    home = run_ppo(tmp_path / "drop", **settings, too_long="drop", logging={"samples": 4})
    (event,) = [event for event in records(home / "events.jsonl") if event["code"] == "prompts.too_long"]
    assert event["evidence"] == {"count": 2, "total": 4}
    assert "2 of 4 prompts are longer than max_prompt_tokens 40; the longest has 93 (mixed.jsonl:4)" in event["message"]
    asked_letters = {sample["prompt"].partition("Say ")[2][0] for sample in records(home / "samples.jsonl")}
    assert asked_letters == {"a", "c"}


def test_a_file_without_prompts_is_refused(tmp_path: Path, run_ppo: RunPPO) -> None:
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match=r"none\.jsonl"):
        run_ppo(tmp_path, prompts=str(tmp_path / "none.jsonl"))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(tmp_path: Path, run_ppo: RunPPO) -> None:
    with pytest.raises(DataError, match=r"longer than the window of 1,024 less max_new_tokens 1,010, that is 14"):
        run_ppo(tmp_path, sampling={"max_new_tokens": 1010})


def test_several_answers_to_a_prompt_differ_and_are_the_same_however_they_are_batched(
    tmp_path: Path, run_ppo: RunPPO, records: Records
) -> None:
    settings = {"answers": 3, "batch": 2, "logging": {"samples": 6}, "iterations": 1}
    found = records(run_ppo(tmp_path / "a", **settings) / "samples.jsonl")
    prompts = [one["prompt"] for one in found]
    assert prompts == [prompts[0]] * 3 + [prompts[3]] * 3
    assert prompts[0] != prompts[3]
    assert len({one["answer"] for one in found}) == 6
    assert records(run_ppo(tmp_path / "b", **settings, memory={"generate_rows": 2}) / "samples.jsonl") == found
    greedy = records(run_ppo(tmp_path / "c", **settings, sampling={"top_k": 1}) / "samples.jsonl")
    assert [one["answer"] for one in greedy] == [greedy[0]["answer"]] * 3 + [greedy[3]["answer"]] * 3


def test_a_broken_prompt_is_set_aside_and_the_others_are_asked(tmp_path: Path) -> None:
    source, aside = tmp_path / "rows.jsonl", tmp_path / "aside.jsonl"
    good = [f"good {number}" for number in range(99)]
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in good) + "{not json\n")
    dataset = read_prompts(str(source), tiny_tokenizer(), batch=1, answers=1, max_tokens=50, seed=0, set_aside=aside)
    assert [prompt.prompt[-1].content for prompt in dataset.prompts] == good
    assert "{not json" in aside.read_text()


def test_a_reward_may_ask_for_the_solution_only_where_a_prompt_has_one() -> None:
    def prompt(answer: str | None, **extra: Any) -> Prompt:
        return Prompt(prompt=(Message("user", "?"),), answer=answer, extra=extra, origin=Origin("p.jsonl", 1))

    assert fields_of([prompt(None, level=2), prompt(None, source="a")]) == {"level", "source"}
    assert fields_of([prompt(None), prompt("4", level=2)]) == {"solution", "level"}


def balanced_book(folder: Path, *, balance: str, extra: dict[str, Any] | None = None) -> PromptDataset:
    file = folder / "languages.jsonl"
    rows = [{"prompt": f"Say {letter}", "language": "de" if letter in "ab" else "en"} for letter in LETTERS]
    file.write_text("".join(json.dumps(row | (extra or {})) + "\n" for row in rows))
    return read_prompts(
        str(file), tiny_tokenizer(), batch=4, answers=1, max_tokens=40, seed=3, set_aside=None, balance=balance
    )


def test_balanced_prompts_are_drawn_equally_often_from_each_group(tmp_path: Path) -> None:
    """Two of seven prompts are German: half of every batch is, and both come equally often."""
    order = asked(balanced_book(tmp_path, balance="language"), 0, 10)
    batches = [order[at : at + 4] for at in range(0, 40, 4)]
    assert all(sum(letter in "ab" for letter in batch) == 2 for batch in batches)
    assert order.count("a") == order.count("b") == 10
    assert {order.count(letter) for letter in "cdefg"} == {4}


def test_prompts_with_shares_of_their_own_are_not_balanced_again(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="have shares of their own already"):
        balanced_book(tmp_path, balance="language", extra={"mixture": {"part": 0, "share": 1.0}})
    with pytest.raises(DataError, match=r"no example has a field 'languages' \(did you mean 'language'\?\)"):
        balanced_book(tmp_path, balance="languages")
