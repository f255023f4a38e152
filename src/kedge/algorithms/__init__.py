"""Scores in, losses out: pure functions of tensors. No model, device, file, logging, randomness or averaging."""

from kedge.algorithms.advantages import (
    gae,
    greedy_baseline,
    group_centred,
    leave_one_out,
    returns_to_go,
    scale,
    whiten,
)
from kedge.algorithms.combine import (
    ensemble_mean,
    gated,
    uncertainty_weighted,
    weighted_sum_of,
    worst_case,
)
from kedge.algorithms.kl import (
    AdaptiveKL,
    FixedKL,
    estimate,
)
from kedge.algorithms.logprobs import (
    entropy,
    logprobs_and_entropy,
    token_logprobs,
)
from kedge.algorithms.policy import (
    cispo_loss,
    gspo_loss,
    mean_ratio,
    reinforce_loss,
    sequence_importance,
    truncated_importance,
)
from kedge.algorithms.ppo import (
    RunningMoments,
    clip_scores,
    length_penalty,
    missing_eos_penalty,
    missing_eos_score,
    overlong_penalty,
    policy_loss,
    shape_rewards,
    value_loss,
)
from kedge.algorithms.preference import (
    DPO_KINDS,
    cpo,
    dpo,
    implicit_rewards,
    kto,
    orpo_odds,
    simpo,
    tdpo,
)
from kedge.algorithms.reward import (
    all_pairs,
    bradley_terry,
    plackett_luce,
)

__all__ = [
    "DPO_KINDS",
    "AdaptiveKL",
    "FixedKL",
    "RunningMoments",
    "all_pairs",
    "bradley_terry",
    "cispo_loss",
    "clip_scores",
    "cpo",
    "dpo",
    "ensemble_mean",
    "entropy",
    "estimate",
    "gae",
    "gated",
    "greedy_baseline",
    "group_centred",
    "gspo_loss",
    "implicit_rewards",
    "kto",
    "leave_one_out",
    "length_penalty",
    "logprobs_and_entropy",
    "mean_ratio",
    "missing_eos_penalty",
    "missing_eos_score",
    "orpo_odds",
    "overlong_penalty",
    "plackett_luce",
    "policy_loss",
    "reinforce_loss",
    "returns_to_go",
    "scale",
    "sequence_importance",
    "shape_rewards",
    "simpo",
    "tdpo",
    "token_logprobs",
    "truncated_importance",
    "uncertainty_weighted",
    "value_loss",
    "weighted_sum_of",
    "whiten",
    "worst_case",
]
