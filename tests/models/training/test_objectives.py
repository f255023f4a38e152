"""One gradient for one optimiser step, however it is cut, ordered, padded or packed; in float64 on a small model.

The expected gradients come from plain transformers, one sequence at a time, and a loss written out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from kedge.core.batches import Batch, Comparisons
from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import RankedAnswers, TokenSequence, comparison_batches, padded_batches
from kedge.models.forward.backbones import Backbone
from kedge.models.forward.heads import language_model
from kedge.models.loading.tiny import make_tiny, tiny_model
from kedge.models.reward.reward_files import build
from kedge.models.reward.reward_model import RewardModel, scores
from kedge.models.training.learner import Learner, Objective
from kedge.models.training.objectives import RankingLoss, imitation, preference
from kedge.models.training.train_step import trained_weights

PAD, END = 256, 258
Gradients = dict[str, Tensor]


def sequences() -> list[TokenSequence]:
    """Seven of unequal lengths; the share of counted tokens differs much between them, and one has none."""
    rng = Random(4)
    result: list[TokenSequence] = []
    for length, share in ((13, 0.9), (2, 1.0), (21, 0.2), (5, 0.6), (9, 0.0), (17, 0.8), (3, 0.5)):
        tokens = [rng.randrange(256) for _ in range(length)]
        result.append(TokenSequence(tokens=tokens, counted=[rng.random() < share for _ in range(length)]))
    return result


def ranked() -> list[RankedAnswers]:
    """Pairs either way round, with margins, certainties, weights; rankings of 3 and 4 with ties; two objectives."""
    rng = Random(5)

    def answers(*lengths: int) -> list[list[int]]:
        return [[rng.randrange(256) for _ in range(length)] + [END] for length in lengths]

    return [
        RankedAnswers(answers=answers(9, 4), rank=(1, 2), margin=0.75, certainty=0.75, weight=2.0),
        RankedAnswers(answers=answers(3, 12), rank=(2, 1), margin=-0.5, certainty=0.25, weight=0.5, objective=1),
        RankedAnswers(answers=answers(5, 6), rank=(1, 2)),
        RankedAnswers(answers=answers(2, 8, 5), rank=(3, 1, 2), weight=1.5),
        RankedAnswers(answers=answers(6, 1, 7, 4), rank=(2, 1, 2, 3), objective=1),
        RankedAnswers(answers=answers(11, 3, 2), rank=(1, 1, 2), weight=0.25, objective=1),
        RankedAnswers(answers=answers(4, 7), rank=(1, 1), weight=3.0),
    ]


def after_one_step(
    module: nn.Module, backbone: Backbone, objective: Objective[Any], batches: Sequence[Any]
) -> tuple[Gradients, dict[str, float]]:
    """The gradient that the step was made of: nothing is clipped, and a step leaves it in place."""
    settings = OptimiserSettings(lr=1e-9, clip=1e9)
    learner = Learner(trained_weights(module), backbone, objective, settings, total_steps=10)
    facts = learner.update(lambda _: batches)
    return {
        name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None
    }, facts


def expect(gradients: Gradients, expected: Gradients) -> None:
    assert gradients.keys() == expected.keys()
    assert sum(gradient.abs().sum() for gradient in expected.values()) > 0.1
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-8, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}"
        )


# Imitation


def small_causal() -> PreTrainedModel:
    return cast(PreTrainedModel, tiny_model(hidden=32, layers=2).double())


@pytest.fixture(scope="module")
def imitation_reference() -> tuple[Gradients, float]:
    model = small_causal()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences():
        logp_TV = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        for t in range(1, len(sequence.tokens)):
            if sequence.counted[t]:
                total, count = total - logp_TV[t - 1, sequence.tokens[t]], count + 1
    loss = total / count
    loss.backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }, loss.item()


def shuffled(seed: int) -> list[TokenSequence]:
    shuffled = sequences()
    Random(seed).shuffle(shuffled)
    return shuffled


@pytest.mark.parametrize(
    "batches",
    [
        padded_batches(sequences(), rows=7, pad=PAD),
        padded_batches(sequences(), rows=1, pad=PAD),
        padded_batches(sequences(), rows=3, pad=0),
        padded_batches(shuffled(1), rows=2, pad=END),
        list(reversed(padded_batches(sequences(), rows=2, pad=PAD))),
        padded_batches(shuffled(2), tokens=30, pad=7),
    ],
    ids=["whole", "one by one", "threes", "shuffled", "reversed", "by tokens"],
)
def test_imitation_has_one_gradient_for_any_layout(
    batches: list[Batch], imitation_reference: tuple[Gradients, float]
) -> None:
    model = small_causal()
    policy = language_model(model)
    gradients, facts = after_one_step(model, policy.backbone, imitation(policy), batches)
    expect(gradients, imitation_reference[0])
    assert facts["loss"] == pytest.approx(imitation_reference[1], rel=1e-6)


def test_a_conversation_scores_beside_others_as_it_does_alone() -> None:
    """What stands before it in the packed row changes nothing, not even by rounding that accumulates."""
    model = language_model(small_causal().eval())
    objective = imitation(model)
    for sequence in sequences():
        if not any(sequence.counted[1:]):
            continue
        (alone,) = padded_batches([sequence], rows=1, pad=PAD)
        neighbour = TokenSequence(tokens=[200] * 30, counted=[False] * 30)
        (beside,) = padded_batches([neighbour, sequence], rows=2, pad=PAD)
        with model.active():
            loss, expected = (objective.sums(batch).loss.item() for batch in (beside, alone))
        assert loss == pytest.approx(expected, rel=1e-12)


# Preference


def small_reward(folder: Path) -> RewardModel:
    reward = build(folder, objectives=("helpful", "harmless"), seed=3, dtype="float32")
    reward.model.double()
    return replace(reward)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", hidden=32, layers=2)


def loss_by_hand(scores: Sequence[Tensor], comparison: RankedAnswers, *, ranking: RankingLoss, centre: float) -> Tensor:
    """From the papers' formulas, answer by answer."""
    penalty = centre * sum(scores, torch.zeros(())).square()
    if len(scores) == 2 and comparison.rank[0] != comparison.rank[1]:
        better, worse = scores if comparison.rank[0] < comparison.rank[1] else reversed(scores)
        right, wrong = logsigmoid(better - worse - comparison.margin), logsigmoid(worse - better - comparison.margin)
        return penalty - comparison.certainty * right - (1 - comparison.certainty) * wrong
    at = range(len(scores))
    if ranking == "all_pairs":
        pairs = [-logsigmoid(scores[i] - scores[j]) for i in at for j in at if comparison.rank[i] < comparison.rank[j]]
        return penalty + sum(pairs, torch.zeros(())) / max(len(pairs), 1)
    picks = [
        torch.stack([scores[j] for j in at if comparison.rank[j] >= comparison.rank[i]]).logsumexp(0) - scores[i]
        for i in at
    ]
    return penalty + sum(picks, torch.zeros(()))


