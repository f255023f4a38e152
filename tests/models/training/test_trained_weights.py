"""Weights that are computed in bfloat16 learn, go on and are saved in float32."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from kedge.core.batches import Batch
from kedge.core.errors import CheckpointError
from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.heads import language_model
from kedge.models.loading.tiny import make_tiny, tiny_model
from kedge.models.reward.reward_files import build
from kedge.models.reward.reward_model import head_of
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.train_step import TrainedWeights, trained_weights


def batches() -> list[Batch]:
    rng = Random(3)
    rows = [[rng.randrange(256) for _ in range(9)] for _ in range(4)]
    return padded_batches([TokenSequence(tokens=row, counted=[True] * 9) for row in rows], rows=4, pad=256)


def narrow() -> tuple[TrainedWeights, dict[str, Tensor]]:
    """A model in bfloat16, and what its weights were before."""
    model = tiny_model(hidden=32, layers=1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return trained_weights(model, dtype=torch.bfloat16), before


def learner(trained: TrainedWeights, lr: float = 1e-6) -> Learner[Batch]:
    policy = language_model(trained.module)  # pyright: ignore[reportArgumentType]
    settings = OptimiserSettings(lr=lr, schedule="constant", warmup=0.0)
    return Learner(trained, policy.backbone, imitation(policy), settings, total_steps=9)


def test_masters_are_the_weights_as_they_were_and_not_their_rounded_copies() -> None:
    trained, before = narrow()
    assert {parameter.dtype for parameter in trained.module.parameters()} == {torch.bfloat16}
    assert trained.weights().keys() == before.keys()
    for name, weight in trained.weights().items():
        assert torch.equal(weight, before[name])
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in before.values())


def test_what_bfloat16_would_round_away_is_learnt_saved_and_carried_to_the_next_round() -> None:
    trained, before = narrow()
    for _ in range(2):  # each round has an optimiser of its own
        learner(trained).update(lambda _: batches())
    moved = {name: (weight - before[name]).abs().max().item() for name, weight in trained.weights().items()}
    assert min(moved.values()) > 1.5e-6  # two steps of Adam at 1e-6
    assert {weight.dtype for weight in trained.weights().values()} == {torch.float32}
    for (_, parameter), master in zip(trained.named, trained.masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())


def test_weights_are_loaded_into_masters_and_parameters() -> None:
    trained, _ = narrow()
    learner(trained, lr=1e-2).update(lambda _: batches())
    other, _ = narrow()
    other.load({name: weight.clone() for name, weight in trained.weights().items()})
    for own, theirs in zip(trained.named, other.named, strict=True):
        assert torch.equal(own[1], theirs[1])
    with pytest.raises(CheckpointError, match="other trainable weights"):
        other.load({"elsewhere": torch.zeros(1)})


def test_frozen_weights_are_narrow_too_and_a_head_is_not(tmp_path: Path) -> None:
    model = build(make_tiny(tmp_path / "tiny", hidden=32, layers=1), seed=3, dtype="float32").model
    model.get_decoder().requires_grad_(False)
    trained = trained_weights(model, dtype=torch.bfloat16, head=head_of(model))
    assert [name for name, _ in trained.named] == ["score.weight"]
    assert trained.masters[0] is head_of(model).weight
    assert head_of(model).weight.dtype == torch.float32
    assert {parameter.dtype for parameter in model.get_decoder().parameters()} == {torch.bfloat16}


def test_in_float32_a_parameter_is_its_own_master() -> None:
    model = tiny_model(hidden=32, layers=1)
    trained = trained_weights(model, dtype=torch.float32)
    assert all(parameter is master for (_, parameter), master in zip(trained.named, trained.masters, strict=True))
