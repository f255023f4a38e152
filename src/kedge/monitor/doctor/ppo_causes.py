"""What goes wrong in PPO, and which signs speak for which cause.

A sign is the code of an alarm, or of an event of the run (`ppo.EVENT_SIGNS`). Specific signs weigh more than those
that every failure has; a negative weight speaks against a cause; settings that explain a sign add to its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kedge.monitor.detectors.policy_rules import USEFUL
from kedge.monitor.doctor import ppo_changes
from kedge.monitor.doctor.diagnosis import Change
from kedge.monitor.doctor.ppo_changes import EARLY, Facts, is_carried_away
from kedge.monitor.doctor.settings_changes import number_at, value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A possible cause. `hints` are weights with sentences, from the settings; they count only beside a sign."""

    code: str
    title: str
    explanation: str
    signs: Mapping[str, float]
    changes: Callable[[Facts], list[Change]]
    hints: Callable[[Facts], list[tuple[float, str]]] = lambda facts: []
    is_refuted: Callable[[Facts], bool] = lambda facts: False
    """Whether the run shows that it is not so, whatever speaks for it."""


def _hints_of_sampling(facts: Facts) -> list[tuple[float, str]]:
    top_p, top_k = number_at(facts.settings, "sampling.top_p"), number_at(facts.settings, "sampling.top_k")
    truncations = [f"top_p {top_p:g}"] if top_p is not None and top_p < 1 else []
    truncations += [f"top_k {top_k:g}"] if top_k is not None else []
    return [(2, f"the recipe samples with {' and '.join(truncations)}")] if truncations else []


def _hints_of_no_anchor(facts: Facts) -> list[tuple[float, str]]:
    start = number_at(facts.settings, "kl.start")
    return [(6, "kl.start is 0: nothing holds the policy to the reference")] if start == 0 else []


def _hints_of_large_steps(facts: Facts) -> list[tuple[float, str]]:
    hints = [(3.0, f"KL ran away within the first {EARLY} steps")] if is_carried_away(facts) else []
    lr = number_at(facts.settings, "actor.lr")
    usual = 3e-4 if value_at(facts.settings, "roles") == "lora" else 3e-5
    return [*hints, (2.0, f"actor.lr is {lr:g}, above the usual {usual:g}")] if lr is not None and lr > usual else hints


def _hints_of_kl_sign(facts: Facts) -> list[tuple[float, str]]:
    if facts.lowest_kl > -FAR_BELOW_ZERO:
        return []
    return [(8.0, f"KL went down to {facts.lowest_kl:.3g} nats: no noise of sampling goes so far")]


def _hints_of_misread(facts: Facts) -> list[tuple[float, str]]:
    hints = [(1.0, "the reward has risen, so its scores can be learnt")] if facts.has_reward_risen else []
    if facts.explained is not None and facts.explained > 0.1:
        hints.append((2.0, f"the critic explains {facts.explained:.2f} of the returns: they depend on the answers"))
    return hints


def _hints_of_unrelated(facts: Facts) -> list[tuple[float, str]]:
    return [] if facts.has_reward_risen else [(2.0, "the reward has not risen: its scores cannot be learnt")]


FAR_BELOW_ZERO = 3.0
"""Nats below zero that only a wrong sign or other log-probs explain."""

