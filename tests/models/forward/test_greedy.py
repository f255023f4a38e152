"""Greedy answers against the most likely token chosen by hand, one prompt at a time; and the model's mode after it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from kedge.models.forward.greedy import greedy
from kedge.models.forward.reader import evaluating
from kedge.models.loading.tiny import tiny_model

PROMPTS = [[70, 71, 72, 73, 74], [80], [90, 91, 92]]
PAD = 256


@torch.no_grad()
def by_hand(prompt: list[int], count: int) -> list[int]:
    model, tokens = tiny_model(hidden=32), list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_prompts_of_unequal_length_are_answered_as_if_alone() -> None:
    expected = [by_hand(prompt, 5) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert greedy(tiny_model(hidden=32), PROMPTS, max_new_tokens=5, stop=[258], pad=PAD) == expected


def test_an_answer_ends_before_its_stop_token() -> None:
    first, others = by_hand(PROMPTS[0], 5), [by_hand(prompt, 5) for prompt in PROMPTS[1:]]
    stop = first[2]
    expected = [answer[: answer.index(stop)] if stop in answer else answer for answer in (first, *others)]
    assert len(expected[0]) <= 2
    assert greedy(tiny_model(hidden=32), PROMPTS, max_new_tokens=5, stop=[stop], pad=PAD) == expected


@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_of_the_model_is_restored_also_after_an_error(is_training: bool) -> None:
    model = tiny_model(hidden=32).train(is_training)
    greedy(model, PROMPTS, max_new_tokens=1, stop=[258], pad=PAD)
    assert {module.training for module in model.modules()} == {is_training}
    modes: list[bool] = []
    with suppress(ZeroDivisionError), evaluating(model):
        modes.append(model.training)
        raise ZeroDivisionError
    assert modes == [False]
    assert {module.training for module in model.modules()} == {is_training}
