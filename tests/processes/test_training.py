"""Optimiser steps, roles, scores and samples by several processes: what one process computes, and alike on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import training
from tests.processes.pool import Pool
from torch import Tensor
from torch.testing import assert_close

from kedge.core.world import ALONE
from kedge.testing.contracts.roles import assert_same_state, tiny_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


def assert_near(value: Any, expected: Any, *, within: float = 1e-5, path: str = "") -> None:
    """Numbers and tensors in nested dicts and lists; everything else is equal."""
    if isinstance(expected, dict):
        assert list(value) == list(expected), path
        for key in expected:
            assert_near(value[key], expected[key], within=within, path=f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(value) == len(expected), path
        for index, item in enumerate(expected):
            assert_near(value[index], item, within=within, path=f"{path}[{index}]")
    elif isinstance(expected, Tensor | float):
        found, wanted = torch.as_tensor(value), torch.as_tensor(expected)
        assert_close(found, wanted, rtol=within, atol=within, msg=lambda text: f"{path}: {text}", equal_nan=True)
    else:
        assert value == expected, path


def together(pool: Pool, function: Any, *arguments: Any, size: int = 2) -> Any:
    """What all processes give, to the last bit."""
    first, *others = pool.run(function, *arguments, size=size)
    for other in others:
        assert_same_state(other, first)
    return first


@pytest.mark.parametrize("case", training.ROLES)
@pytest.mark.parametrize("way", training.BUILDERS)
def test_roles_learn_what_one_process_would(pool: Pool, base: Path, way: str, case: str) -> None:
    expected = training.train_roles(ALONE, way, base, case)
    for size in (2, 3) if (way, case) == ("separate", "uneven rows") else (2,):
        assert_near(together(pool, training.train_roles, way, base, case, size=size), expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("asked", [1, 3, "auto"])
@pytest.mark.parametrize("numbers", [[2, 7, 4, 9, 6], [3], [9, 1]], ids=str)
def test_a_step_is_that_of_one_process_however_few_passes_there_are(
    pool: Pool, numbers: list[int], asked: Any, size: int
) -> None:
    expected = training.learn_toy(ALONE, numbers, asked)
    found = together(pool, training.learn_toy, numbers, asked, size=size)
    assert_near(found, expected)
    assert torch.equal(found["weights"]["none"], torch.full((2, 2), 0.5)), "a weight without gradient has decayed"


@pytest.mark.parametrize("poison", [9, 2])
def test_what_is_no_number_on_one_process_is_refused_by_all(pool: Pool, poison: int) -> None:
    shares = pool.run(training.refuse, poison)
    assert sum(poison in share.pop("computed") for share in shares) == 1, "all of them computed the bad row"
    assert shares[0] == shares[1]
    assert shares[0]["error"] == "NumericsError: step 1: the loss is nan; the weights are unchanged"
    assert shares[0]["unchanged"]
    assert shares[0]["step"] == 2


@pytest.mark.parametrize(("rank", "most", "inference"), [(0, 12, "1 row"), (1, 9, "2 rows")])
def test_out_of_memory_on_one_process_halves_the_passes_of_all(
    pool: Pool, rank: int, most: int, inference: str
) -> None:
    found = together(pool, training.run_out_of_memory, rank, most)
    assert found["size"] == "passes of at most 1 row"
    assert found["events"] == ["micro_batch.halved", "micro_batch.halved"]
    assert found["inference"] == f"passes of at most {inference}"
    assert found["result"].tolist() == [2 * row for row in range(8)]
    assert_near(found["weights"], training.run_out_of_memory(ALONE, 0, 99)["weights"])


def test_processes_have_random_numbers_of_their_own_within_a_step_alone(pool: Pool) -> None:
    first, second = pool.run(training.draw_dropout)
    assert len({*first["drawn"], *second["drawn"]}) == len(first["drawn"]) + len(second["drawn"])
    assert torch.equal(first["after"], second["after"])
    assert pool.run(training.draw_dropout)[1]["drawn"] == second["drawn"]


def test_gradients_in_bfloat16_are_added_in_float32(pool: Pool) -> None:
    both, of_first, of_nobody = together(pool, training.add_up_narrow)
    assert both.tolist() == [2 + 3 * 2**-7] * 3  # bfloat16 has no such number
    assert of_first.tolist() == [1.0] * 3
    assert of_nobody is None


@pytest.mark.parametrize("prompts", ["aabbccd", "aaaa", "abab"])
def test_an_answer_is_judged_once_beside_the_others_to_its_prompt(pool: Pool, prompts: str) -> None:
    expected = training.judge_together(ALONE, prompts)
    shares = pool.run(training.judge_together, prompts)
    asked = [share.pop("asked") for share in shares]
    assert sorted(asked[0] + asked[1]) == sorted(expected.pop("asked"))
    assert not {prompts[int(row)] for row in asked[0]} & {prompts[int(row)] for row in asked[1]}
    assert shares == [expected, expected]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_source_that_refuses_on_one_process_is_refused_by_all(pool: Pool, rank: int) -> None:
    assert together(pool, training.judge_refuses, rank) == f"refused by {rank}"


@pytest.mark.parametrize(("prompts", "answers", "size"), [(5, 2, 2), (1, 1, 3), (3, 4, 3)])
def test_the_sampled_tokens_are_those_of_one_process(
    pool: Pool, base: Path, prompts: int, answers: int, size: int
) -> None:
    *expected, logp_BT = training.sample(ALONE, base, prompts, answers)
    *found, found_BT = together(pool, training.sample, base, prompts, answers, size=size)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert_close(found_BT, logp_BT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("late", [0, 2])
def test_who_comes_early_to_a_meeting_waits_and_who_comes_late_is_busy(pool: Pool, late: int) -> None:
    spent = together(pool, training.spend_time, late, 0.5, size=3)
    assert len(spent) == 3
    for rank, process in enumerate(spent):
        assert process.communicating > 0, spent
        if rank != late:  # a busy machine adds to both sides
            assert process.busy < spent[late].busy - 0.25, spent
            assert process.waiting > spent[late].waiting + 0.25, spent
    assert training.spend_time(ALONE, 0, 0.0) == []


def test_shares_are_of_different_processes(pool: Pool) -> None:
    ids = pool.run(training.process_id, size=3)
    assert [(rank, size) for _, rank, size in ids] == [(0, 3), (1, 3), (2, 3)]
    assert len({pid for pid, _, _ in ids}) == 3
