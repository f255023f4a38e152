"""What a recipe can do about each thing that goes wrong in PPO: one function a cause, from facts to changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.monitor.alarms import Alarm
from kedge.monitor.doctor.recipes import changed, number_at, rounded, scaled, value_at
from kedge.monitor.doctor.records import Change
from kedge.monitor.overoptimisation import Fit

EARLY = 10
"""Steps within which only updates that are far too large can carry a policy away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the causes look at: the recipe, the alarms, and where gold is predicted to peak."""

    settings: Mapping[str, Any]
    signs: Mapping[str, Alarm]
    """The first alarm of each code."""
    peak: Fit | None


def sampling_as_scored(facts: Facts) -> list[Change]:
    why = "log-probs are those of the whole distribution: sampling from a part of it makes them wrong"
    found = changed(facts.settings, "sampling.top_p", 1.0, why, area="generation")
    found += changed(facts.settings, "sampling.top_k", None, why, area="generation")
    if not found and value_at(facts.settings, "memory.dtype") not in (None, "float32"):
        why = "float32 tells a difference of precision from a difference of meaning"
        found += changed(facts.settings, "memory.dtype", "float32", why, area="generation")
    return found


def ended(facts: Facts) -> list[Change]:
    why = "answers that do not end are cut at this length; first make sure that they learn to end"
    found = scaled(facts.settings, "sampling.max_new_tokens", 2, why, area="generation", make=round)
    if value_at(facts.settings, "scores.missing_eos_score") is None:
        why = "an answer without an end should never score as one with it"
        found += changed(facts.settings, "scores.missing_eos_penalty", 1.0, why, area="length")
    return found


def normalised(facts: Facts) -> list[Change]:
    why = "scores of unit variance make the KL coefficient and the value loss mean what they usually do"
    found = changed(facts.settings, "scores.normalise", "scale", why, area="reward scale")
    why = "one extreme score cannot rule a batch"
    return found + changed(facts.settings, "scores.clip", 5.0, why, area="reward scale")


def anchored(facts: Facts) -> list[Change]:
    settings = facts.settings
    if not number_at(settings, "kl.start"):
        found = changed(settings, "kl.start", 0.05, "without a penalty nothing holds the policy", area="kl")
    else:
        found = scaled(settings, "kl.start", 2, "the penalty is too weak for this reward", area="kl")
    if number_at(settings, "kl.limit") is None:
        limit = rounded(2 * (number_at(settings, "kl.target") or 6.0))
        found += changed(settings, "kl.limit", limit, "a budget stops the run before the reward is hacked", area="kl")
    return found


def nearer(facts: Facts) -> list[Change]:
    """Towards the reference: to the predicted peak of gold where there is one, else half way."""
    if not number_at(facts.settings, "kl.start"):  # a coefficient of 0 cannot be steered
        return anchored(facts)
    target, limit = number_at(facts.settings, "kl.target"), number_at(facts.settings, "kl.limit")
    bounds = [one for one in (target, limit) if one is not None]
    if facts.peak is not None and rounded(facts.peak.peak_kl) < min(bounds, default=math.inf):
        why = f"gold is predicted to peak at {facts.peak.peak_kl:.3g} nats"
        found = changed(facts.settings, "kl.target", rounded(facts.peak.peak_kl), why, area="kl")
    elif target is not None:
        found = scaled(facts.settings, "kl.target", 0.5, "the reward holds only nearer to the reference", area="kl")
    else:
        found = []
    return found or anchored(facts)


def slower(facts: Facts) -> list[Change]:
    factor = 10 if is_carried_away(facts) else 3
    why = f"updates are too large; a {'tenth' if factor == 10 else 'third'} is the next try"
    found = scaled(facts.settings, "actor.lr", 1 / factor, why, area="learning rate")
    if "policy.clips_often" in facts.signs and (number_at(facts.settings, "epochs") or 1) > 1:
        why = "fewer passes over the same answers keep the ratio near 1"
        found += changed(facts.settings, "epochs", 1, why, area="learning rate")
    return found


def is_carried_away(facts: Facts) -> bool:
    ran_away = facts.signs.get("kl.running_away")
    return "not_finite" in facts.signs or (ran_away is not None and ran_away.step <= EARLY)


def faster(facts: Facts) -> list[Change]:
    if tight := facts.signs.get("kl.no_room"):
        why = "the best policy under the penalty is then about two nats away: the spread of the scores over two"
        return changed(facts.settings, "kl.start", rounded(float(tight.evidence["std"]) / 2), why, area="kl")
    why = "the policy does not move; look at reward/std first: without a spread there is nothing to learn"
    return scaled(facts.settings, "actor.lr", 3, why, area="learning rate")


def better_critic(facts: Facts) -> list[Change]:
    if "value.worse_than_nothing" in facts.signs:
        return scaled(facts.settings, "critic.lr", 1 / 10, "the critic overshoots", area="learning rate")
    if "value.loss_explodes" in facts.signs:
        return scaled(facts.settings, "critic.lr", 1 / 3, "the critic overshoots", area="learning rate")
    why = "the critic lags behind the returns"
    found = scaled(facts.settings, "critic.lr", 3, why, area="learning rate")
    if number_at(facts.settings, "critic_warmup") == 0:
        why = "let the critic learn alone before the policy listens to it"
        found += changed(facts.settings, "critic_warmup", 5, why, area="learning rate")
    return found


def shorter(facts: Facts) -> list[Change]:
    why = "what length alone earns has to be paid for"
    longest = number_at(facts.settings, "sampling.max_new_tokens")
    if longest is None or value_at(facts.settings, "scores.overlong_buffer") is not None:
        return scaled(facts.settings, "scores.overlong_penalty", 2, why, area="length")
    return changed(facts.settings, "scores.overlong_buffer", max(1, round(longest / 2)), why, area="length")


def more_varied(facts: Facts) -> list[Change]:
    why = "a third of the learning rate keeps the policy from becoming certain too early"
    found = scaled(facts.settings, "actor.lr", 1 / 3, why, area="learning rate")
    if number_at(facts.settings, "loss.policy.entropy") == 0:
        found += changed(facts.settings, "loss.policy.entropy", 0.01, "pay for entropy", area="learning rate")
    return found + changed(facts.settings, "sampling.temperature", 1.0, "explore as the policy is", area="generation")
