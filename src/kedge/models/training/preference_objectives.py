"""Objectives of preference stages: the loss and the facts of judged answers under a policy, as sums over items.

An item is a pair; for KTO, one answer. Facts are implicit rewards and log-probs of good and bad answers.
Shape letters: B rows, T token positions, D width, S answers, C pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.algorithms.preference import cpo, dpo, implicit_rewards, kto, orpo_odds, simpo, tdpo
from kedge.core.batches import AnswerBatch
from kedge.core.errors import ConfigError
from kedge.models.forward import heads
from kedge.models.forward.lora import has_adapters, using
from kedge.models.forward.reader import evaluating
from kedge.models.training.learner import Objective, Sums
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

Reference = Callable[[], AbstractContextManager[PreTrainedModel]]
"""Gives the reference model for the duration of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerLogprobs:
    """Log-probs of each answer under the policy and the reference: sums over its tokens, or means for some methods."""

    logp_S: Tensor
    ref_logp_S: Tensor
    kl_S: Tensor | None
    """KL(reference || policy) summed over the answer's positions; None for every method but TDPO."""


def preference_objective(
    policy: PreTrainedModel, method: AnyMethod, *, reference: Reference | None = None
) -> Objective[AnswerBatch]:
    """The loss of a method; every item of the step has the same weight. Only TDPO runs the reference model itself."""
    if isinstance(method, TDPO) and reference is None:
        raise ConfigError("TDPO compares whole distributions: it needs the reference model, not only its log-probs")
    unit = 1.0 if isinstance(method, KTO) else 0.5
    return Objective(
        weight=lambda batch: unit * batch.num_answers, sums=partial(_sums, policy, method, reference, unit)
    )


def answer_logprobs(model: PreTrainedModel, batch: AnswerBatch) -> Tensor:
    """`logp_S`: the sum of the log-probs of each answer's tokens, in float32 at least."""
    return _logprobs(model, batch, _hidden(model, batch))


@torch.no_grad()
def anchor_point(policy: PreTrainedModel, batches: Sequence[AnswerBatch]) -> Tensor:
    """KTO's reference point: the mean log-ratio of answers to other prompts, over a whole step; without dropout."""
    total = torch.zeros(())
    with evaluating(policy):
        for batch in batches:
            moved = batch.to(policy.device)
            total = total + (answer_logprobs(policy, moved) - moved.ref_logp_S).sum().float().cpu()
    return total / sum(batch.num_answers for batch in batches)


@contextmanager
def adapters_off(model: PreTrainedModel) -> Generator[PreTrainedModel]:
    """The base of a model, without its adapters and without dropout inside of the block."""
    with evaluating(model), using(model, None) if has_adapters(model) else nullcontext():
        yield model


def reference_for(policy: PreTrainedModel) -> Reference:
    """The policy as it is now, as the reference of its training: its base without adapters, or else a frozen copy."""
    if has_adapters(policy):
        return partial(adapters_off, policy)
    twin = copy.deepcopy(policy).requires_grad_(False).eval()
    return lambda: nullcontext(twin)


def _sums(
    policy: PreTrainedModel, method: AnyMethod, reference: Reference | None, unit: float, batch: AnswerBatch
) -> Sums:
    model = policy
    batch = batch.to(model.device)
    kl_of = _kl_of(reference, batch) if isinstance(method, TDPO) and reference else None
    hidden_BTD = _hidden(model, batch)
    logp_S = _logprobs(model, batch, hidden_BTD)
    count_S = _by_answer(batch.counted_BT.float(), batch)
    scale_S = count_S if is_averaged(method) else torch.ones_like(count_S)
    logprobs = _AnswerLogprobs(
        logp_S=logp_S / scale_S,
        ref_logp_S=batch.ref_logp_S.to(logp_S.dtype) / scale_S,
        kl_S=kl_of(heads.lm_head(model), hidden_BTD) if kl_of else None,
    )
    # With these factors, sums over the good (bad) answers become their means when divided by the weight of the step.
    good = unit / batch.good_share if batch.good_share else 0.0
    bad = unit / (1 - batch.good_share) if batch.good_share < 1 else 0.0
    nll = good * torch.where(batch.is_good_S, -logp_S / count_S, 0.0).sum()
    facts = _facts(method, logprobs, logp_S.detach(), batch, good, bad)
    if method.sft_weight:
        facts["nll"] = nll.detach()
    return Sums(loss=_losses(method, logprobs, batch).sum() + method.sft_weight * nll, facts=facts)


