"""Objectives of preference stages: the loss and the facts of judged answers under a policy, as sums over items.

An item is a pair; for KTO, one answer. Facts are implicit rewards and log-probs of good and bad answers.
Shape letters: B rows, T token positions, D width, S answers, C pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.algorithms.preference import cpo, dpo, implicit_rewards, kto, orpo_odds, simpo, tdpo
from kedge.core.batches import AnswerBatch
from kedge.core.errors import ConfigError
from kedge.core.records import send
from kedge.models.forward import heads
from kedge.models.forward.heads import LanguageModel, base_language_model, language_model
from kedge.models.forward.lora import has_adapters
from kedge.models.forward.parts import gathered
from kedge.models.forward.reader import evaluating
from kedge.models.forward.sharding import frozen_copy, is_sharded
from kedge.models.training.learner import Objective, Sums
from kedge.models.training.passes import Cut, InferenceSize
from kedge.models.training.preference_methods import (
    CPO,
    DPO,
    IPO,
    KTO,
    ORPO,
    TDPO,
    AnyMethod,
    SimPO,
    is_averaged,
    needs_reference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReference:
    """A model to compare with, ready to compute: active, and without dropout."""

    model: PreTrainedModel
    """For its identity: the weights that `logprobs` are of."""
    language_model: LanguageModel


Reference = Callable[[], AbstractContextManager[OpenReference]]
"""Gives the reference for the duration of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """What a loss reads, on the device: log-probs are sums over an answer's tokens, or means for some methods."""

    logp_S: Tensor
    ref_logp_S: Tensor
    kl_S: Tensor | None
    """KL(reference || policy) summed over the answer's positions; None for every method but TDPO."""
    is_good_S: Tensor
    anchor: Tensor


def preference_objective(
    policy: LanguageModel, method: AnyMethod, *, reference: Reference | None = None
) -> Objective[AnswerBatch]:
    """The loss of a method; every item of the step has the same weight. Only TDPO runs the reference model itself."""
    if isinstance(method, TDPO) and reference is None:
        raise ConfigError("TDPO compares whole distributions: it needs the reference model, not only its log-probs")
    unit = 1.0 if isinstance(method, KTO) else 0.5
    return Objective(
        weight=lambda batch: unit * batch.num_answers, sums=partial(_sums, policy, method, reference, unit)
    )


def answer_logprobs(model: LanguageModel, batch: AnswerBatch) -> Tensor:
    """`logp_S`: the sum of the log-probs of each answer's tokens, in float32 at least."""
    return model.logprobs(batch.tokens_BT, batch.attention_mask_BT, batch.counted_BT).sum(dim=1)


@torch.no_grad()
def anchor_point(
    policy: nn.Module, model: LanguageModel, batches: Cut[AnswerBatch], inference: InferenceSize
) -> Tensor:
    """KTO's reference point: the mean log-ratio of answers to other prompts, over a whole step; without dropout.

    It stays on the device. `model` is the backbone and head of `policy`.
    """

    def log_ratio(batch: AnswerBatch) -> tuple[Tensor, int]:
        logp_S, ref_logp_S = answer_logprobs(model, batch), send(batch.ref_logp_S, model.device)
        return (logp_S - ref_logp_S).sum().float(), batch.num_answers

    with evaluating(policy), model.active():
        parts = inference.each(batches, log_ratio)
    ratio = torch.stack([ratio for ratio, _ in parts]).sum() if parts else torch.zeros((), device=model.device)
    inference.world.add(ratio)
    return ratio / sum(inference.world.gather(sum(num_answers for _, num_answers in parts)))


def adapters_off(model: PreTrainedModel) -> Reference:
    """The model as it is when the reference is opened, without its adapters."""
    return partial(_opened, model, model, base_language_model(model))


def as_it_is(model: PreTrainedModel) -> Reference:
    """The model as it is when the reference is opened, its adapters included."""
    return partial(_opened, model, model, language_model(model))


def reference_for(policy: PreTrainedModel) -> Reference:
    """The policy as it is now, as the reference of its training: its base without adapters, or else a frozen copy."""
    if has_adapters(policy):
        return adapters_off(policy)
    frozen = frozen_copy(policy) if is_sharded(policy) else copy.deepcopy(policy).requires_grad_(False).eval()
    return as_it_is(frozen)


@contextmanager
def _opened(module: PreTrainedModel, model: PreTrainedModel, language_model: LanguageModel) -> Generator[OpenReference]:
    with evaluating(module), language_model.active():
        yield OpenReference(model=model, language_model=language_model)


