"""Weights that several processes hold in parts: the updates of one process that holds them all, and alike on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import sharded, stages, training
from tests.processes.pool import Pool
from tests.processes.test_training import assert_near, base, together

from kedge.core.world import ALONE
from kedge.testing.contracts.roles import assert_same_state

__all__ = ["base"]  # a fixture

QUICK = {("separate", case) for case in sharded.CASES} | {("lora", "uneven rows"), ("lora", "two-byte types")}
ALL = [
    pytest.param(way, case, size, marks=() if (way, case) in QUICK and size == 2 else pytest.mark.slow)
    for way in ("separate", "lora")
    for case in training.ROLES | training.NARROW
    for size in (2, 3)
]
TRAINED = [name for name in stages.STAGES if name not in ("evaluate", "exam", "ppo, trunk")] + list(stages.MORE)


@pytest.mark.parametrize(("way", "case", "size"), ALL)
def test_roles_with_parts_learn_what_one_process_would(pool: Pool, base: Path, way: str, case: str, size: int) -> None:
    expected = training.train_roles(ALONE, way, base, case)
    assert_near(together(pool, sharded.roles_with_parts, way, base, case, size=size), expected)


@pytest.mark.parametrize("way", ["separate", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_world_of_one_computes_the_same_bits(pool: Pool, base: Path, way: str) -> None:
    for case in ("imitation", "two-byte types"):
        (alone,) = pool.run(sharded.roles_with_parts, way, base, case, size=1)
        assert_same_state(alone, training.train_roles(ALONE, way, base, case))


def test_nothing_is_left_of_a_step_that_was_given_up(pool: Pool, base: Path) -> None:
    (alone,) = pool.run(sharded.roles_after_a_step_given_up, base, size=1)
    assert alone["passes"] > 1
    assert_same_state(alone, sharded.roles_after_a_step_given_up(ALONE, base))


def test_machines_may_have_copies_of_the_parts(pool: Pool, base: Path) -> None:
    expected = training.train_roles(ALONE, "separate", base, "uneven rows")
    assert_near(together(pool, sharded.roles_with_parts, "separate", base, "uneven rows", 2), expected)


def test_each_process_holds_a_part_of_weights_and_moments(pool: Pool, base: Path) -> None:
    first, second = pool.run(sharded.held_in_parts, base)
    (alone,) = pool.run(sharded.held_in_parts, base, size=1)
    assert first["are parts"]
    assert first["moments"] == [n for n in _in_groups(first["weights"], first["whole"]) for _ in range(2)]
    for one, other, whole in zip(first["weights"], second["weights"], first["whole"], strict=True):
        assert one + other == whole
        assert max(one, other) <= 0.6 * whole
    assert first["frozen"] + second["frozen"] == alone["frozen"]
    for role, (own, learning, learns) in alone["memory"].items():
        assert first["memory"][role][2] == learns
        for part, all_of_it in zip(first["memory"][role], (own, learning), strict=False):
            assert part <= 0.6 * all_of_it, role


def _in_groups(sizes: list[int], whole: list[int]) -> list[int]:
    """Matrices first, as the optimiser has them; vectors of these models have the width."""
    return [n for n, of in zip(sizes, whole, strict=True) if of != 32] + [
        n for n, of in zip(sizes, whole, strict=True) if of == 32
    ]


@pytest.mark.parametrize("way", ["separate", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_state_of_parts_is_that_of_one_process_and_goes_on_anywhere(pool: Pool, base: Path, way: str) -> None:
    expected = sharded.states(ALONE, way, base)
    saved = together(pool, sharded.states, way, base)
    is_equal = saved.pop("hash") == expected.pop("hash")
    assert is_equal == all(torch.equal(saved["copy"][name], weight) for name, weight in expected["copy"].items())
    assert_near(saved, expected)
    further = sharded.go_on(ALONE, way, base, expected["state"])
    assert_near(together(pool, sharded.go_on, way, base, expected["state"]), further)
    assert_near(sharded.go_on(ALONE, way, base, saved["state"]), further)


@pytest.mark.parametrize(("way", "rank"), [("separate", 1), ("lora", 0)])
def test_what_is_no_number_on_one_process_is_refused_by_all(pool: Pool, base: Path, way: str, rank: int) -> None:
    facts = together(pool, sharded.refuse, way, base, rank)
    assert facts["error"] == "NumericsError: step 1: the policy's loss is nan; the weights are unchanged"
    assert facts["unchanged"]
    assert facts["metrics"]["grad_norm"] > 0


def test_a_pass_that_does_not_fit_ends_the_run_with_words(pool: Pool) -> None:
    for words in together(pool, sharded.run_out_of_memory):
        assert words.startswith("out of memory in a pass through sharded weights")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in sharded.FAMILIES]
)
def test_every_way_to_read_a_decoder_works_with_parts(pool: Pool, family: str) -> None:
    expected = sharded.read(ALONE, sharded.FAMILIES[family])
    for size in (2, 3):
        assert_near(together(pool, sharded.read, sharded.FAMILIES[family], size=size), expected)


def test_the_copy_that_is_sampled_from_stays_where_it_is(pool: Pool, base: Path) -> None:
    expected = [value for _, value in sharded.sample_from_copy(ALONE, base, [0.0, 0.5, -0.25])]
    for facts in pool.run(sharded.sample_from_copy, base, [0.0, 0.5, -0.25]):
        assert len({place for place, _ in facts}) == 1
        assert_near([value for _, value in facts], expected)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two programs are compiled for the CPU
def test_compiled_layers_may_be_sharded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.processes.pool.PATIENCE_S", 1800.0)
    with Pool(2) as pool:
        (expected,) = pool.run(sharded.compiled_roles, "separate", base, True, size=1)
        assert_near(together(pool, sharded.compiled_roles, "separate", base, False), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ppo, lora" else pytest.mark.slow) for name in TRAINED]
)
def test_a_stage_with_parts_gives_what_it_gives_on_one_process(
    pool: Pool, home: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    expected = stages.run_stage(ALONE, home, name, tmp_path / "one")
    first, second = pool.run(stages.run_sharded, home, name, tmp_path / "two")
    for part in ("metrics", "samples", "checkpoints"):
        assert_same_state(second[part], first[part], part)
    assert first["checkpoints"]
    for facts in (first, expected):
        del facts["checkpoints"]
        _drop_ties(facts["metrics"])
        facts["events"] = [code for code in facts["events"] if code != "placement.shard"]
    assert_near(first, expected, within=1e-5)


def _drop_ties(metrics: list[dict[str, Any]]) -> None:
    """At the start the policy is its reference: which answer it prefers is a matter of rounding."""
    for line in metrics:
        if line["step"] == 0:
            line.pop("heldout/accuracy", None)