def _losses(method: AnyMethod, logprobs: _AnswerLogprobs, batch: AnswerBatch) -> Tensor:
    """One loss per pair; for KTO, one per answer."""
    if isinstance(method, KTO):
        return kto(
            logprobs.logp_S,
            logprobs.ref_logp_S,
            batch.is_good_S,
            batch.anchor,
            beta=method.beta,
            desirable_weight=method.desirable_weight,
            undesirable_weight=method.undesirable_weight,
        )
    chosen_C, rejected_C = logprobs.logp_S[0::2], logprobs.logp_S[1::2]
    ref_chosen_C, ref_rejected_C = logprobs.ref_logp_S[0::2], logprobs.ref_logp_S[1::2]
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
            assert logprobs.kl_S is not None
            kl_C, rejected_kl_C = logprobs.kl_S[0::2], logprobs.kl_S[1::2]
            return tdpo(chosen_C, rejected_C, ref_chosen_C, ref_rejected_C, kl_C, rejected_kl_C, beta=beta, alpha=alpha)


def _facts(
    method: AnyMethod, logprobs: _AnswerLogprobs, logp_S: Tensor, batch: AnswerBatch, good: float, bad: float
) -> dict[str, Tensor]:
    """Sums whose means are implicit rewards and log-probs of good and of bad answers, and the accuracy of the order."""
    rewards_S = implicit_rewards(logprobs.logp_S, logprobs.ref_logp_S, beta=method.beta)

    def both(x_S: Tensor) -> tuple[Tensor, Tensor]:
        is_good_S = batch.is_good_S
        return good * torch.where(is_good_S, x_S, 0.0).sum(), bad * torch.where(is_good_S, 0.0, x_S).sum()

    chosen, rejected = both(rewards_S)
    chosen_logp, rejected_logp = both(logp_S)
    facts = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}
    facts |= {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp}
    if needs_reference(method):
        # Of given answers, not of the policy's own: an average log-ratio on data is not a KL divergence.
        facts["chosen_drift"], facts["rejected_drift"] = both(logp_S - batch.ref_logp_S)
    if logprobs.kl_S is not None:
        facts["chosen_kl"], facts["rejected_kl"] = both(logprobs.kl_S.detach())
    if isinstance(method, KTO):
        above_S = rewards_S - method.beta * batch.anchor.clamp(min=0)
        gap_S = torch.where(batch.is_good_S, above_S, -above_S)
        facts["anchor"] = batch.anchor * batch.num_answers
    else:
        gap_S = rewards_S[0::2] - rewards_S[1::2]
    facts["accuracy"] = ((gap_S > 0).float() + 0.5 * (gap_S == 0).float()).sum()
    return facts


def _kl_of(reference: Reference, batch: AnswerBatch) -> Callable[[Tensor, Tensor], Tensor]:
    """Run the reference before the policy: adapters that are switched off must be on again when gradients flow."""
    with torch.no_grad(), reference() as model:
        ref_head_VD, ref_hidden_BTD = heads.lm_head(model), _hidden(model, batch)

    def of(head_VD: Tensor, hidden_BTD: Tensor) -> Tensor:
        return _by_answer(heads.token_kl(head_VD, hidden_BTD, ref_head_VD, ref_hidden_BTD, batch.counted_BT), batch)

    return of


def _hidden(model: PreTrainedModel, batch: AnswerBatch) -> Tensor:
    return heads.hidden_states(model, batch.tokens_BT, batch.segment_BT, is_right_padded=not batch.is_packed)


def _logprobs(model: PreTrainedModel, batch: AnswerBatch, hidden_BTD: Tensor) -> Tensor:
    logp_BT = heads.token_logprobs(
        heads.lm_head(model), hidden_BTD, batch.tokens_BT, batch.segment_BT, only_BT=batch.counted_BT
    )
    return _by_answer(logp_BT, batch)


def _by_answer(x_BT: Tensor, batch: AnswerBatch) -> Tensor:
    """Sums over the tokens of each answer (S)."""
    if not batch.is_packed:
        return x_BT.sum(dim=1)
    # Not a scatter: on a GPU that adds in an order of its own each time.
    number_S1 = torch.arange(1, batch.num_answers + 1, device=x_BT.device)[:, None]
    return torch.where(batch.segment_BT.flatten() == number_S1, x_BT.flatten(), 0.0).sum(dim=1)
