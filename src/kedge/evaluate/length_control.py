"""Win rates at equal length, from a judge that may like long answers (Dubois et al. 2024), of several models at once.

For each model m and prompt i, against the same baseline:

    logit P(m wins on i) = θ_m + φ_m tanh(Δ_i / s_m) + ψ_m γ_i

Δ is how much longer the model's answer is and s its standard deviation; γ is the difficulty of the prompt, which all
models share. The rate is the mean of σ(θ + ψ γ_i): with Δ = 0. Difficulties come from a joint fit, then φ and ψ of each
model from a fit with normal priors around the mean of all models, as wide as the models differ (DerSimonian and Laird
1986): where a model's answers are all longer, its own data cannot tell length from quality. Shape letters: M models, N
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.core.stats import Z95, Floats, sigmoid, wilson
from kedge.evaluate.win_rates import Estimate

Bools = NDArray[np.bool_]
PromptResult = tuple[float, float, float]
"""The preference, the length of the model's answer, and that of the baseline's."""
FEWEST_MODELS = 8
"""With fewer, how models differ cannot be learnt from them."""
_WEAK = 1e-2
"""The precision of the prior of θ, and of φ and ψ before they are pooled: it decides only what no data could."""
_JOINT, _DIFFICULTY = 0.05, 0.5
"""Ridge of the joint fit: of θ and φ, and of γ."""
_SLOPE_SD, _DIFFICULTY_SD = 2.0, 0.5
"""Of the priors of φ and ψ where there are few models; their means are 0 and 1."""
_ROUNDS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    preference_MN: Floats
    length_MN: Floats
    """tanh(Δ / s)."""


@dataclass(frozen=True, slots=True)
class _Prior:
    """Of θ, φ and ψ."""

    mean_3: Floats
    precision_3: Floats


@dataclass(frozen=True, slots=True)
class _Fit:
    """θ, φ and ψ of one model."""

    theta_3: Floats
    variance_3: Floats
    """By the curvature, as if preferences were drawn with their probabilities."""
    covariance_33: Floats
    """By what they really scatter (a sandwich)."""


def length_controlled(results: Mapping[str, Sequence[PromptResult]]) -> dict[str, float]:
    """The rate at equal length of each model.

    `results` maps a model to one (preference, length, length of the baseline's answer) a prompt, the same prompts in
    the same order for all; a preference is from 0, the baseline is better, to 1.
    """
    return {model: estimate.mean for model, estimate in length_controlled_estimates(results).items()}


def length_controlled_estimates(results: Mapping[str, Sequence[PromptResult]]) -> dict[str, Estimate]:
    """The same with 95 % intervals, in which prompts are independent and their difficulties are taken as known."""
    if not results:
        return {}
    data, varies_M = _read(results)
    prompts = data.length_MN.shape[1]
    constant = {model: rows[0][0] for model, rows in results.items()}
    estimates = {model: _estimate(rate, 0.0, prompts) for model, rate in constant.items()}
    if not varies_M.any():
        return estimates
    difficulty_N = _difficulty(data)
    prior = _prior(data, difficulty_N)
    varied = (model for model, varies in zip(results, varies_M, strict=True) if varies)
    for model, preference_N, length_N in zip(varied, data.preference_MN, data.length_MN, strict=True):
        estimates[model] = _rate(preference_N, length_N, difficulty_N, prior)
    return estimates


def tells_length(rows: Sequence[PromptResult]) -> bool:
    """Whether length can be told from the model: not where all of its answers are longer by the same."""
    gaps = {length - other for _, length, other in rows}
    return len(gaps) > 1 or gaps == {0.0}


def _rate(preference_N: Floats, length_N: Floats, difficulty_N: Floats, prior: _Prior) -> Estimate:
    """The mean of σ(θ + ψ γ), with the variance of the fit and that of the prompts that were drawn."""
    fit = _fit(preference_N, length_N, difficulty_N, prior)
    p_N = sigmoid(fit.theta_3[0] + fit.theta_3[2] * difficulty_N)
    slope_N = p_N * (1 - p_N)
    gradient_3 = np.array([slope_N.mean(), 0.0, (slope_N * difficulty_N).mean()])
    variance = gradient_3 @ fit.covariance_33 @ gradient_3 + p_N.var() / len(p_N)
    return _estimate(float(p_N.mean()), float(np.sqrt(variance)), len(p_N))


def _estimate(rate: float, error: float, prompts: int) -> Estimate:
    """With an interval on the scale of the logit, which keeps it between 0 and 1; Wilson's where nothing varies."""
    if not error or not 0 < rate < 1:
        low, high = wilson(rate * prompts, prompts)
        return Estimate(mean=rate, low=low, high=high, prompts=prompts)
    logit, reach = float(np.log(rate / (1 - rate))), Z95 * error / (rate * (1 - rate))
    low, high = (float(sigmoid(np.array(end))) for end in (logit - reach, logit + reach))
    return Estimate(mean=rate, low=low, high=high, prompts=prompts)


def _read(results: Mapping[str, Sequence[PromptResult]]) -> tuple[_Data, Bools]:
    """The data of models whose preferences vary, and which these are.

    One that is preferred alike on every prompt, as the baseline against itself, has that rate at any length, and would
    tell the others with certainty that difficulty does not matter.
    """
    counts = {model: len(rows) for model, rows in results.items()}
    if len(set(counts.values())) != 1 or not min(counts.values()):
        raise ValueError(f"all models need a result for the same prompts: found {counts}")
    table_MN3 = np.array([list(rows) for rows in results.values()], dtype=np.float64)
    preference_MN, longer_MN = table_MN3[..., 0], table_MN3[..., 1] - table_MN3[..., 2]
    if not np.isfinite(table_MN3).all() or preference_MN.min() < 0 or preference_MN.max() > 1:
        raise ValueError("preferences are from 0 to 1 and lengths are finite: found something else")
    spread_M1 = longer_MN.std(axis=1, ddof=1, keepdims=True) if longer_MN.shape[1] > 1 else np.zeros((len(results), 1))
    # Where every answer is longer by the same, length cannot be told from the model: nothing is attributed to it.
    length_MN = np.where(spread_M1 > 0, np.tanh(longer_MN / np.where(spread_M1 > 0, spread_M1, 1)), 0.0)
    varies_M = np.ptp(preference_MN, axis=1) > 0
    return _Data(preference_MN=preference_MN[varies_M], length_MN=length_MN[varies_M]), varies_M


def _difficulty(data: _Data) -> Floats:
    """γ of mean 0 from a joint fit with ψ = 1, by Newton steps in θ, φ and γ in turn; 0 for a single model."""
    models, prompts = data.preference_MN.shape
    theta_M, phi_M, gamma_N = np.zeros(models), np.zeros(models), np.zeros(prompts)
    if models == 1:
        return gamma_N

    def rest_and_weight() -> tuple[Floats, Floats]:
        p_MN = sigmoid(theta_M[:, None] + phi_M[:, None] * data.length_MN + gamma_N)
        return data.preference_MN - p_MN, p_MN * (1 - p_MN)

    for _ in range(_ROUNDS):
        rest_MN, weight_MN = rest_and_weight()
        step_theta = _clip((rest_MN.sum(axis=1) - _JOINT * theta_M) / (weight_MN.sum(axis=1) + _JOINT))
        theta_M += step_theta
        rest_MN, weight_MN = rest_and_weight()
        slope_M, curvature_M = (data.length_MN * rest_MN).sum(axis=1), (data.length_MN**2 * weight_MN).sum(axis=1)
        step_phi = _clip((slope_M - _JOINT * phi_M) / (curvature_M + _JOINT))
        phi_M += step_phi
        rest_MN, weight_MN = rest_and_weight()
        step_gamma = _clip((rest_MN.sum(axis=0) - _DIFFICULTY * gamma_N) / (weight_MN.sum(axis=0) + _DIFFICULTY))
        gamma_N += step_gamma
        if max(np.abs(step).max() for step in (step_theta, step_phi, step_gamma)) < 1e-7:
            break
    return gamma_N - gamma_N.mean()


def _clip(step: Floats) -> Floats:
    """Where nearly all outcomes agree the likelihood is flat, and a whole step would go too far."""
    return np.clip(step, -1.0, 1.0)


def _prior(data: _Data, difficulty_N: Floats) -> _Prior:
    if len(data.preference_MN) < FEWEST_MODELS:
        return _Prior(np.array([0.0, 0.0, 1.0]), np.array([_WEAK, _SLOPE_SD**-2, _DIFFICULTY_SD**-2]))
    flat = _Prior(np.zeros(3), np.full(3, _WEAK))
    fits = [_fit(y_N, x_N, difficulty_N, flat) for y_N, x_N in zip(data.preference_MN, data.length_MN, strict=True)]
    mean_3, precision_3 = np.zeros(3), np.full(3, _WEAK)
    for place in (1, 2):
        estimate_M = np.array([fit.theta_3[place] for fit in fits])
        mean_3[place], spread = _pooled(estimate_M, np.array([fit.variance_3[place] for fit in fits]))
        precision_3[place] = 1 / max(spread, 1e-6)
    return _Prior(mean_3, precision_3)


def _pooled(estimate_M: Floats, variance_M: Floats) -> tuple[float, float]:
    """The mean of what is estimated, and its variance between models beyond that of the estimates."""
    weight_M = 1 / variance_M
    mean = (weight_M * estimate_M).sum() / weight_M.sum()
    excess = (weight_M * (estimate_M - mean) ** 2).sum() - (len(estimate_M) - 1)
    between = max(0.0, excess / (weight_M.sum() - (weight_M**2).sum() / weight_M.sum()))
    weight_M = 1 / (variance_M + between)
    return float((weight_M * estimate_M).sum() / weight_M.sum()), float(between)


def _fit(preference_N: Floats, length_N: Floats, difficulty_N: Floats, prior: _Prior) -> _Fit:
    """By Newton's method."""
    inputs_N3 = np.stack([np.ones_like(length_N), length_N, difficulty_N], axis=1)
    theta_3, curvature_33, p_N = prior.mean_3.copy(), np.diag(prior.precision_3), preference_N
    for _ in range(_ROUNDS):
        p_N = sigmoid(inputs_N3 @ theta_3)
        gradient_3 = inputs_N3.T @ (preference_N - p_N) - prior.precision_3 * (theta_3 - prior.mean_3)
        curvature_33 = inputs_N3.T @ (inputs_N3 * (p_N * (1 - p_N))[:, None]) + np.diag(prior.precision_3)
        step_3 = np.clip(np.linalg.solve(curvature_33, gradient_3), -2.0, 2.0)
        theta_3 = theta_3 + step_3
        if np.abs(step_3).max() < 1e-10:
            break
    inverse_33 = np.linalg.inv(curvature_33)
    scores_N3 = inputs_N3 * (preference_N - p_N)[:, None]
    variance_3: Floats = np.diagonal(inverse_33).astype(np.float64)
    return _Fit(theta_3, variance_3, inverse_33 @ (scores_N3.T @ scores_N3) @ inverse_33)
