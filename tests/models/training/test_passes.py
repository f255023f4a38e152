"""The size of passes: chosen by trial passes that leave no trace, halved when memory runs out, kept when resumed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import pytest
import torch
from torch import nn

from kedge.core.errors import ModelError
from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.heads import language_model
from kedge.models.forward.reader import compile_layers
from kedge.models.loading.tiny import tiny_model
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.passes import CPU_TOKENS, Gauge, InferenceSize, Passes, PassSize
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep, trained_weights
from kedge.runs.state import load_state, save_state

LENGTHS = [7, 900, 40, 350, 620, 5, 333, 81, 1200, 64, 512, 256]


@dataclass(frozen=True)
class Part:
    lengths: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def cut(size: PassSize) -> list[Part]:
    """Items by length, as many as fit."""
    parts: list[list[int]] = [[]]
    for length in sorted(LENGTHS, reverse=True):
        is_full = sum(parts[-1]) + length > size.tokens if size.tokens else len(parts[-1]) == size.rows
        if parts[-1] and is_full:
            parts.append([])
        parts[-1].append(length)
    return [Part(part) for part in parts]


class Card:
    """A device with `memory` tokens' worth of memory, `fixed` seconds a pass and `each` a token."""

    def __init__(self, *, memory: int, fixed: float = 1.0, each: float = 1e-3) -> None:
        self.memory, self.fixed, self.each = memory, fixed, each
        self.now, self.peak = 0.0, 0
        self.passes: list[int] = []
        self.draws: list[float] = []
        """A random number a pass, as dropout would take one."""

    def compute(self, tokens: int) -> None:
        self.passes.append(tokens)
        self.draws.append(torch.rand(()).item())
        if tokens > self.memory:
            raise torch.OutOfMemoryError(f"{tokens} tokens do not fit")
        self.peak = max(self.peak, tokens)
        self.now += self.fixed + self.each * tokens

    def seconds(self) -> float:
        return self.now

    def free_bytes(self) -> int:
        return self.memory - self.peak

    def release(self) -> None:
        self.peak = 0


Event = tuple[str, str, str]


def trainer(
    card: Card, *, asked: int | str = "auto", gauge: Gauge | None = None
) -> tuple[nn.Linear, Callable[[], dict[str, float]], TrainStep, list[Event]]:
    """A linear map that learns the lengths of items; every step computes on the card."""
    torch.manual_seed(5)
    module = nn.Linear(3, 1)
    events: list[Event] = []

    def sums(part: Part) -> Sums:
        card.compute(part.num_tokens)
        x = torch.tensor([[length / 100, 1.0, length**0.5 / 10] for length in part.lengths])
        return Sums(loss=(module(x) - 1).square().sum(), facts={})

    def note(level: str, code: str, message: str) -> None:
        events.append((level, code, message))

    passes = Passes(asked, report=note, gauge=lambda _: gauge)  # pyright: ignore[reportArgumentType]
    train_step = TrainStep(list(module.named_parameters()), OptimiserSettings(lr=1e-2), total_steps=10, passes=passes)
    objective: Objective[Part] = Objective(weight=lambda part: len(part.lengths), sums=sums)
    return module, lambda: train_step.learn(Term(objective=objective, batches=cut)), train_step, events


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def codes(events: list[Event]) -> list[str]:
    return [code for _, code, _ in events]


def test_without_a_gauge_auto_is_a_constant_number_of_tokens() -> None:
    _, learn, train_step, events = trainer(Card(memory=10**9))
    learn()
    assert train_step.passes.size == PassSize(tokens=CPU_TOKENS)
    assert events == [("info", "micro_batch.chosen", "passes of at most 2,048 tokens")]


