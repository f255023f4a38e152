"""Changes of the recipe against each cause of a failure in PPO: one function a cause, from facts to changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.monitor.alarms import Alarm
from kedge.monitor.doctor.diagnosis import Change
from kedge.monitor.doctor.settings_changes import changed, number_at, rounded, scaled, value_at

EARLY = 10
"""Steps within which KL runs away only where updates are far too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What causes and changes are derived from: the settings, the alarms, and where gold peaks."""

    settings: Mapping[str, Any]
    signs: Mapping[str, Alarm]
    """The first alarm of each code."""
    explained: float | None
    """Mean of the last ten explained variances of the critic; None without a critic."""
    lowest_kl: float
    """The lowest mean of five neighbouring KLs."""
    has_reward_risen: bool
    peak: float | None
    """The KL at which gold peaks; None where it is not known."""


def sample_what_is_scored(facts: Facts) -> list[Change]:
    why = "log-probs are those of the whole distribution: sampling from a part of it makes them wrong"
    changes = changed(facts.settings, "sampling.top_p", 1.0, why, area="generation")
    changes += changed(facts.settings, "sampling.top_k", None, why, area="generation")
    if not changes and value_at(facts.settings, "memory.dtype") not in (None, "float32"):
        why = "float32 tells a difference of precision from a difference of meaning"
        changes += changed(facts.settings, "memory.dtype", "float32", why, area="generation")
    return changes


def let_answers_end(facts: Facts) -> list[Change]:
    why = "answers that do not end are cut at this length; first make sure that they learn to end"
    changes = scaled(facts.settings, "sampling.max_new_tokens", 2, why, area="generation", make=round)
    if value_at(facts.settings, "scores.missing_eos_score") is None:
        why = "an answer without an end should never score as one with it"
        changes += changed(facts.settings, "scores.missing_eos_penalty", 1.0, why, area="length")
    return changes


def normalise_scores(facts: Facts) -> list[Change]:
    why = "scores of unit variance make the KL coefficient and the value loss mean what they usually do"
    changes = changed(facts.settings, "scores.normalise", "scale", why, area="reward scale")
    why = "one extreme score cannot rule a batch"
    return changes + changed(facts.settings, "scores.clip", 5.0, why, area="reward scale")


def raise_kl_penalty(facts: Facts) -> list[Change]:
    settings = facts.settings
    if not number_at(settings, "kl.start"):
        changes = changed(settings, "kl.start", 0.05, "without a penalty nothing holds the policy", area="kl")
    else:
        changes = scaled(settings, "kl.start", 2, "the penalty is too weak for this reward", area="kl")
    if number_at(settings, "kl.limit") is None:
        limit = rounded(2 * (number_at(settings, "kl.target") or 6.0))
        changes += changed(settings, "kl.limit", limit, "a budget stops the run before the reward is hacked", area="kl")
    return changes


def lower_kl_target(facts: Facts) -> list[Change]:
    """To the predicted peak of gold where there is one below the bounds of the recipe, else to half."""
    if not number_at(facts.settings, "kl.start"):  # a coefficient of 0 stays 0 under the controller
        return raise_kl_penalty(facts)
    target, limit = number_at(facts.settings, "kl.target"), number_at(facts.settings, "kl.limit")
    bounds = [bound for bound in (target, limit) if bound is not None]
    if facts.peak is not None and rounded(facts.peak) < min(bounds, default=math.inf):
        why = f"gold peaks at {facts.peak:.3g} nats"
        changes = changed(facts.settings, "kl.target", rounded(facts.peak), why, area="kl")
    elif target is not None:
        changes = scaled(facts.settings, "kl.target", 0.5, "the reward holds only nearer to the reference", area="kl")
    else:
        changes = []
    return changes or raise_kl_penalty(facts)


def lower_learning_rate(facts: Facts) -> list[Change]:
    factor = 10 if is_carried_away(facts) else 3
    why = f"updates are too large; a {'tenth' if factor == 10 else 'third'} is the next try"
    changes = scaled(facts.settings, "actor.lr", 1 / factor, why, area="learning rate")
    if "policy.clips_often" in facts.signs and (number_at(facts.settings, "epochs") or 1) > 1:
        why = "fewer passes over the same answers keep the ratio near 1"
        changes += changed(facts.settings, "epochs", 1, why, area="learning rate")
    return changes


def is_carried_away(facts: Facts) -> bool:
    """Whether a number overflowed, or KL ran away within the first `EARLY` steps."""
    ran_away = facts.signs.get("kl.running_away")
    return "not_finite" in facts.signs or (ran_away is not None and ran_away.step <= EARLY)


def let_policy_move(facts: Facts) -> list[Change]:
    """A smaller KL coefficient where it leaves no room, else a larger learning rate."""
    if no_room := facts.signs.get("kl.no_room"):
        why = "the best policy under the penalty is then about two nats away: the spread of the scores over two"
        return changed(facts.settings, "kl.start", rounded(float(no_room.evidence["std"]) / 2), why, area="kl")
    why = "the policy does not move; look at reward/std first: without a spread there is nothing to learn"
    return scaled(facts.settings, "actor.lr", 3, why, area="learning rate")


def tune_critic(facts: Facts) -> list[Change]:
    if "value.worse_than_nothing" in facts.signs:
        return scaled(facts.settings, "critic.lr", 1 / 10, "the critic overshoots", area="learning rate")
    if "value.loss_explodes" in facts.signs:
        return scaled(facts.settings, "critic.lr", 1 / 3, "the critic overshoots", area="learning rate")
    why = "the critic lags behind the returns"
    changes = scaled(facts.settings, "critic.lr", 3, why, area="learning rate")
    if number_at(facts.settings, "critic_warmup") == 0:
        why = "let the critic learn alone before the policy listens to it"
        changes += changed(facts.settings, "critic_warmup", 5, why, area="learning rate")
    return changes


def penalise_length(facts: Facts) -> list[Change]:
    why = "what length alone earns has to be paid for"
    max_tokens = number_at(facts.settings, "sampling.max_new_tokens")
    if max_tokens is None or value_at(facts.settings, "scores.overlong_buffer") is not None:
        return scaled(facts.settings, "scores.overlong_penalty", 2, why, area="length")
    return changed(facts.settings, "scores.overlong_buffer", max(1, round(max_tokens / 2)), why, area="length")


def keep_entropy(facts: Facts) -> list[Change]:
    why = "a third of the learning rate keeps the policy from becoming certain too early"
    changes = scaled(facts.settings, "actor.lr", 1 / 3, why, area="learning rate")
    if number_at(facts.settings, "loss.policy.entropy") == 0:
        changes += changed(facts.settings, "loss.policy.entropy", 0.01, "pay for entropy", area="learning rate")
    return changes + changed(facts.settings, "sampling.temperature", 1.0, "explore as the policy is", area="generation")
