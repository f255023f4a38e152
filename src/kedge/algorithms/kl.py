"""How far the policy is from the reference, per token, and the coefficient that a run pays for it.

Estimates are from one sampled token each; the exact KL over the vocabulary is left out (logits never get here).
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.core.errors import CheckpointError, ConfigError, NumericsError
from kedge.core.loss import widen
from kedge.core.suggest import did_you_mean

Kind = Literal["k1", "k2", "k3", "abs"]

_MAX_ERROR = 0.2

_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap_BT: gap_BT,
    "k2": lambda gap_BT: gap_BT.square() / 2,
    # expm1, because e^x - 1 - x loses every digit for the small gaps that a healthy run has
    "k3": lambda gap_BT: torch.expm1(-gap_BT) + gap_BT,
    "abs": torch.abs,
}


def estimate(logp_BT: Tensor, ref_logp_BT: Tensor, *, kind: Kind) -> Tensor:
    """Per-token estimate of KL(policy || reference) for tokens that the policy sampled, float32 at least.

    With gap = logp - ref_logp:  k1 = gap;  k2 = gap^2 / 2;  k3 = e^(-gap) + gap - 1;  abs = |gap|.
    (Schulman 2020, "Approximating KL Divergence".) k1 and k3 are unbiased, k2 and abs are not; k1 may be negative.
    The gradient of none of them is the gradient of the KL in general: these are numbers to pay and to log.

    Probability 1/2 under the policy, 1/4 under the reference: gap = ln 2 = 0.6931, k3 = 1/2 + 0.6931 - 1.

    >>> logp_BT, ref_logp_BT = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> [round(estimate(logp_BT, ref_logp_BT, kind=kind).item(), 4) for kind in ("k1", "k2", "k3", "abs")]
    [0.6931, 0.2402, 0.1931, 0.6931]
    """
    if kind not in _ESTIMATES:
        raise ConfigError(f"kind: found {kind!r}{did_you_mean(kind, _ESTIMATES)}, expected {', '.join(_ESTIMATES)}")
    return _ESTIMATES[kind](widen(logp_BT) - widen(ref_logp_BT))


@dataclass(slots=True)
class FixedKL:
    """A coefficient that stays.

    >>> kl = FixedKL(0.1)
    >>> kl.update(50.0, 64)
    >>> kl.coef
    0.1
    """

    coef: float

    def __post_init__(self) -> None:
        _check_range("coef", self.coef, self.coef >= 0, "0 or more")

    def update(self, observed: float, n: int) -> None:
        """Takes note of the KL of n sequences; only a non-finite one matters here."""
        _check_observed(observed)

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: Mapping[str, Any]) -> None:
        self.coef = _coef_from(state)


@dataclass(slots=True)
class AdaptiveKL:
    """A coefficient that steers the KL of a sequence to `target` nats (Ziegler et al. 2019, section 2.2).

    error = observed / target - 1, clipped to [-0.2, 0.2];  coef *= 1 + error n / horizon.
    `n` is the number of sequences that `observed` is a mean of, `horizon` is counted in sequences too. The settings
    are not part of the state: a resumed run takes them from its recipe. A coefficient of 0 stays 0.

    Twice the target, 10 of 100 sequences: the error 1 is clipped to 0.2, the coefficient grows by 2 %.

    >>> kl = AdaptiveKL(0.5, target=6.0, horizon=100)
    >>> kl.update(12.0, 10)
    >>> kl.coef
    0.51
    """

    coef: float
    _: KW_ONLY
    target: float
    horizon: float

    def __post_init__(self) -> None:
        _check_range("coef", self.coef, self.coef >= 0, "0 or more")
        _check_range("target", self.target, self.target > 0, "more than 0")
        _check_range("horizon", self.horizon, self.horizon > 0, "more than 0")

    def update(self, observed: float, n: int) -> None:
        """Moves the coefficient after n sequences with a mean KL of `observed` nats."""
        _check_observed(observed)
        error = min(max(observed / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
        factor = 1 + error * n / self.horizon
        if factor <= 0:
            raise ConfigError(
                f"horizon: found {self.horizon} with {n} sequences an update, which would turn the KL coefficient "
                f"to {self.coef * factor:.4g}; use a horizon above {_MAX_ERROR * n:g}, the usual is 10000"
            )
        self.coef *= factor

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: Mapping[str, Any]) -> None:
        self.coef = _coef_from(state)


def _check_range(name: str, value: float, is_allowed: bool, allowed: str) -> None:
    if not is_allowed or not math.isfinite(value):
        raise ConfigError(f"{name}: found {value}, expected a finite number, {allowed}")


def _check_observed(observed: float) -> None:
    if not math.isfinite(observed):
        raise NumericsError(
            f"the observed KL is {observed}; the coefficient was not changed. Look for log-probs that are not finite"
        )


def _coef_from(state: Mapping[str, Any]) -> float:
    coef = state.get("coef")
    if not isinstance(coef, int | float) or not math.isfinite(coef) or coef < 0:
        raise CheckpointError(f"KL state: found coef {coef!r} in {dict(state)}, expected a finite number, 0 or more")
    return float(coef)
