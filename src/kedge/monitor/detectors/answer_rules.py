"""Detectors of the answers: length, truncation, repetition, variety."""

from __future__ import annotations

from kedge.monitor.detectors.window import Detector, Sign, Window


def longer(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("length/mean", 5), window.early("length/mean")
    if mean is None or early is None or mean <= threshold * early:
        return None
    return Sign(
        message=f"answers have grown from {early:.0f} tokens at the start to {mean:.0f}",
        evidence={"start": early, "now": mean},
    )


def truncated(window: Window, threshold: float) -> Sign | None:
    mean = window.mean("length/truncated", 5)
    if mean is None or mean <= threshold:
        return None
    return Sign(message=f"{mean:.0%} of the answers are cut off before they end", evidence={"share": mean})


def repetition(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("repetition/mean", 5), window.early("repetition/mean")
    if mean is None or early is None or mean <= max(threshold, 1.5 * early):
        return None
    return Sign(
        message=f"{mean:.0%} of the 4-grams repeat an earlier one of the same answer, up from {early:.0%}",
        evidence={"start": early, "now": mean},
    )


def less_distinct(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("distinct/mean", 5), window.early("distinct/mean")
    if mean is None or early is None or mean >= threshold * early:
        return None
    return Sign(
        message=f"distinct 2-grams have fallen from {early:.0%} of all at the start to {mean:.0%}",
        evidence={"start": early, "now": mean},
    )


def alike(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("similarity/mean", 5), window.early("similarity/mean")
    if mean is None or early is None or mean <= max(threshold, 1.5 * early):
        return None
    return Sign(
        message=f"two answers now share {mean:.0%} of their 2-grams, up from {early:.0%} at the start",
        evidence={"start": early, "now": mean},
    )


DETECTORS = (
    Detector(
        code="answers.longer",
        reads=("length/mean",),
        rule=longer,
        says="mean of 5 steps > {threshold:g} × the mean of the first 5",
        source="length is the first thing that a reward model is hacked by (Singhal et al. 2023); simulated false "
        "alarms",
        cause="longer answers score more, or end-of-turn tokens are no longer found worth emitting",
        advice="look at reward/length_correlation; add a length penalty, or train the reward model with "
        "loss.length_control",
    ),
    Detector(
        code="answers.truncated",
        reads=("length/truncated",),
        rule=truncated,
        says="mean of 5 steps > {threshold:g}",
        source="a cut answer is scored at a place where it was not meant to end (Huang et al. 2024, the EOS trick)",
        cause="the policy does not end its answers: max_new_tokens is too small, the end-of-turn token is not the one "
        "it learnt, or is masked in training",
        advice="check with kedge check that targets end in the end-of-turn token; raise max_new_tokens; penalise "
        "answers without an end",
    ),
    Detector(
        code="answers.repetition",
        reads=("repetition/mean",),
        rule=repetition,
        says="mean of 5 steps > {threshold:g} and > 1.5 × the mean of the first 5",
        source="degenerate text repeats its n-grams many times as often as people do (Welleck et al. 2020); "
        "simulated false alarms",
        cause="the policy has found a phrase that scores and says it again and again, or has lost its entropy",
        advice="raise kl.start; look at entropy/mean; read the samples with the highest reward",
    ),
    Detector(
        code="answers.less_distinct",
        reads=("distinct/mean",),
        rule=less_distinct,
        says="mean of 5 steps < {threshold:g} × the mean of the first 5",
        source="distinct-n (Li et al. 2016) falls under RLHF (Kirk et al. 2024); simulated false alarms",
        cause="answers use ever fewer words: mode collapse, or a phrase that always scores",
        advice="raise kl.start or lower kl.target; lower actor.lr",
    ),
    Detector(
        code="answers.alike",
        reads=("similarity/mean",),
        rule=alike,
        says="mean of 5 steps > {threshold:g} and > 1.5 × the mean of the first 5",
        source="diversity across prompts falls under RLHF (Kirk et al. 2024); simulated false alarms",
        cause="every prompt gets much the same answer: mode collapse",
        advice="raise kl.start or lower kl.target; lower actor.lr; use more varied prompts",
    ),
)
