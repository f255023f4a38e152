"""Losses on preferences: the DPO family, TDPO, ORPO, SimPO, CPO and KTO.

Log-probs of whole answers in, one loss a pair out (KTO: one an answer). Shape letter: B pairs or answers. Types
narrower than float32 are widened first. Left out: the SFT term that ORPO and CPO add, reference-free DPO, other
divergences than reverse KL, weights of pairs, and every mean over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kedge.core.errors import ConfigError
from kedge.core.loss import widen
from kedge.core.suggest import did_you_mean

EXO_SMOOTHING: Final = 1e-3
"""What exo_pair takes for label_smoothing 0, whose logarithm it needs: the value its paper recommends."""

DISCOPOP_TAU: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogRatios:
    """chosen and rejected: log π − log π_ref of each answer. The gaps: chosen minus rejected, within one model."""

    chosen_B: Tensor
    rejected_B: Tensor
    policy_gap_B: Tensor
    ref_gap_B: Tensor
    margin_B: Tensor


def _sigmoid(x: _LogRatios, beta: float, smoothing: float) -> Tensor:
    """-(1-ε) log σ(β m) - ε log σ(-β m)  (Rafailov et al. 2023, eq. 7; ε > 0 is cDPO, Mitchell 2023)."""
    return _smoothed(beta * x.margin_B, smoothing)


def _robust(x: _LogRatios, beta: float, smoothing: float) -> Tensor:
    """(-(1-ε) log σ(β m) + ε log σ(-β m)) / (1-2ε): unbiased under flip rate ε  (Chowdhury et al. 2024)."""
    logit_B = beta * x.margin_B
    return (smoothing * logsigmoid(-logit_B) - (1 - smoothing) * logsigmoid(logit_B)) / (1 - 2 * smoothing)


def _exo_pair(x: _LogRatios, beta: float, smoothing: float) -> Tensor:
    """KL(q || p), q = (σ(β m), σ(-β m)), p = (1-ε, ε)  (Ji et al. 2024, eq. 16)."""
    eps = smoothing or EXO_SMOOTHING
    logit_B = beta * x.margin_B
    chosen_B = logit_B.sigmoid() * (logsigmoid(logit_B) - math.log1p(-eps))
    rejected_B = (-logit_B).sigmoid() * (logsigmoid(-logit_B) - math.log(eps))
    return chosen_B + rejected_B


def _aot(x: _LogRatios, beta: float, smoothing: float) -> Tensor:
    """cDPO on sorted policy gaps against sorted reference gaps  (Melnyk et al. 2024, paired data)."""
    return _smoothed(beta * (x.policy_gap_B.sort().values - x.ref_gap_B.sort().values), smoothing)


def _aot_pair(x: _LogRatios, beta: float, smoothing: float) -> Tensor:
    """cDPO on sorted chosen log-ratios against sorted rejected ones  (Melnyk et al. 2024, unpaired data)."""
    return _smoothed(beta * (x.chosen_B.sort().values - x.rejected_B.sort().values), smoothing)


def _ipo(x: _LogRatios, beta: float) -> Tensor:
    """(m - 1/(2β))²  (Azar et al. 2023, eq. 17, β is their τ); sums or length averages, as they come in."""
    return (x.margin_B - 1 / (2 * beta)).square()


def _hinge(x: _LogRatios, beta: float) -> Tensor:
    """max(0, 1 - β m)  (SLiC, Zhao et al. 2023; RSO, Liu et al. 2023)."""
    return (1 - beta * x.margin_B).relu()


def _nca_pair(x: _LogRatios, beta: float) -> Tensor:
    """-log σ(β c) - ½ log σ(-β c) - ½ log σ(-β r)  (Chen et al. 2024, NCA with two answers)."""
    chosen_B, rejected_B = beta * x.chosen_B, beta * x.rejected_B
    return -logsigmoid(chosen_B) - 0.5 * logsigmoid(-chosen_B) - 0.5 * logsigmoid(-rejected_B)


def _sppo_hard(x: _LogRatios, beta: float) -> Tensor:
    """(c - 1/(2β))² + (r + 1/(2β))²  (Wu et al. 2024, eq. 4.7 with win probabilities 1 and 0)."""
    return (x.chosen_B - 0.5 / beta).square() + (x.rejected_B + 0.5 / beta).square()


def _apo_zero(x: _LogRatios, beta: float) -> Tensor:
    """1 - σ(β c) + σ(β r): chosen up, rejected down  (D'Oosterlinck et al. 2024, eq. 7)."""
    return (-beta * x.chosen_B).sigmoid() + (beta * x.rejected_B).sigmoid()


def _apo_down(x: _LogRatios, beta: float) -> Tensor:
    """σ(β c) + 1 - σ(β m): both down, rejected further  (D'Oosterlinck et al. 2024, eq. 8)."""
    return (beta * x.chosen_B).sigmoid() + (-beta * x.margin_B).sigmoid()


def _discopop(x: _LogRatios, beta: float) -> Tensor:
    """-(1-w) log σ(β m) + w exp(-β m), w = σ(β m / τ), τ = 0.05  (Lu et al. 2024, eq. 5)."""
    logit_B = beta * x.margin_B
    # w and the exponential meet in log space: apart they are 0 · inf for a very negative margin.
    exponential_B = (logsigmoid(logit_B / DISCOPOP_TAU) - logit_B).exp()
    return exponential_B - (-logit_B / DISCOPOP_TAU).sigmoid() * logsigmoid(logit_B)


def _smoothed(logit_B: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(logit_B) - smoothing * logsigmoid(-logit_B)


_SMOOTHED: Final[Mapping[str, Callable[[_LogRatios, float, float], Tensor]]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "aot": _aot,
    "aot_pair": _aot_pair,
}
_PLAIN: Final[Mapping[str, Callable[[_LogRatios, float], Tensor]]] = {
    "ipo": _ipo,
    "hinge": _hinge,
    "nca_pair": _nca_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
DPO_KINDS: Final = (*_SMOOTHED, *_PLAIN)


def dpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each pair, by one of DPO_KINDS; margin m = policy gap minus reference gap.

    `aot` and `aot_pair` sort over the batch: entry i is then about the i-th smallest gaps, not about pair i, and the
    loss of a batch is not the sum of the losses of its parts. `exo_pair` reads label_smoothing 0 as EXO_SMOOTHING.

    >>> chosen_B, rejected_B = torch.tensor([-1.6, -1.2]), torch.tensor([-1.2, -1.2])
    >>> dpo(chosen_B, rejected_B, rejected_B, rejected_B, beta=0.05)  # margins -0.4 and 0: -log σ(-0.02), log 2
    tensor([0.7032, 0.6931])
    """
    _check(kind, label_smoothing)
    policy_gap_B = widen(chosen_B) - widen(rejected_B)
    ref_gap_B = widen(ref_chosen_B) - widen(ref_rejected_B)
    x = _LogRatios(
        chosen_B=widen(chosen_B) - widen(ref_chosen_B),
        rejected_B=widen(rejected_B) - widen(ref_rejected_B),
        policy_gap_B=policy_gap_B,
        ref_gap_B=ref_gap_B,
        margin_B=policy_gap_B - ref_gap_B,
    )
    return _SMOOTHED[kind](x, beta, label_smoothing) if kind in _SMOOTHED else _PLAIN[kind](x, beta)


def _check(kind: str, smoothing: float) -> None:
    if kind not in DPO_KINDS:
        raise ConfigError(f"no DPO loss of kind '{kind}'{did_you_mean(kind, DPO_KINDS)}; kinds: {', '.join(DPO_KINDS)}")
    if kind in _PLAIN and smoothing != 0:
        raise ConfigError(
            f"label_smoothing is {smoothing}, but kind '{kind}' does not read it: "
            f"leave it at 0, or take one of {', '.join(_SMOOTHED)}"
        )
    if not 0 <= smoothing <= 0.5 or (kind == "robust" and smoothing == 0.5):
        allowed = "at least 0 and below 0.5" if kind == "robust" else "between 0 and 0.5"
        raise ConfigError(f"label_smoothing must be {allowed} for kind '{kind}', found {smoothing}")


def implicit_rewards(logp_B: Tensor, ref_logp_B: Tensor, *, beta: float) -> Tensor:
    """β (log π - log π_ref): the reward that a DPO policy gives an answer, up to a term of the prompt; detached.

    >>> round(implicit_rewards(torch.tensor([-1.6]), torch.tensor([-1.2]), beta=0.05).item(), 6)
    -0.02
    """
    return beta * (widen(logp_B) - widen(ref_logp_B)).detach()


def tdpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    chosen_kl_B: Tensor,
    rejected_kl_B: Tensor,
    *,
    beta: float,
    alpha: float | None,
) -> Tensor:
    """-log σ(β (m - δ))  (Zeng et al. 2024); kl: Σ_t KL(π_ref || π) over the token positions of an answer.

    alpha None is TDPO1, δ = kl_rejected - kl_chosen; a number is TDPO2, δ = α (kl_rejected - sg(kl_chosen)),
    where sg stops the gradient, so that the KL of the chosen answer is not pushed up.

    >>> one, two, three = torch.tensor([[1.0], [2.0], [3.0]])
    >>> tdpo(two, one, one, one, three, one, beta=1.0, alpha=None)  # β (m - δ) = 1 - (1 - 3) = 3
    tensor([0.0486])
    """
    margin_B = (widen(chosen_B) - widen(rejected_B)) - (widen(ref_chosen_B) - widen(ref_rejected_B))
    chosen_kl_B, rejected_kl_B = widen(chosen_kl_B), widen(rejected_kl_B)
    shift_B = rejected_kl_B - chosen_kl_B if alpha is None else alpha * (rejected_kl_B - chosen_kl_B.detach())
    return -logsigmoid(beta * (margin_B - shift_B))


def cpo(chosen_B: Tensor, rejected_B: Tensor, *, beta: float) -> Tensor:
    """-log σ(β (c - r)) on sums of log-probs: DPO with a uniform reference  (Xu et al. 2024, first term)."""
    return -logsigmoid(beta * (widen(chosen_B) - widen(rejected_B)))


def simpo(chosen_B: Tensor, rejected_B: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log σ(β (c - r) - γ) on length-averaged log-probs  (Meng et al. 2024, eq. 6).

    >>> simpo(torch.tensor([-1.2]), torch.tensor([-1.6]), beta=2.5, gamma=1.0)  # 2.5 · 0.4 - 1 = 0: log 2
    tensor([0.6931])
    """
    return -logsigmoid(beta * (widen(chosen_B) - widen(rejected_B)) - gamma)


def orpo_odds(chosen_B: Tensor, rejected_B: Tensor, *, beta: float) -> Tensor:
    """-β log σ(log odds(c) - log odds(r)), odds = p/(1-p), on length-averaged log-probs  (Hong et al. 2024, eq. 7).

    >>> logp_B = torch.tensor([0.8, 0.5]).log()  # odds 4 and 1; -log σ(log 4) = log(5/4)
    >>> orpo_odds(logp_B[:1], logp_B[1:], beta=1.0)
    tensor([0.2231])
    """
    return -beta * logsigmoid(_log_odds(widen(chosen_B)) - _log_odds(widen(rejected_B)))


def _log_odds(logp_B: Tensor) -> Tensor:
    # A probability that rounds to 1 has infinite odds and a NaN gradient; one rounding step below 1 it has none.
    logp_B = logp_B.clamp(max=-torch.finfo(logp_B.dtype).eps)
    return logp_B - (-logp_B.expm1()).log()


def kto(
    logp_B: Tensor,
    ref_logp_B: Tensor,
    desirable_B: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ (1 - σ(±β (log-ratio - kl))), + for a desirable answer  (Ethayarajh et al. 2024, eq. 8).

    kl is the reference point z0, estimated by the caller over the whole optimiser step; no gradient flows through it,
    and a negative estimate counts as 0.

    >>> kto(torch.zeros(2), torch.zeros(2), torch.tensor([True, False]), torch.tensor(0.0), beta=0.1)
    tensor([0.5000, 0.5000])
    """
    above_B = widen(logp_B) - widen(ref_logp_B) - widen(kl).detach().clamp(min=0)
    good_B, bad_B = (-beta * above_B).sigmoid(), (beta * above_B).sigmoid()
    return torch.where(desirable_B, desirable_weight * good_B, undesirable_weight * bad_B)