def preference_reference(model: nn.Module, *, ranking: RankingLoss, centre: float) -> tuple[Gradients, float]:
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for comparison in ranked():
        scores = [model(torch.tensor([answer])).logits[0, comparison.objective] for answer in comparison.answers]
        total = total + comparison.weight * loss_by_hand(scores, comparison, ranking=ranking, centre=centre)
        weight += comparison.weight
    loss = total / weight
    loss.backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }, loss.item()


def reordered(seed: int) -> list[RankedAnswers]:
    shuffled = ranked()
    Random(seed).shuffle(shuffled)
    return shuffled


@pytest.mark.parametrize("ranking", ["plackett_luce", "all_pairs"])
@pytest.mark.parametrize(
    "batches",
    [
        comparison_batches(ranked(), rows=7, pad=PAD),
        comparison_batches(ranked(), rows=1, pad=PAD),
        comparison_batches(ranked(), rows=2, pad=PAD),
        comparison_batches(reordered(1), rows=3, pad=PAD),
        list(reversed(comparison_batches(ranked(), rows=4, pad=PAD))),
    ],
    ids=["whole", "one by one", "twos", "shuffled", "reversed"],
)
def test_preference_has_one_gradient_for_any_layout(
    batches: list[Comparisons], ranking: RankingLoss, folder: Path
) -> None:
    expected, loss = preference_reference(small_reward(folder).model, ranking=ranking, centre=0.01)
    reward = small_reward(folder)
    objective = preference(partial(scores, reward), ranking=ranking, centre=0.01)
    gradients, facts = after_one_step(reward.model, reward.backbone, objective, batches)
    expect(gradients, expected)
    assert facts["loss"] == pytest.approx(loss, rel=1e-6)


def test_facts_of_a_comparison_by_hand(folder: Path) -> None:
    """Accuracy is a share of the strictly ranked pairs of a comparison, margin their mean gap, both by weight."""
    reward = small_reward(folder)
    model = reward.model.eval()
    right, gap, weight = 0.0, 0.0, 0.0
    with torch.no_grad():
        for comparison in ranked():
            s = [model(torch.tensor([answer])).logits[0, comparison.objective].item() for answer in comparison.answers]
            at = range(len(s))
            gaps = [s[i] - s[j] for i in at for j in at if comparison.rank[i] < comparison.rank[j]]
            right += comparison.weight * sum(g > 0 for g in gaps) / max(len(gaps), 1)
            gap += comparison.weight * sum(gaps) / max(len(gaps), 1)
            weight += comparison.weight
    objective = preference(partial(scores, reward), ranking="all_pairs", centre=0.0)
    learner = Learner(trained_weights(model), reward.backbone, objective, OptimiserSettings(), total_steps=1)
    metrics = learner.measure(lambda _: comparison_batches(ranked(), rows=3, pad=PAD))
    assert (metrics["accuracy"], metrics["margin"]) == pytest.approx((right / weight, gap / weight), rel=1e-6)
    assert 0.0 < right / weight < 1.0


def test_a_tie_counts_half_whatever_its_scores(folder: Path) -> None:
    """Nobody can be right about it, and it has no gap."""
    reward = small_reward(folder)
    tie = RankedAnswers(answers=[[1, 2, END], [3, END]], rank=(1, 2), certainty=0.5)
    objective = preference(partial(scores, reward), ranking="all_pairs", centre=0.0)
    learner = Learner(trained_weights(reward.model), reward.backbone, objective, OptimiserSettings(), total_steps=1)
    metrics = learner.measure(lambda _: comparison_batches([tie], rows=1, pad=PAD))
    assert (metrics["accuracy"], metrics["margin"]) == (0.5, 0.0)
    assert metrics["loss"] > math.log(2)  # equal scores would be best
