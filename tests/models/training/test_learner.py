"""One optimiser step: clipped, refused where it is not finite, continued to the last bit, kept to what is trainable."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.batches import Batch
from kedge.core.errors import CheckpointError, NumericsError
from kedge.core.files import hash_folder
from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.heads import language_model
from kedge.models.forward.lora import with_lora
from kedge.models.loading.start import start_causal
from kedge.models.loading.tiny import make_tiny, tiny_model
from kedge.models.settings import LoraSettings
from kedge.models.training.learner import Learner, Objective, Sums
from kedge.models.training.objectives import imitation
from kedge.models.training.passes import WHOLE_STEP, Cut
from kedge.models.training.train_step import learning_rate, trained_weights
from kedge.runs.state import load_state, save_state

T = TypeVar("T")


def batches(seed: int, *, rows: int = 2) -> Cut[Batch]:
    rng = Random(seed)
    rows_of_tokens = [[rng.randrange(256) for _ in range(rng.randrange(3, 12))] for _ in range(5)]
    sequences = [TokenSequence(tokens=tokens, counted=[True] * len(tokens)) for tokens in rows_of_tokens]
    return lambda _: padded_batches(sequences, rows=rows, pad=256)


def causal_learner(**settings: float) -> Learner[Batch]:
    model = tiny_model(hidden=32, layers=1)
    optimiser = OptimiserSettings.model_validate({"lr": 1e-2, **settings})
    return imitator(model, optimiser, total_steps=20)


def imitator(model: PreTrainedModel, optimiser: OptimiserSettings, *, total_steps: int) -> Learner[Batch]:
    policy = language_model(model)
    return Learner(trained_weights(model), policy.backbone, imitation(policy), optimiser, total_steps=total_steps)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


# A step by hand: one matrix and one bias, loss = items · (3·matrix + 4·bias)², so that every number is on paper.


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([-1.0], dtype=torch.float64))


class NoBackbone:
    """For an objective that computes without one."""

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, read_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def computing(self, compute: Callable[[], T]) -> T:
        return compute()

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        raise NotImplementedError


def linear(module: Two) -> Objective[float]:
    """A batch is its number of items; each item pulls on 3·matrix + 4·bias."""

    def sums(items: float) -> Sums:
        value = 3 * module.matrix.sum() + 4 * module.bias.sum()
        return Sums(loss=items * value, facts={"value": items * value})

    return Objective(weight=lambda items: items, sums=sums)


def hand_learner(**settings: object) -> tuple[Two, Learner[float]]:
    module = Two()
    optimiser = OptimiserSettings.model_validate({"lr": 0.1, "schedule": "constant", "warmup": 0.0, **settings})
    return module, Learner(trained_weights(module), NoBackbone(), linear(module), optimiser, total_steps=4)


def test_a_step_of_adam_by_hand() -> None:
    module, learner = hand_learner(clip=1e9)
    metrics = learner.update(lambda _: [1.0, 2.5])
    # Means: 3·2 − 4 = 2. Gradient (3, 4) has norm 5. Adam's first step moves every weight by lr against its sign.
    assert metrics == pytest.approx({"loss": 2.0, "value": 2.0, "grad_norm": 5.0, "lr": 0.1})
    assert (module.matrix.item(), module.bias.item()) == pytest.approx((1.9, -1.1), rel=1e-7)


def test_weight_decay_pulls_on_matrices_only() -> None:
    module, learner = hand_learner(clip=1e9, weight_decay=0.5)
    learner.update(lambda _: [1.0])
    # Decoupled: 2 · (1 − 0.1 · 0.5) − 0.1; the bias as before.
    assert (module.matrix.item(), module.bias.item()) == pytest.approx((1.8, -1.1), rel=1e-7)


def test_a_gradient_longer_than_clip_is_scaled_down_to_it_and_told_as_it_was() -> None:
    module, learner = hand_learner(clip=0.5)
    assert learner.update(lambda _: [2.0])["grad_norm"] == pytest.approx(5.0)
    assert module.matrix.grad is not None
    assert module.bias.grad is not None
    assert (module.matrix.grad.item(), module.bias.grad.item()) == pytest.approx((0.3, 0.4), rel=1e-5)
    shorter, learner = hand_learner(clip=6.0)
    learner.update(lambda _: [2.0])
    assert shorter.matrix.grad is not None
    assert shorter.matrix.grad.item() == 3.0


def test_the_rate_follows_the_schedule_and_the_step_counts() -> None:
    learner = causal_learner(warmup=0.5)
    rates = [learner.update(batches(seed))["lr"] for seed in range(3)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3])
    assert learner.step == 3
    assert learning_rate(learner.train_step.settings, 10, 20) == 1e-2


# Refusing


def poisoned(module: Two, *, where: str) -> Objective[float]:
    """A loss or the gradient of one weight is not finite."""

    def sums(items: float) -> Sums:
        value = 3 * module.matrix.sum() + 4 * module.bias.sum()
        if where == "loss":
            value = value * torch.tensor(float("nan"))
        if where == "bias":
            # √ at 0: a finite value with an infinite slope
            value = value + (module.bias + 1.0).sqrt().sum()
        return Sums(loss=items * value, facts={})

    return Objective(weight=lambda items: items, sums=sums)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("loss", r"step 2: the loss is nan; the weights are unchanged"),
        ("bias", r"step 2: the gradient of bias is not finite; the weights are unchanged"),
    ],
)
def test_a_step_that_is_not_finite_is_refused_by_name_and_counted(where: str, message: str) -> None:
    module, learner = hand_learner(lr=1e-300)
    learner.update(lambda _: [1.0])
    before, moments = weights(module), copy.deepcopy(learner.state()["optimiser"])
    good, learner.objective = learner.objective, poisoned(module, where=where)
    with pytest.raises(NumericsError, match=message):
        learner.update(lambda _: [1.0])
    assert_same(weights(module), before)
    assert learner.step == 2
    assert str(learner.state()["optimiser"]["state"]) == str(moments["state"])
    learner.objective = good
    learner.train_step.settings = learner.train_step.settings.model_copy(update={"lr": 0.1})
    assert learner.update(lambda _: [1.0])["grad_norm"] == pytest.approx(5.0)  # nothing of the bad gradient is left
    assert not torch.equal(module.matrix, before["matrix"])


def test_a_step_in_which_nothing_counts_is_refused() -> None:
    learner = causal_learner()
    nothing = padded_batches([TokenSequence(tokens=[1, 2, 3], counted=[False] * 3)], rows=1, pad=256)
    before = weights(learner.trained.module)
    with pytest.raises(NumericsError, match=r"step 1: nothing in it counts \(weight 0\); the weights are unchanged"):
        learner.update(lambda _: nothing)
    assert_same(weights(learner.trained.module), before)


# Going on


def test_a_learner_goes_on_from_its_state_to_the_last_bit(tmp_path: Path) -> None:
    whole, first = causal_learner(weight_decay=0.1), causal_learner(weight_decay=0.1)
    expected = [whole.update(batches(seed)) for seed in range(6)]
    metrics = [first.update(batches(seed)) for seed in range(3)]
    save_state(tmp_path, first.state())

    second = causal_learner(weight_decay=0.1)
    second.update(batches(99))  # whatever it was before
    second.load(load_state(tmp_path))
    assert second.step == 3
    metrics += [second.update(batches(seed)) for seed in range(3, 6)]
    assert metrics == expected
    assert_same(weights(second.trained.module), weights(whole.trained.module))


def test_a_state_of_other_weights_is_refused() -> None:
    _, learner = hand_learner()
    with pytest.raises(CheckpointError, match="other trainable weights than the model has"):
        learner.load(causal_learner().state())


def test_measuring_changes_nothing_and_is_the_mean_over_everything() -> None:
    learner = causal_learner()
    learner.update(batches(1))
    before, moments = weights(learner.trained.module), str(learner.state()["optimiser"])
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in learner.trained.module.named_parameters()
        if parameter.grad is not None
    }
    state = torch.get_rng_state()

    metrics = learner.measure(batches(2))
    assert_same(weights(learner.trained.module), before)
    assert str(learner.state()["optimiser"]) == moments
    assert learner.step == 1
    assert torch.equal(torch.get_rng_state(), state)
    after = {
        name: parameter.grad
        for name, parameter in learner.trained.module.named_parameters()
        if parameter.grad is not None
    }
    assert_same(after, gradients)
    # Cut otherwise it is the same, and it is the loss that a step on the same batches would begin with.
    assert learner.measure(batches(2, rows=1)) == pytest.approx(metrics, rel=1e-5)
    assert learner.update(batches(2))["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


# Adapters


def test_a_learner_over_adapters_trains_them_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "base", hidden=32, layers=1)
    content = hash_folder(folder)
    model = start_causal(str(folder), lora=LoraSettings(rank=2), device="cpu", seed=4)
    before = weights(model)
    learner = imitator(model, OptimiserSettings(lr=1e-2), total_steps=3)
    for seed in range(3):
        learner.update(batches(seed))
    changed = {name for name, weight in weights(model).items() if not torch.equal(weight, before[name])}
    adapters = {name for name in before if name.endswith((".lora_A.policy", ".lora_B.policy"))}
    assert changed == adapters
    assert len(adapters) == 14  # A and B of seven matrices in one layer
    assert learner.state()["weights"].keys() == adapters
    assert hash_folder(folder) == content


def test_dropout_is_on_in_a_step_and_off_in_a_measurement() -> None:
    torch.manual_seed(3)
    model = with_lora(tiny_model(hidden=32, layers=1), LoraSettings(rank=4, dropout=0.5), name="policy", seed=1)
    learner = imitator(model, OptimiserSettings(lr=1e-2), total_steps=3)
    learner.update(batches(1))  # B is no longer zero, so that dropout on the way to A can be seen
    held_out = batches(2)
    first, again = learner.measure(held_out), learner.measure(held_out)
    assert first == again
    assert learner.update(held_out)["loss"] != pytest.approx(first["loss"], rel=1e-5)


def test_a_large_held_out_set_is_in_memory_one_pass_at_a_time() -> None:
    """And measures the same as with all of it laid out."""
    learner = causal_learner()
    sums, alive, most = learner.objective.sums, list[weakref.ref[Tensor]](), 0

    def counted(batch: Batch) -> Sums:
        nonlocal most
        alive.append(weakref.ref(batch.tokens_BT))
        most = max(most, sum(of_pass() is not None for of_pass in alive))
        return sums(batch)

    learner.objective = replace(learner.objective, sums=counted)
    laid_out = list(batches(3, rows=1)(WHOLE_STEP))
    expected = learner.measure(lambda size: laid_out)
    assert most == 5
    alive.clear()
    most = 0
    measured = learner.measure(batches(3, rows=1))
    assert measured == expected
    assert (len(alive), most) == (5, 1)