SUSPECTS = (
    Suspect(
        code="mismatch",
        title="generator and trainer do not compute the same log-probs",
        explanation="ratios and KL are then wrong from the first token on, and no other number can be trusted",
        signs={"policy.mismatch": 8, "kl.not_zero_at_start": 8, "kl.negative": 4},
        changes=ppo_changes.sample_what_is_scored,
        hints=_hints_of_sampling,
    ),
    Suspect(
        code="kl_sign",
        title="KL has the wrong sign",
        explanation="policy and reference are swapped where log-probs are compared: the penalty pays for distance",
        signs={"kl.negative": 4, "policy.mismatch": -8, "kl.not_zero_at_start": -8},
        changes=lambda facts: [],
        hints=_hints_of_kl_sign,
    ),
    Suspect(
        code="reference_moves",
        title="the reference follows the policy",
        explanation="it shares the policy's weights or is updated with them: KL says nothing, and nothing is an anchor",
        signs={"kl.reference_follows": 12},
        changes=lambda facts: [],
    ),
    Suspect(
        code="unrelated_scores",
        title="the scores have nothing to do with the answers",
        explanation="they belong to other rows, or are noise: what is learnt from them is random",
        signs={
            "reward.unrelated": 5,
            "value.explains_nothing": 2,
            "reward.constant": -10,
            "reward.length_correlation": -5,
        },
        changes=lambda facts: [],
        hints=_hints_of_unrelated,
        is_refuted=lambda facts: "reward.unrelated" not in facts.signs,
    ),
    Suspect(
        code="misread",
        title="the reward model reads something else than the answers",
        explanation="another tokenizer or template, or a part of the text: its scores are of texts that nobody wrote",
        signs={
            "reward.unrelated": 5,
            "reward.out_of_range": 1,
            "value.explains_nothing": -2,
            "reward.constant": -10,
            "reward.length_correlation": -5,
        },
        changes=lambda facts: [],
        hints=_hints_of_misread,
        is_refuted=lambda facts: "reward.unrelated" not in facts.signs,
    ),
    Suspect(
        code="same_prompts",
        title="every iteration asks the same prompts",
        explanation="the policy learns the answers to a few prompts by heart",
        signs={"prompts.repeated": 6},
        changes=lambda facts: [],
    ),
    Suspect(
        code="saturated",
        title="the reward is saturated",
        explanation="most answers stand at one end of the scale from the start: only the others are learnt from",
        signs={"reward.saturated": 6, "reward.constant": -6},
        changes=lambda facts: [],
    ),
    Suspect(
        code="reward_source",
        title="the reward source failed",
        explanation="answers without a score teach nothing, and those that fail are rarely a random part",
        signs={"reward.unscored": 6, "failed.reward": 8, "dropped.reward": 8},
        changes=lambda facts: [],
    ),
    Suspect(
        code="no_signal",
        title="the scores do not tell answers apart",
        explanation="where all answers score the same, only the noise of the KL penalty is learnt from",
        signs={"reward.constant": 7},
        changes=lambda facts: [],
    ),
    Suspect(
        code="wrong_sign",
        title="the policy is pushed the wrong way",
        explanation="reward or advantages have the wrong sign, or the reward measures something else than is wanted",
        signs={
            "reward.falls": 8,
            "reward.against_gold": 5,
            "reward.length_correlation": -3,
            "policy.clips_often": -4,
            "policy.large_steps": -5,
            "policy.entropy_collapse": -6,
        },
        changes=lambda facts: [],
    ),
    Suspect(
        code="no_ends",
        title="the policy does not end its answers",
        explanation="an answer that is cut off is scored at a place where it was not meant to end",
        signs={"answers.truncated": 5, "answers.never_end": 5},
        changes=ppo_changes.let_answers_end,
    ),
    Suspect(
        code="reward_scale",
        title="the scores are on a scale that nothing else fits",
        explanation="beside large scores the KL penalty has no weight, and the critic has far to go",
        signs={"reward.scale": 7, "reward.scale_drift": 1, "value.loss_explodes": 1, "value.gradient_spike": 0.5},
        changes=ppo_changes.normalise_scores,
    ),
    Suspect(
        code="no_anchor",
        title="the KL penalty does not hold the policy",
        explanation="the reward pays more for moving than the penalty costs",
        signs={
            "kl.over_target": 3,
            "kl.running_away": 2,
            "kl.near_limit": 2,
            "kl.limit": 3,
            "reward.gold_falls": 1,
            "reward.out_of_range": 1,
            "answers.repetition": 0.5,
            "answers.alike": 0.5,
        },
        changes=ppo_changes.raise_kl_penalty,
        hints=_hints_of_no_anchor,
    ),
    Suspect(
        code="steps_too_large",
        title="updates of the policy are too large",
        explanation="the learning rate is too high, or there are too many passes over the same answers",
        signs={
            "policy.clips_often": 4,
            "policy.large_steps": 5,
            "kl.running_away": 2,
            "not_finite": 3,
            "dropped.other": 5,
            "policy.gradient_spike": 1,
            "policy.entropy_collapse": 0.5,
            "value.loss_explodes": 0.5,
        },
        changes=ppo_changes.lower_learning_rate,
        hints=_hints_of_large_steps,
    ),
    Suspect(
        code="does_not_learn",
        title="the policy does not move",
        explanation="the learning rate is too small, the KL coefficient too large, or all scores are alike",
        signs={"kl.no_room": 6, "kl.near_zero": 4, "policy.never_clips": 0.5},
        changes=ppo_changes.let_policy_move,
    ),
    Suspect(
        code="critic",
        title="the critic is of no use",
        explanation="advantages are then little but noise",
        signs={
            "value.explains_nothing": 4,
            "value.worse_than_nothing": 4,
            "value.loss_explodes": 2,
            "value.gradient_spike": 1,
            "kl.no_room": -5,
            "kl.running_away": -2,
            "reward.constant": -5,
            "reward.saturated": -3,
            "reward.unrelated": -3,
        },
        changes=ppo_changes.tune_critic,
        is_refuted=lambda facts: facts.explained is not None and facts.explained > USEFUL,
    ),
    Suspect(
        code="length",
        title="the reward pays for length",
        explanation="answers grow because longer ones score more, not because they are better",
        signs={"answers.longer": 3, "reward.length_correlation": 5, "reward.gold_falls": 1},
        changes=ppo_changes.penalise_length,
    ),
    Suspect(
        code="hacking",
        title="the policy exploits the reward model",
        explanation="what is scored and what is wanted have come apart: the reward rises on answers that are worse",
        signs={
            "reward.gold_falls": 4,
            "judge.falls": 4,
            "reward.against_gold": -4,
            "reward.out_of_range": 2,
            "reward.disagreement": 2,
            "reward.scale_drift": 1,
            "answers.repetition": 1.5,
            "answers.alike": 1,
            "answers.less_distinct": 1,
        },
        changes=ppo_changes.lower_kl_target,
    ),
    Suspect(
        code="tax",
        title="the policy unlearns what it could do",
        explanation="the alignment tax: it moves away from the start on things that the reward does not pay for",
        signs={"exam.tax": 4},
        changes=ppo_changes.raise_kl_penalty,
    ),
    Suspect(
        code="collapse",
        title="the policy has lost its variety",
        explanation="it has become certain, so it explores no more and gives much the same answer to everything",
        signs={
            "policy.entropy_collapse": 4,
            "answers.alike": 1.5,
            "answers.less_distinct": 1.5,
            "answers.repetition": 1,
        },
        changes=ppo_changes.keep_entropy,
    ),
)
"""Where two weigh the same, the earlier one is ranked first."""
