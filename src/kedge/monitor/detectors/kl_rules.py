"""Detectors of the distance to the reference, `kl/mean` in nats a sequence."""

from __future__ import annotations

import math
from statistics import fmean

from kedge.monitor.detectors.reward_rules import REWARD, STD
from kedge.monitor.detectors.watchdog import Detector, Sign, Window, noise_of

FLOOR = 10.0
"""Nats that a policy without a target may reach at any speed: the KL of a few hundred tokens after mild tuning."""

KL = "kl/mean"


def over_target(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(KL, 10)
    if mean is None or window.kl_target is None or mean <= threshold * window.kl_target:
        return None
    return Sign(
        message=f"KL has averaged {mean:.3g} nats over 10 steps, {mean / window.kl_target:.2g} times its target",
        evidence={"kl": mean, "target": window.kl_target},
    )


def near_limit(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(KL, 3)
    if mean is None or window.kl_limit is None or mean <= threshold * window.kl_limit:
        return None
    return Sign(
        message=f"KL is at {mean:.3g} nats, {mean / window.kl_limit:.0%} of its limit of {window.kl_limit:g}",
        evidence={"kl": mean, "limit": window.kl_limit},
    )


def least_kl(window: Window) -> float | None:
    """The KL without which the mean reward cannot have moved as far as it has; None where it has not moved.

    A mean of scores that spread by σ under the reference moves by no more than σ √(2 KL) for scores with the tails of a
    normal variable (the transport inequality), so KL ≥ (Δ / σ)² / 2.
    """
    early, std, reward = window.early(REWARD), window.early(STD), window.values(REWARD)
    if early is None or not std or len(reward) < 10 or not window.is_fresh(REWARD):
        return None
    moved = abs(fmean(reward[-5:]) - early)
    return (moved / std) ** 2 / 2 if moved > 6 * noise_of(reward) * math.sqrt(2 / 5) else None


def reference_follows(window: Window, threshold: float) -> Sign | None:
    mean, least = window.mean(KL, 10), least_kl(window)
    if mean is None or least is None or window.num_steps < 20 or not -0.1 < mean < threshold * least:
        return None
    return Sign(
        message=f"the reward has moved as only a KL of at least {least:.2g} nats explains, and KL is {mean:.2g}: the "
        "reference moves with the policy",
        evidence={"kl": mean, "least": least},
    )


def near_zero(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(KL, 10)
    # A reward that has moved was moved by a policy that has.
    if mean is None or window.num_steps < 20 or not -threshold < mean < threshold or least_kl(window) is not None:
        return None
    return Sign(
        message=f"after {window.num_steps} steps KL is {mean:.2g} nats: the policy has not moved",
        evidence={"kl": mean, "steps": window.num_steps},
    )


def not_zero_at_start(window: Window, threshold: float) -> Sign | None:
    if window.num_steps > 1 or not window.is_fresh(KL) or abs(kl := window.values(KL)[-1]) <= threshold:
        return None
    return Sign(
        message=f"KL is {kl:.3g} nats before anything was learnt; policy and reference are the same weights then",
        evidence={"kl": kl},
    )


def no_room(window: Window, threshold: float) -> Sign | None:
    coef, std = window.mean("kl/coef", 5), window.mean("reward/std", 5)
    std = window.score_std if window.score_std is not None else std
    if not coef or not std or (room := std**2 / (2 * coef**2)) >= threshold:
        return None
    return Sign(
        message=f"a coefficient of {coef:.3g} beside scores that spread by {std:.3g} leaves the policy {room:.1g} nats",
        evidence={"coef": coef, "std": std, "room": room},
    )


def running_away(window: Window, threshold: float) -> Sign | None:
    values = window.values(KL)
    if not window.is_fresh(KL) or len(values) < 4:
        return None
    now, before = fmean(values[-3:]), fmean(values[-8:-3])
    floor = 1.5 * window.kl_target if window.kl_target is not None else FLOOR
    if now <= floor or now <= threshold * before:
        return None
    return Sign(
        message=f"KL has gone from {before:.3g} to {now:.3g} nats within a few steps and is still gathering speed",
        evidence={"before": before, "kl": now},
    )


def negative(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(KL, 5)
    if mean is None or mean >= -threshold:
        return None
    return Sign(
        message=f"KL has averaged {mean:.3g} nats over 5 steps; a true KL is never below zero",
        evidence={"kl": mean},
    )


KL_DETECTORS = (
    Detector(
        code="kl.over_target",
        reads=(KL,),
        rule=over_target,
        says="mean of 10 steps > {threshold:g} × `kl.target`",
        source="the controller corrects errors of up to 20 % (Ziegler et al. 2019, section 2.2): 50 % that lasts is "
        "more than it can hold; simulated false alarms",
        cause="the coefficient is too small for this reward, or follows too slowly",
        advice="double kl.start; if it still climbs, lower kl.horizon or actor.lr",
    ),
    Detector(
        code="kl.near_limit",
        reads=(KL,),
        rule=near_limit,
        says="mean of 3 steps > {threshold:g} × `kl.limit`",
        source="the recipe's own budget",
        cause="the KL budget is nearly spent",
        advice="expect a stop or a rollback; raise kl.start to spend the budget more slowly",
    ),
    Detector(
        code="kl.near_zero",
        reads=(KL,),
        rule=near_zero,
        says="after 20 steps, mean of 10 steps within ± {threshold:g} nats, and the reward has not moved",
        source="a policy that learns leaves zero within a few steps (Bai et al. 2022, section 4.3: √KL grows with the "
        "reward from the start); simulated false alarms",
        cause="the policy does not learn: the learning rate is too small, the KL coefficient too large, or the "
        "advantages are all zero",
        advice="look at reward/std (is there anything to learn?), then raise actor.lr threefold, then lower kl.start",
    ),
    Detector(
        code="kl.reference_follows",
        reads=(KL, REWARD, STD),
        rule=reference_follows,
        says="after 20 steps, mean of 10 steps < {threshold:g} × the KL without which the reward cannot have moved as "
        "it has, (Δ / σ)² / 2 with the spread σ of the first 5 steps; only where it has moved by 6 standard errors",
        source="the mean of a sub-Gaussian score moves by at most σ √(2 KL) (Bobkov and Götze 1999)",
        cause="the reference is not frozen: it shares weights with the policy, or is updated with it",
        advice="compare the hash of the reference's weights at two steps; nothing else that KL says can be believed",
    ),
    Detector(
        code="kl.not_zero_at_start",
        reads=(KL,),
        rule=not_zero_at_start,
        says="first step: beyond ± {threshold:g} nats",
        source="policy and reference are the same weights in the first step, so KL is 0 but for rounding",
        cause="the reference is not the policy's start, or log-probs are those of other rows or other tokens",
        advice="compare both roles on one batch; look for shifted masks, permuted rows, another model or template",
    ),
    Detector(
        code="kl.no_room",
        reads=("kl/coef", "reward/std"),
        rule=no_room,
        says="means of 5 steps: `reward/std`² / (2 `kl/coef`²) < {threshold:g} nats (with normalised scores, 1 for the "
        "first)",
        source="the best policy under the penalty is π ∝ π_ref e^(r/β) (Korbak et al. 2022), whose KL is to second "
        "order Var(r) / 2β²: with less than that it is the reference",
        cause="the KL coefficient is too large for the scale of the scores: nothing can be learnt",
        advice="lower kl.start until reward/std² / (2 kl.start²) is a few nats",
    ),
    Detector(
        code="kl.running_away",
        reads=(KL,),
        rule=running_away,
        says="mean of 3 steps > {threshold:g} × the mean of the 5 before, and > 1.5 × `kl.target` (or 10 nats)",
        source="simulated false alarms",
        cause="updates are too large, or nothing holds the policy",
        advice="lower actor.lr threefold if policy/clip_fraction is high too; else raise kl.start",
    ),
    Detector(
        code="kl.negative",
        reads=(KL,),
        rule=negative,
        says="mean of 5 steps < −{threshold:g} nats",
        source="KL ≥ 0; the noise of a mean over n answers with KL k is √(2k/n); simulated false alarms",
        cause="the answers were not sampled from the distribution that is scored: other temperature, top_p or top_k, "
        "other weights, shifted masks, or the log-probs of other rows",
        advice="look at policy/mismatch; sample with top_p 1 and no top_k; check that the reference is the start",
    ),
)