def test_out_of_memory_halves_the_passes_and_the_run_has_the_same_numbers() -> None:
    plain, learn_plain, _, _ = trainer(Card(memory=10**9))
    tight, learn_tight, train_step, events = trainer(Card(memory=1300))
    expected = [learn_plain() for _ in range(4)]
    found = [learn_tight() for _ in range(4)]
    assert train_step.passes.size == PassSize(tokens=CPU_TOKENS // 2)
    assert codes(events) == ["micro_batch.chosen", "micro_batch.halved"]
    assert (
        events[-1][2] == "out of memory in passes of at most 2,048 tokens: the step is done again in passes of at "
        "most 1,024 tokens"
    )
    assert train_step.step == 4
    for with_room, without in zip(expected, found, strict=True):
        assert without == pytest.approx(with_room, rel=1e-6)
    for ours, theirs in zip(weights(tight), weights(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_number_of_rows_is_halved_too() -> None:
    _, learn, train_step, events = trainer(Card(memory=1300), asked=8)
    learn()
    assert train_step.passes.size == PassSize(rows=1)
    assert codes(events) == ["micro_batch.halved"] * 3


def test_an_item_that_does_not_fit_alone_is_an_error_that_says_what_to_set() -> None:
    module, learn, _, _ = trainer(Card(memory=1100))
    before = weights(module)
    with pytest.raises(ModelError, match=r"cannot be cut further: set memory\.recompute: true"):
        learn()
    assert all(map(torch.equal, weights(module), before))


def test_a_step_that_is_done_again_draws_the_same_random_numbers() -> None:
    card = Card(memory=1300)
    _, learn, _, _ = trainer(card)
    learn()
    # 1,200 fits, the next pass does not; then 1,200 again: all of the first attempt is repeated.
    assert card.passes[:3] == [1200, 2032, 1200]
    assert card.draws[2] == card.draws[0] != card.draws[1]


def test_the_moments_are_in_memory_before_the_first_pass() -> None:
    """So that the first update takes no memory that the passes were not measured against."""
    card = Card(memory=10**9)
    module, learn, train_step, _ = trainer(card)
    moments_of_pass: list[int] = []

    def compute(tokens: int) -> None:
        state = train_step.state()["optimiser"]["state"]
        moments_of_pass.append(
            sum(moments["exp_avg"].numel() + moments["exp_avg_sq"].numel() for moments in state.values())
        )

    card.compute = compute
    learn()
    assert set(moments_of_pass) == {2 * sum(parameter.numel() for parameter in module.parameters())}


def test_moments_that_do_not_fit_are_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(memory=10**9)
    module, learn, _, _ = trainer(card)
    before = weights(module)

    def no_room(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch, "zeros_like", no_room)
    with pytest.raises(ModelError, match=r"moments .* \(0.00 GiB\): .* adamw_8bit"):
        learn()
    assert card.passes == []
    assert all(map(torch.equal, weights(module), before))


def test_an_update_that_fails_half_way_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not done again with smaller passes, which would update a part of the weights twice."""
    card = Card(memory=10**9)
    module, learn, _, _ = trainer(card)
    learn()
    passes_before = len(card.passes)

    def half(optimiser: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            module.weight += 1
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    before = weights(module)
    with pytest.raises(
        ModelError, match=r"step 2: out of memory in the update itself.*Resume it from its last checkpoint"
    ):
        learn()
    assert len(card.passes) == 2 * passes_before
    assert torch.equal(weights(module)[0], before[0] + 1)  # once


def test_out_of_memory_in_the_norm_halves_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, learn, _, events = trainer(Card(memory=10**9))
    expected, learn_expected, _, _ = trainer(Card(memory=10**9))
    calls: list[int] = []
    total_norm = nn.utils.get_total_norm

    def norm(gradients: list[torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("planted")
        return total_norm(gradients)

    learn_expected()
    monkeypatch.setattr(nn.utils, "get_total_norm", norm)
    learn()
    assert codes(events) == ["micro_batch.chosen", "micro_batch.halved"]
    for ours, theirs in zip(weights(module), weights(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("card", "tokens"),
    [
        (Card(memory=10**9, fixed=0.0), 2048),  # the rate is the same at any size: the fewest tokens
        (Card(memory=10**9, fixed=50.0), 2 * 4368),  # each pass costs the same: the whole step, and longer ones
        (Card(memory=6000, fixed=50.0), 4787),  # as much longer as fits into 80 % of the memory that is left
        (Card(memory=4000, fixed=50.0), 2048),  # twice as many would not fit into 80 % of the free memory
    ],
)
def test_trial_passes_find_the_fewest_tokens_at_the_best_rate(card: Card, tokens: int) -> None:
    _, learn, train_step, events = trainer(card, gauge=card)
    learn()
    assert train_step.passes.size == PassSize(tokens=tokens)
    assert codes(events) == ["micro_batch.chosen"]


def test_the_last_trial_is_the_whole_step() -> None:
    """Of a step that eight passes do not divide, a rest of a few tokens would be a pass of its own."""
    card, step_tokens = Card(memory=10**9, fixed=50.0), 50_983
    passes = Passes(gauge=lambda _: card)

    def trial(size: PassSize) -> int:
        tokens = min(size.tokens or 0, step_tokens)
        card.compute(tokens)
        return tokens

    passes.choose(torch.device("cpu"), tokens_of=lambda size: equal_passes(step_tokens, size), trial=trial)
    assert card.passes[-1] == step_tokens
    assert passes.size is not None
    assert (passes.size.tokens or 0) >= step_tokens


def equal_passes(tokens: int, size: PassSize) -> list[int]:
    """Full ones and the rest."""
    most = min(size.tokens or 0, tokens)
    full, rest = divmod(tokens, most)
    return [most] * full + [rest] * (rest > 0)


@pytest.mark.parametrize("step_tokens", [2_060, 4_150, 8_300, 16_500])
def test_a_step_that_is_a_little_longer_than_a_trial_is_one_pass(step_tokens: int) -> None:
    """The rate of a pass of 4,096 tokens is the best, but a step of 4,150 would be two of them, and the second costs
    the host as much as the first."""
    card = Card(memory=10**9, fixed=1.0, each=1e-6)
    passes = Passes(gauge=lambda _: card)

    def trial(size: PassSize) -> int:
        tokens = min(size.tokens or 0, step_tokens)
        card.compute(tokens)
        return tokens

    passes.choose(torch.device("cpu"), tokens_of=lambda size: equal_passes(step_tokens, size), trial=trial)
    assert passes.size == PassSize(tokens=2 * step_tokens)


def test_trial_passes_leave_no_trace() -> None:
    card = Card(memory=10**9, fixed=50.0)
    probed, learn_probed, _, _ = trainer(card, gauge=card)
    plain, learn_plain, _, _ = trainer(Card(memory=10**9), asked=len(LENGTHS))
    torch.manual_seed(3)
    metrics = learn_probed()
    state = torch.get_rng_state()
    assert len(card.passes) > 1  # trials, and the step itself
    torch.manual_seed(3)
    assert metrics == learn_plain()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, weights(probed), weights(plain)))


def test_a_resumed_run_keeps_the_size_and_measures_nothing(tmp_path: Path) -> None:
    card = Card(memory=1300)
    _, learn, train_step, _ = trainer(card)
    learn()
    save_state(tmp_path, train_step.state())
    again = Card(memory=10**9)
    _, learn_again, resumed, events = trainer(again, gauge=again)
    resumed.load(load_state(tmp_path))
    learn_again()
    assert resumed.passes.size == train_step.passes.size == PassSize(tokens=CPU_TOKENS // 2)
    assert (events, len(again.passes)) == ([], len(cut(PassSize(tokens=CPU_TOKENS // 2))))


def test_a_number_that_is_set_for_the_resumed_run_counts(tmp_path: Path) -> None:
    _, learn, train_step, _ = trainer(Card(memory=1300))
    learn()
    save_state(tmp_path, train_step.state())
    _, _, resumed, _ = trainer(Card(memory=1300), asked=2)
    resumed.load(load_state(tmp_path))
    assert resumed.passes.size == PassSize(rows=2)


def test_without_gradients_tokens_are_halved_until_they_fit() -> None:
    card = Card(memory=1300)
    inference = InferenceSize(torch.device("cpu"))

    def compute(part: Part) -> int:
        card.compute(part.num_tokens)
        return part.num_tokens

    assert sum(inference.each(cut, compute)) == sum(LENGTHS)
    assert inference.size == PassSize(tokens=1024)
    assert max(inference.each(cut, compute)) <= 1300
    card.memory = 1100
    with pytest.raises(ModelError, match="single sequence"):
        inference.each(cut, compute)


def test_results_by_length_are_in_the_order_of_the_rows() -> None:
    lengths = [3, 900, 41, 5000, 900, 7]
    inference = InferenceSize(torch.device("cpu"))
    computed: list[list[int]] = []

    def compute(rows: list[int]) -> torch.Tensor:
        if sum(lengths[row] for row in rows) > 5000:
            raise torch.OutOfMemoryError("planted")
        computed.append(rows)
        return torch.tensor([[row, lengths[row]] for row in rows])

    assert inference.by_length(lengths, compute).tolist() == [[row, length] for row, length in enumerate(lengths)]
    assert computed == [[3], [1, 4, 2, 5, 0]]
    assert InferenceSize(torch.device("cpu"), 2).by_length([1, 1, 1], lambda rows: torch.tensor(rows)).tolist() == [
        0,
        1,
        2,
    ]


def losses_on_a_gpu(asked: int | Literal["auto"], *, spare: float | None) -> tuple[list[float], PassSize | None]:
    """The losses of four steps of 64 rows of a small Llama, where passes may take `spare` GiB beside weights and
    moments; and the size of the passes at the end."""
    model = tiny_model(hidden=512, layers=8).cuda()
    trained = trained_weights(model, dtype=torch.bfloat16)
    compile_layers(model)
    policy = language_model(model)
    passes = Passes(asked)
    learner = Learner(
        trained, policy.backbone, imitation(policy), OptimiserSettings(lr=1e-3), total_steps=4, passes=passes
    )
    rng = Random(0)
    tokens = [[rng.randrange(256) for _ in range(256)] for _ in range(64)]
    rows = [TokenSequence(tokens=row, counted=[True] * len(row)) for row in tokens]
    if spare is not None:
        torch.cuda.empty_cache()
        moments = sum(8 * master.numel() for master in trained.masters)
        held = torch.cuda.memory_reserved() + moments + spare * 2**30
        torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
    try:
        losses = [
            learner.update(lambda size: padded_batches(rows, rows=size.rows, tokens=size.tokens, pad=256))["loss"]
            for _ in range(4)
        ]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return losses, passes.size


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["auto", 64])
def test_a_step_that_does_not_fit_on_a_gpu_is_done_in_smaller_passes(asked: int | Literal["auto"]) -> None:
    plenty, all_rows = losses_on_a_gpu(asked, spare=None)
    gc.collect()
    torch.cuda.empty_cache()
    little, fewer = losses_on_a_gpu(asked, spare=0.8)
    if asked == 64:
        assert all_rows == PassSize(rows=64)
        assert fewer is not None
        assert (fewer.rows or 0) < 64
    assert little == pytest.approx(plenty, rel=1e-2)  # both are rounded to bfloat16
