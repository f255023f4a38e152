"""The model of scale: each formula against arithmetic on paper, and what must hold whatever the rates are."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kedge.plan import scale
from kedge.plan.scale import Layout, Machine, Shape, Shares, Work

ROOT = Path(__file__).parents[2]
BOX = Machine(flops=1000, bandwidth=100, memory=1000, nvlink=10, network=1, gpus=4)
WHOLE = Shares(learn=1, read=1, decode=1, links=1)
TINY = Shape(parameters=10, layers=1, width=1, kv_width=1)
"""Caches of 4 bytes a token."""
ONE = Work(policy=TINY, answers=8, prompt_tokens=4, answer_tokens=6, recompute=False, rescored=False)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale_model", ROOT / "benchmarks/scale_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_reading_and_learning_count_operations() -> None:
    # a token: 2 × 10 + 4 × 1 × 1 × 10 / 2 = 40; 80 tokens on 2 GPUs at half the rate
    assert scale.read_seconds(TINY, 80, 10, BOX, 0.5, 2) == pytest.approx(80 * 40 / (2 * 1000 * 0.5))
    once = scale.read_seconds(TINY, 80, 10, BOX, 1, 2)
    assert scale.learn_seconds(ONE, TINY, BOX, 1, 2) == pytest.approx(3 * once)
    assert scale.learn_seconds(replace(ONE, recompute=True, epochs=2), TINY, BOX, 1, 2) == pytest.approx(8 * once)


def test_a_decoding_pass_takes_as_long_as_its_bytes_or_its_operations() -> None:
    layout = Layout(gpus=2)
    # an engine: 4 rows; prompts: 4 × 4 tokens × (20 + 4 × 4 / 2) = 448 operations
    # a pass: 2 × 10 + 4 × (4 + 3) × 4 = 132 bytes, 1.32 s; 4 × (20 + 4 × 14 / 2) = 192 operations, 0.192 s
    assert scale.generate_seconds(ONE, BOX, WHOLE, layout) == pytest.approx(0.448 + 6 * 1.32)
    slow = replace(BOX, flops=100.0)
    assert scale.generate_seconds(ONE, slow, WHOLE, layout) == pytest.approx(4.48 + 6 * 1.92)
    late = replace(WHOLE, token_s=0.5)
    assert scale.generate_seconds(ONE, BOX, late, layout) == pytest.approx(0.448 + 6 * 1.82)


def test_rows_that_have_no_room_come_in_waves() -> None:
    # room for 0.9 × 100 − 20 = 70 bytes beside the weights: one row of 40
    small = replace(BOX, memory=100.0)
    assert scale.rows_at_once(ONE, small, 1) == 1
    # four waves of one row: 20 + 28 = 48 bytes a pass
    assert scale.generate_seconds(ONE, small, WHOLE, Layout(gpus=2)) == pytest.approx(0.448 + 4 * 6 * 0.48)
    assert scale.sampler_bytes(ONE, small, Layout(gpus=2)) == 20 + 40


def test_an_engine_over_several_gpus_divides_bytes_and_adds_two_sums_a_layer() -> None:
    layout = Layout(gpus=2, tensor_parallel=2)
    # 8 rows: 20 + 8 × 28 = 244 bytes over 2 GPUs; sums of 2 × 8 × 2 = 32 bytes, once around by NVLink: 3.2 s
    prefill = 8 * 4 * 28 / 2000
    assert scale.generate_seconds(ONE, BOX, WHOLE, layout) == pytest.approx(prefill + 6 * (1.22 + 3.2))


def test_gradients_are_added_within_machines_and_then_between_them() -> None:
    # 40 bytes: 2 × 3/4 × 40 / 10 = 6 s within four, then 2 × 1/2 × 10 / 1 = 10 s between two machines
    def replicated(gpus: int) -> tuple[float, float]:
        return scale.exchange_seconds(ONE, TINY, BOX, WHOLE, Layout(gpus=gpus))

    assert replicated(1) == (0, 0)
    assert replicated(4) == (pytest.approx(6), 0)
    assert replicated(8) == (pytest.approx(16), 0)
    twice = replace(ONE, updates=2)
    assert scale.exchange_seconds(twice, TINY, BOX, WHOLE, Layout(gpus=4)) == (pytest.approx(12), 0)


def test_sharded_weights_travel_behind_computing_once_a_micro_batch() -> None:
    # weights twice (2 × 20) and gradients (40): 80 bytes a pass
    def exchanged(weights: scale.Weights, gpus: int, work: Work = ONE) -> tuple[float, float]:
        return scale.exchange_seconds(work, TINY, BOX, WHOLE, Layout(gpus=gpus, weights=weights))

    assert exchanged("shard", 4) == (0, pytest.approx(3 / 4 * 80 / 10))
    assert exchanged("shard", 8) == (0, pytest.approx(7 / 8 * 80 / 4))  # four network links of 1 are the narrow place
    assert exchanged("shard", 4, replace(ONE, row_tokens_at_once=10)) == (0, pytest.approx(2 * 6))
    # within machines of four, and a quarter of the gradients between the two
    assert exchanged("hsdp", 8) == (pytest.approx(2 * 1 / 2 * 10 / 1), pytest.approx(6))
    assert exchanged("hsdp", 4) == exchanged("shard", 4)


def test_turns_are_added_up_and_with_a_lag_the_longer_one_sets_the_pace() -> None:
    apart = Layout(gpus=4, engines="separate", samplers=2, weights="shard")
    inputs = (ONE, BOX, WHOLE)
    turns, at_once = scale.step(*inputs, apart), scale.step(*inputs, replace(apart, lag=1))
    learning = turns.judge + turns.learn
    assert turns.seconds == pytest.approx(turns.generate + turns.sync + learning)
    assert at_once.seconds == pytest.approx(max(turns.generate + turns.sync, learning))
    # half of the GPUs wait while the others work, and all wait for the weights
    assert turns.idle == pytest.approx(1 - 0.5 * (turns.generate + learning) / turns.seconds)
    assert at_once.idle < turns.idle
    shared = scale.step(*inputs, Layout(gpus=4, weights="shard"))
    assert shared.idle == pytest.approx(shared.sync / shared.seconds)
    assert turns.sync == pytest.approx(20 / 10)
    assert shared.sync == pytest.approx(20 / 100)


def test_memory_of_learners_by_how_weights_are_held() -> None:
    work = replace(ONE, frozen=(TINY,), row_tokens_at_once=10)
    activations = 34 * 10  # one layer without recompute
    assert scale.learner_bytes(work, BOX, Layout(gpus=8)) == 18 * 10 + 2 * 10 + activations
    # sharded: all of it divided, but for two copies of the layer at work
    assert scale.learner_bytes(work, BOX, Layout(gpus=8, weights="shard")) == (160 + 20) / 8 + 40 + activations
    assert scale.learner_bytes(work, BOX, Layout(gpus=8, weights="hsdp")) == (160 + 20) / 4 + 40 + activations
    deep = replace(TINY, layers=3)
    assert scale.activation_bytes(replace(work, recompute=True), deep) == 340 + 2 * 10 * 3
    assert scale.activation_bytes(work, deep) == 3 * 340


@pytest.mark.parametrize("weights", ["replicate", "shard", "hsdp"])
def test_twice_the_rates_take_half_the_time_and_more_gpus_never_more(weights: scale.Weights) -> None:
    shape = Shape(parameters=8e9, layers=32, width=4096, kv_width=1024)
    work = Work(policy=shape, critic=shape, frozen=(shape,), answers=4096, prompt_tokens=512, answer_tokens=512)
    machine = Machine(flops=8e14, bandwidth=4e12, memory=1.4e11, nvlink=4.5e11, network=5e10)
    rates = {name: 2 * getattr(machine, name) for name in ("flops", "bandwidth", "nvlink", "network")}
    before = float("inf")
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
        layout = Layout(gpus=gpus, weights=weights)
        seconds = scale.step(work, machine, WHOLE, layout).seconds
        assert scale.step(work, replace(machine, **rates), WHOLE, layout).seconds == pytest.approx(seconds / 2)
        assert seconds < before
        before = seconds


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="lag needs separate engines"):
        scale.step(ONE, BOX, WHOLE, Layout(gpus=4, lag=1))
    with pytest.raises(ValueError, match="leave 0 to learn"):
        scale.step(ONE, BOX, WHOLE, Layout(gpus=4, engines="separate", samplers=4))


def test_the_page_has_the_tables_that_the_script_prints(script: ModuleType) -> None:
    page = script.PAGE.read_text("utf-8")
    assert script.written(page, script.tables(script.H200, script.KEDGE)) == page
    assert "a model, not a measurement" in page


def test_the_words_of_the_page_are_those_of_its_table(script: ModuleType) -> None:
    """Within the table that three numbers were fitted on; of other systems the page says so too."""
    rows = script.published_rows()
    constants = script.fitted(rows)
    assert len([row for row in rows if row.is_fitted]) == 6
    tests = [row for row in rows if not row.is_fitted and not row.answers_known]
    assert script.typical_factor(tests, constants) < 1.25
    assert -0.5 < min(row.error(constants) for row in tests) < -0.4
    assert max(row.error(constants) for row in tests) < 0.5
    assert 1.8 < script.typical_factor([row for row in rows if row.answers_known], constants) < 2.2
    *_, larger = script.own_rows()
    assert larger.error(script.OURS) == pytest.approx(0.6, abs=0.05)
    small, large = (row for row in rows if row.who == "NeMo-Aligner")
    assert small.computed(constants) / large.computed(constants) < small.seconds / large.seconds