def _sums(
    policy: LanguageModel, method: AnyMethod, reference: Reference | None, unit: float, batch: AnswerBatch
) -> Sums:
    device = policy.device
    tokens_BT = send(batch.tokens_BT, device)
    ref_logp_S, is_good_S, count_S, anchor = (
        send(x, device) for x in (batch.ref_logp_S, batch.is_good_S, batch.counted_BT.sum(dim=1).float(), batch.anchor)
    )

    def compute() -> tuple[Tensor, Tensor | None]:
        ref_hidden = _reference_hidden(reference, batch) if isinstance(method, TDPO) and reference else None
        hidden_ND, targets = policy.hidden(tokens_BT, batch.attention_mask_BT, batch.counted_BT)
        head_VD = policy.head()
        logp_BT = heads.token_logprobs(head_VD, hidden_ND, tokens_BT, targets, compiled=policy.compiled)
        kl_BT = heads.token_kl(head_VD, hidden_ND, *ref_hidden, targets) if ref_hidden else None
        return logp_BT.sum(dim=1), None if kl_BT is None else kl_BT.sum(dim=1)

    logp_S, kl_S = policy.backbone.computing(compute)
    scale_S = count_S if is_averaged(method) else torch.ones_like(count_S)
    answers = _Answers(
        logp_S=logp_S / scale_S,
        ref_logp_S=ref_logp_S.to(logp_S.dtype) / scale_S,
        kl_S=kl_S,
        is_good_S=is_good_S,
        anchor=anchor,
    )
    # With these factors, sums over the good (bad) answers become their means when divided by the weight of the step.
    good = unit / batch.good_share if batch.good_share else 0.0
    bad = unit / (1 - batch.good_share) if batch.good_share < 1 else 0.0
    nll = good * torch.where(is_good_S, -logp_S / count_S, 0.0).sum()
    facts = _facts(method, answers, logp_S.detach(), ref_logp_S, good, bad)
    if method.sft_weight:
        facts["nll"] = nll.detach()
    return Sums(loss=_losses(method, answers).sum() + method.sft_weight * nll, facts=facts)


def _losses(method: AnyMethod, answers: _Answers) -> Tensor:
    """One loss per pair; for KTO, one per answer."""
    if isinstance(method, KTO):
        return kto(
            answers.logp_S,
            answers.ref_logp_S,
            answers.is_good_S,
            answers.anchor,
            beta=method.beta,
            desirable_weight=method.desirable_weight,
            undesirable_weight=method.undesirable_weight,
        )
    chosen_C, rejected_C = answers.logp_S[0::2], answers.logp_S[1::2]
    ref_chosen_C, ref_rejected_C = answers.ref_logp_S[0::2], answers.ref_logp_S[1::2]
    match method:
        case DPO(loss=kind, beta=beta, label_smoothing=smoothing):
            return dpo(
                chosen_C, rejected_C, ref_chosen_C, ref_rejected_C, beta=beta, kind=kind, label_smoothing=smoothing
            )
        case IPO(beta=beta):
            return dpo(chosen_C, rejected_C, ref_chosen_C, ref_rejected_C, beta=beta, kind="ipo")
        case ORPO(beta=beta):
            return orpo_odds(chosen_C, rejected_C, beta=beta)
        case SimPO(beta=beta, gamma=gamma):
            return simpo(chosen_C, rejected_C, beta=beta, gamma=gamma)
        case CPO(beta=beta):
            return cpo(chosen_C, rejected_C, beta=beta)
        case TDPO(beta=beta, alpha=alpha):
            assert answers.kl_S is not None
            kl_C, rejected_kl_C = answers.kl_S[0::2], answers.kl_S[1::2]
            return tdpo(chosen_C, rejected_C, ref_chosen_C, ref_rejected_C, kl_C, rejected_kl_C, beta=beta, alpha=alpha)


def _facts(
    method: AnyMethod, answers: _Answers, logp_S: Tensor, ref_logp_S: Tensor, good: float, bad: float
) -> dict[str, Tensor]:
    """Sums whose means are implicit rewards and log-probs of good and of bad answers, and the accuracy of the order.

    `logp_S` and `ref_logp_S` are sums over the tokens of each answer, whatever the loss reads.
    """
    rewards_S = implicit_rewards(answers.logp_S, answers.ref_logp_S, beta=method.beta)

    def both(x_S: Tensor) -> tuple[Tensor, Tensor]:
        is_good_S = answers.is_good_S
        return good * torch.where(is_good_S, x_S, 0.0).sum(), bad * torch.where(is_good_S, 0.0, x_S).sum()

    chosen, rejected = both(rewards_S)
    chosen_logp, rejected_logp = both(logp_S)
    facts = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}
    facts |= {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp}
    if needs_reference(method):
        # Of given answers, not of the policy's own: an average log-ratio on data is not a KL divergence.
        facts["chosen_drift"], facts["rejected_drift"] = both(logp_S - ref_logp_S)
    if answers.kl_S is not None:
        facts["chosen_kl"], facts["rejected_kl"] = both(answers.kl_S.detach())
    if isinstance(method, KTO):
        above_S = rewards_S - method.beta * answers.anchor.clamp(min=0)
        gap_S = torch.where(answers.is_good_S, above_S, -above_S)
        facts["anchor"] = answers.anchor * len(answers.logp_S)
    else:
        gap_S = rewards_S[0::2] - rewards_S[1::2]
    facts["accuracy"] = ((gap_S > 0).float() + 0.5 * (gap_S == 0).float()).sum()
    return facts


def _reference_hidden(reference: Reference, batch: AnswerBatch) -> tuple[Tensor, Tensor]:
    """The reference's output matrix and hidden states where the answers' tokens are predicted.

    It is run before the policy: adapters that are switched off must be on again when gradients flow.
    """
    with torch.no_grad(), reference() as opened:
        model = opened.language_model
        hidden_ND, _ = model.hidden(batch.tokens_BT, batch.attention_mask_BT, batch.counted_BT)
        return gathered(model.head()), hidden_ND
