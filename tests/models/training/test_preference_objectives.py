"""One loss and one gradient for one step of preferences, however it is cut, ordered or padded; in float64.

The expected ones come from plain transformers, one answer at a time, and the papers' formulas written out by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, cast

import pytest
import torch
from tests.models.training.preference_cases import METHODS
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from kedge.core.batches import AnswerBatch
from kedge.core.errors import ConfigError
from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import LabelledAnswers, TokenSequence, answer_batches
from kedge.models.forward.backbones import Backbone
from kedge.models.forward.heads import language_model
from kedge.models.forward.lora import with_lora
from kedge.models.loading.tiny import tiny_model
from kedge.models.settings import LoraSettings
from kedge.models.training.learner import Learner
from kedge.models.training.passes import InferenceSize
from kedge.models.training.preference_methods import CPO, DPO, IPO, KTO, ORPO, TDPO, AnyMethod, SimPO
from kedge.models.training.preference_objectives import (
    Reference,
    adapters_off,
    anchor_point,
    answer_logprobs,
    as_it_is,
    preference_objective,
    reference_for,
)
from kedge.models.training.train_step import trained_weights

PAD = 256
ANCHOR = 0.375
Gradients = dict[str, Tensor]


def sequence(rng: Random, prompt: int, answer: int) -> TokenSequence:
    """A prompt and an answer; one answer in three has a hole, as answers of several turns have."""
    tokens = [rng.randrange(256) for _ in range(prompt + answer)]
    counted = [False] * prompt + [True] * answer
    if answer > 3 and rng.random() < 0.4:
        counted[prompt + 1] = False
    return TokenSequence(tokens=tokens, counted=counted)


def pairs() -> list[LabelledAnswers]:
    rng = Random(3)
    items: list[LabelledAnswers] = []
    for prompt, chosen, rejected in ((4, 9, 2), (1, 3, 12), (7, 5, 6), (2, 1, 4), (5, 7, 1)):
        both = (sequence(rng, prompt, chosen), sequence(rng, prompt, rejected))
        # Near what a random model gives, so that no loss saturates; in eighths, which float32 holds exactly.
        ref = tuple(-5.5 * sum(sequence.counted) + rng.randrange(-16, 16) / 8 for sequence in both)
        items.append(LabelledAnswers(sequences=both, is_good=(True, False), ref_logp=ref))
    return items


def thumbs() -> list[LabelledAnswers]:
    """Seven single answers; three of them are liked."""
    liked = (True, False, False, True, False, True, False)
    single = [(pair.sequences[side], pair.ref_logp[side]) for pair in pairs() for side in (0, 1)][:7]
    return [
        LabelledAnswers(sequences=(sequence,), is_good=(good,), ref_logp=(ref,))
        for (sequence, ref), good in zip(single, liked, strict=True)
    ]


def items_of(name: str) -> list[LabelledAnswers]:
    return thumbs() if name == "kto" else pairs()


def small(seed: int = 0) -> PreTrainedModel:
    return cast(PreTrainedModel, tiny_model(seed=seed, hidden=32, layers=2).double())


def log_softmaxes(model: PreTrainedModel, sequence: TokenSequence) -> list[Tensor]:
    """The distributions that the counted tokens were outcomes of."""
    logp_TV = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
    return [logp_TV[t - 1] for t in range(1, len(sequence.tokens)) if sequence.counted[t]]


def picked(rows: Sequence[Tensor], sequence: TokenSequence) -> Tensor:
    tokens = [sequence.tokens[t] for t in range(1, len(sequence.tokens)) if sequence.counted[t]]
    return torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)]).sum()


def logp(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    return picked(log_softmaxes(model, sequence), sequence)


def kl(rows: Sequence[Tensor], reference: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    both = zip(rows, log_softmaxes(reference, sequence), strict=True)
    return torch.stack([(ref.detach().exp() * (ref.detach() - own)).sum() for own, ref in both]).sum()


def length(sequence: TokenSequence) -> int:
    return sum(sequence.counted[1:])


def loss_of_pair(
    method: AnyMethod, model: PreTrainedModel, reference: PreTrainedModel, pair: LabelledAnswers
) -> Tensor:
    # Each answer is read once: gradients go through norms that round to float32, so that two readings add up otherwise.
    rows = [log_softmaxes(model, side) for side in pair.sequences]
    c, r = (picked(own, side) for own, side in zip(rows, pair.sequences, strict=True))
    lc, lr = (length(side) for side in pair.sequences)
    refc, refr = pair.ref_logp
    sft = method.sft_weight * -c / lc
    margin = (c - r) - (refc - refr)
    match method:
        case DPO(loss="hinge", beta=b):
            return torch.clamp(1 - b * margin, min=0)
        case DPO(beta=b, label_smoothing=e):
            return sft - (1 - e) * logsigmoid(b * margin) - e * logsigmoid(-b * margin)
        case IPO(beta=b, log_probs="sum"):
            return (margin - 1 / (2 * b)) ** 2
        case IPO(beta=b):
            return ((c - refc) / lc - (r - refr) / lr - 1 / (2 * b)) ** 2
        case ORPO(beta=b):
            pc, pr = (c / lc).exp(), (r / lr).exp()
            return sft - b * logsigmoid(((pc / (1 - pc)) / (pr / (1 - pr))).log())
        case SimPO(beta=b, gamma=g):
            return -logsigmoid(b * (c / lc - r / lr) - g)
        case CPO(beta=b):
            return sft - logsigmoid(b * (c - r))
        case TDPO(beta=b, alpha=a):
            kc, kr = (kl(own, reference, side) for own, side in zip(rows, pair.sequences, strict=True))
            shift = kr - kc if a is None else a * (kr - kc.detach())
            return -logsigmoid(b * (margin - shift))
        case KTO():
            raise AssertionError


def loss_of_thumbs(method: KTO, model: PreTrainedModel, items: Sequence[LabelledAnswers]) -> Tensor:
    losses: list[Tensor] = []
    nll: list[Tensor] = []
    for item in items:
        (sequence,), (good,), (ref,) = item.sequences, item.is_good, item.ref_logp
        own = logp(model, sequence)
        above = method.beta * (own - ref - ANCHOR)
        if good:
            losses.append(method.desirable_weight * (1 - above.sigmoid()))
            nll.append(-own / length(sequence))
        else:
            losses.append(method.undesirable_weight * (1 - (-above).sigmoid()))
    return torch.stack(losses).mean() + method.sft_weight * torch.stack(nll).mean()


@cache
def expected(name: str) -> tuple[Gradients, float]:
    """One answer at a time, then the mean over the step."""
    method, model, reference = METHODS[name], small(), small(seed=1)
    items = items_of(name)
    if isinstance(method, KTO):
        loss = loss_of_thumbs(method, model, items)
    else:
        loss = torch.stack([loss_of_pair(method, model, reference, pair) for pair in items]).mean()
    loss.backward()
    return {
        key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None
    }, loss.item()


def shuffled(items: list[LabelledAnswers], seed: int) -> list[LabelledAnswers]:
    Random(seed).shuffle(items)
    return items


LAYOUTS: dict[str, Callable[[list[LabelledAnswers]], list[AnswerBatch]]] = {
    "whole": lambda items: answer_batches(items, rows=7, pad=PAD),
    "one by one": lambda items: answer_batches(items, rows=1, pad=PAD),
    "twos, shuffled": lambda items: answer_batches(shuffled(items, 1), rows=2, pad=0),
    "reversed": lambda items: answer_batches(items, rows=3, pad=PAD)[::-1],
    "by tokens, shuffled": lambda items: answer_batches(shuffled(items, 2), tokens=18, pad=7),
}


def after_one_step(
    model: nn.Module, backbone: Backbone, objective: Any, batches: Sequence[AnswerBatch]
) -> tuple[Gradients, dict[str, float]]:
    settings = OptimiserSettings(lr=1e-9, clip=1e9)
    learner = Learner(trained_weights(model), backbone, objective, settings, total_steps=10)
    facts = learner.update(lambda _: batches)
    return {
        key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
    }, facts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_a_step_has_one_loss_and_one_gradient_for_any_layout(name: str, layout: str) -> None:
    model, reference = small(), small(seed=1)
    batches = LAYOUTS[layout](items_of(name))
    if name == "kto":
        batches = [replace(batch, anchor=torch.tensor(ANCHOR)) for batch in batches]
    policy = language_model(model)
    objective = preference_objective(policy, METHODS[name], reference=as_it_is(reference))
    gradients, facts = after_one_step(model, policy.backbone, objective, batches)
    expected_gradients, loss = expected(name)
    assert gradients.keys() == expected_gradients.keys()
    assert sum(gradient.abs().sum() for gradient in expected_gradients.values()) > 0.1
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(
            gradients[key], gradient, rtol=1e-7, atol=1e-11, msg=lambda text, at=key: f"{at}: {text}"
        )
    assert facts["loss"] == pytest.approx(loss, rel=1e-6)


# Facts


def learner_of(model: PreTrainedModel, method: AnyMethod, **settings: Any) -> Learner[AnswerBatch]:
    policy = language_model(model)
    reference = reference_for(model) if isinstance(method, TDPO) else None
    objective = preference_objective(policy, method, reference=reference)
    return Learner(trained_weights(model), policy.backbone, objective, OptimiserSettings(**settings), total_steps=3)


def test_facts_of_pairs_by_hand() -> None:
    model, method = small().eval(), DPO(beta=0.3)
    rewards = [
        tuple(0.3 * (logp(model, side).item() - ref) for side, ref in zip(pair.sequences, pair.ref_logp, strict=True))
        for pair in pairs()
    ]
    sums = [[logp(model, side).item() for side in pair.sequences] for pair in pairs()]
    metrics = learner_of(model, method).measure(lambda _: answer_batches(pairs(), rows=2, pad=PAD))
    right = sum(c > r for c, r in rewards)
    assert 0 < right < 5
    assert metrics["accuracy"] == pytest.approx(right / 5)
    assert metrics["margin"] == pytest.approx(sum(c - r for c, r in rewards) / 5, rel=1e-5)
    assert metrics["chosen"] == pytest.approx(sum(c for c, _ in rewards) / 5, rel=1e-5)
    assert metrics["rejected"] == pytest.approx(sum(r for _, r in rewards) / 5, rel=1e-5)
    assert metrics["chosen_logp"] == pytest.approx(sum(c for c, _ in sums) / 5, rel=1e-6)
    assert metrics["rejected_logp"] == pytest.approx(sum(r for _, r in sums) / 5, rel=1e-6)
    assert metrics["chosen_drift"] == pytest.approx(sum(c for c, _ in rewards) / 5 / 0.3, rel=1e-5)
    assert "nll" not in metrics


def test_facts_of_thumbs_are_means_over_the_liked_and_over_the_others() -> None:
    model = small().eval()
    batches = [replace(item, anchor=torch.tensor(-2.0)) for item in answer_batches(thumbs(), rows=2, pad=PAD)]
    metrics = learner_of(model, KTO(beta=0.3)).measure(lambda _: batches)
    rewards = [(0.3 * (logp(model, item.sequences[0]).item() - item.ref_logp[0]), item.is_good[0]) for item in thumbs()]
    liked, others = [x for x, good in rewards if good], [x for x, good in rewards if not good]
    assert metrics["chosen"] == pytest.approx(sum(liked) / 3, rel=1e-5)
    assert metrics["rejected"] == pytest.approx(sum(others) / 4, rel=1e-5)
    # A negative reference point counts as 0, and is told as it is.
    assert metrics["accuracy"] == pytest.approx((sum(x > 0 for x in liked) + sum(x < 0 for x in others)) / 7)
    assert metrics["anchor"] == pytest.approx(-2.0)


@pytest.mark.parametrize("method", [ORPO(), SimPO(), CPO()])
def test_methods_without_a_reference_do_not_read_it(method: AnyMethod) -> None:
    policy = language_model(small())
    elsewhere = [replace(pair, ref_logp=(9.0, -30.0)) for pair in pairs()]
    with policy.active():
        losses = [
            preference_objective(policy, method).sums(batch).loss.item()
            for items in (pairs(), elsewhere)
            for batch in answer_batches(items, rows=5, pad=0)
        ]
    assert losses[0] == losses[1] > 0


def test_the_reference_point_is_the_mean_log_ratio_over_the_whole_step() -> None:
    model = small()
    ratios = [logp(model, item.sequences[0]).item() - item.ref_logp[0] for item in thumbs()]
    for rows in (7, 1, 3):
        model.train()
        policy, inference = language_model(model), InferenceSize(torch.device("cpu"))
        batches = answer_batches(thumbs(), rows=rows, pad=PAD)
        anchor = anchor_point(model, policy, lambda _, batches=batches: batches, inference)
        assert anchor.item() == pytest.approx(sum(ratios) / 7, rel=1e-5)
        assert not anchor.requires_grad
        assert model.training


# The reference


def trained_adapters(dropout: float = 0.0) -> Any:
    """A model whose adapters are no longer zero."""
    torch.manual_seed(0)
    model = with_lora(tiny_model(hidden=32, layers=2), LoraSettings(rank=4, dropout=dropout), name="policy", seed=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    return model


def logprobs(reference: Reference, batch: AnswerBatch) -> Tensor:
    with torch.no_grad(), reference() as opened:
        return answer_logprobs(opened.language_model, batch)


def test_with_adapters_the_reference_is_the_base_to_the_last_bit() -> None:
    (batch,) = answer_batches(pairs(), rows=5, pad=PAD)
    expected_S = logprobs(as_it_is(tiny_model(hidden=32, layers=2)), batch)
    adapted = trained_adapters(dropout=0.5).train()
    assert not torch.equal(logprobs(as_it_is(adapted), batch), expected_S)
    before = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    with adapters_off(adapted)() as opened:
        assert torch.equal(answer_logprobs(opened.language_model, batch), expected_S)
        assert not adapted.training
    assert adapted.training
    assert [name for name, parameter in adapted.named_parameters() if parameter.requires_grad] == before != []
    assert not torch.equal(logprobs(as_it_is(adapted), batch), expected_S)


@pytest.mark.parametrize("has_adapters", [True, False])
def test_the_reference_of_tdpo_stays_while_the_policy_learns(has_adapters: bool) -> None:
    (batch,) = answer_batches(pairs(), rows=5, pad=PAD)
    policy = trained_adapters() if has_adapters else tiny_model(hidden=32, layers=2)
    start_S = logprobs(as_it_is(tiny_model(hidden=32, layers=2)), batch)
    reference = reference_for(policy)
    learner = learner_of(policy, TDPO(), lr=1e-2)
    metrics = [learner.update(lambda _: [batch]) for _ in range(3)]
    assert metrics[-1]["chosen_kl"] > 0.01
    assert torch.equal(logprobs(reference, batch), start_S)


def test_tdpo_without_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the reference model"):
        preference_objective(language_model(small()), TDPO())
