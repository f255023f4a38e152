"""Detectors of the scores: over-optimisation, length, scale, answers unlike those that the reward model knows."""

from __future__ import annotations

import math
from statistics import fmean

from kedge.monitor.detectors.watchdog import RECENT, Detector, Sign, Window, best_before, noise_of, trend

REWARD, GOLD, STD = "reward/mean", "gold/mean", "reward/std"
AT_LIMIT, GOLD_CORRELATION = "reward/at_limit", "reward/gold_correlation"


def gold_falls(window: Window, threshold: float) -> Sign | None:
    early = window.early(REWARD)
    if not window.is_fresh(GOLD) or early is None:
        return None
    pairs = zip(window.column(GOLD), window.column(REWARD), strict=True)
    scored = [(gold, reward) for gold, reward in pairs if math.isfinite(gold + reward)]
    if len(scored) < 10:
        return None
    gold, reward = [gold for gold, _ in scored], [reward for _, reward in scored]
    is_higher = fmean(reward[-5:]) > early and trend(reward[-20:]) > -2
    best, now = best_before(gold), fmean(gold[-5:])
    if not is_higher or best - now <= threshold * noise_of(gold) * math.sqrt(2 / 5):
        return None
    return Sign(
        message=f"gold has fallen from {best:.3g} to {now:.3g} while the reward is at {fmean(reward[-5:]):.3g}, up "
        f"from {early:.3g}",
        evidence={"gold_before": best, "gold": now, "reward_at_start": early, "reward": fmean(reward[-5:])},
    )


def against_gold(window: Window, threshold: float) -> Sign | None:
    """Only while the window holds the whole run: that gold has never risen tells a wrong reward from one that is
    exploited."""
    gold, reward = window.values(GOLD), window.values(REWARD)
    if window.num_steps > RECENT or not window.is_fresh(GOLD) or min(len(gold), len(reward)) < 10:
        return None
    error, reward_error = (noise_of(scores) * math.sqrt(2 / 5) for scores in (gold, reward))
    third = max(7, len(gold) // 3)
    first, soon, now = fmean(gold[:5]), fmean(gold[third - 2 : third + 3]), fmean(gold[-5:])
    has_only_fallen = soon < first - 2 * error and best_before(gold) < first + 2 * error
    rise = fmean(reward[-5:]) - fmean(reward[:5])
    if not has_only_fallen or now >= first - threshold * error or rise <= threshold * reward_error:
        return None
    return Sign(
        message=f"gold has gone from {first:.3g} to {now:.3g} and was never above its start, while the reward has "
        f"risen by {rise:.3g}",
        evidence={"gold_at_start": first, "gold": now, "reward_rise": rise},
    )


def falls(window: Window, threshold: float) -> Sign | None:
    early, reward = window.early(REWARD), window.values(REWARD)
    if early is None or not window.is_fresh(REWARD) or len(reward) < 10:
        return None
    now = fmean(reward[-5:])
    if now >= early - threshold * noise_of(reward) * math.sqrt(2 / 5):
        return None
    return Sign(
        message=f"the reward itself has fallen from {early:.3g} at the start to {now:.3g}",
        evidence={"start": early, "now": now},
    )


def saturated(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean(AT_LIMIT, 10), window.early(AT_LIMIT)
    if mean is None or early is None or min(mean, early) <= threshold:
        return None
    return Sign(
        message=f"{mean:.0%} of the answers have the highest or the lowest score of their batch, and {early:.0%} had "
        "at the start: the score does not tell them apart",
        evidence={"start": early, "now": mean},
    )


def unrelated(window: Window, threshold: float) -> Sign | None:
    """By the first steps alone: what a reward and gold have in common is used up as the reward is optimised."""
    early = window.early(GOLD_CORRELATION)
    if early is None or abs(early) >= threshold:
        return None
    return Sign(
        message=f"reward and gold correlate at {early:.2f} in the first steps: the scores have nothing to do with what "
        "gold sees in the same answers",
        evidence={"correlation": early},
    )


def constant(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean(STD, 10), window.early(STD)
    if mean is None or early is None or max(mean, early) > threshold:
        return None
    return Sign(
        message=f"every answer has scored the same in all {window.num_steps} steps: there is nothing to learn from",
        evidence={"std": mean},
    )


def length_correlation(window: Window, threshold: float) -> Sign | None:
    mean = window.mean("reward/length_correlation", 10)
    if mean is None or mean <= threshold:
        return None
    return Sign(
        message=f"reward and length correlate at {mean:.2f} over 10 steps: longer answers score more",
        evidence={"correlation": mean},
    )


def scale(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(STD, 5)
    if mean is None or window.score_std is not None or mean <= threshold:
        return None
    return Sign(
        message=f"scores have a standard deviation of {mean:.3g}; beside them a KL penalty of a few nats is nothing",
        evidence={"std": mean},
    )


def scale_drift(window: Window, threshold: float) -> Sign | None:
    return _grown(window, STD, 10, threshold, "the spread of the scores")


def disagreement(window: Window, threshold: float) -> Sign | None:
    return _grown(window, "reward/disagreement", 10, threshold, "the disagreement of the reward models")


def out_of_range(window: Window, threshold: float) -> Sign | None:
    mean = window.mean("reward/out_of_range", 5)
    if mean is None or mean <= threshold:
        return None
    return Sign(
        message=f"{mean:.0%} of the scores are outside of anything that reward training saw", evidence={"share": mean}
    )


def unscored(window: Window, threshold: float) -> Sign | None:
    mean = window.mean("reward/unscored", 5)
    if mean is None or mean <= threshold:
        return None
    return Sign(message=f"{mean:.0%} of the answers got no score over 5 steps", evidence={"share": mean})


def _grown(window: Window, name: str, last: int, threshold: float, what: str) -> Sign | None:
    mean, early = window.mean(name, last), window.early(name)
    if mean is None or early is None or mean <= threshold * early:
        return None
    return Sign(
        message=f"{what} has grown from {early:.3g} at the start to {mean:.3g}", evidence={"start": early, "now": mean}
    )


REWARD_DETECTORS = (
    Detector(
        code="reward.gold_falls",
        reads=(REWARD, GOLD),
        rule=gold_falls,
        says="mean of the last 5 of up to 40 looks at gold (10 at least) below the best mean of 5 before them by more "
        "than {threshold:g} standard errors (noise from the steps between looks), while the reward is above its start "
        "and not falling itself (t of 20 steps > −2)",
        source="overoptimisation (Gao et al. 2022); so many standard errors because the best of 40 looks is a "
        "choice; simulated false alarms",
        cause="the policy exploits the reward model: what it scores and what is wanted have come apart",
        advice="take a checkpoint from before the fall; lower kl.target or raise kl.start; train more reward models",
    ),
    Detector(
        code="reward.against_gold",
        reads=(REWARD, GOLD),
        rule=against_gold,
        says="within the first 40 steps (10 at least): of 5 looks at gold each, the last are below the first by more "
        "than {threshold:g} standard errors, those a third of the way by 2, none above by 2, and the reward is up by "
        "more than {threshold:g}",
        source="where a reward is over-optimised, gold rises first: d (α − β ln d) is steepest at 0 (Gao et al. 2022, "
        "equation 1); simulated false alarms",
        cause="the reward measures something else than gold, or has the wrong sign",
        advice="score ten answers by hand with both; look for chosen and rejected swapped, or a minus that is missing",
    ),
    Detector(
        code="reward.falls",
        reads=(REWARD,),
        rule=falls,
        says="mean of 5 steps below the mean of the first 5 by more than {threshold:g} standard errors (noise from the "
        "steps between them)",
        source="a policy gradient with a small enough step does not lower what it maximises (Schulman et al. 2015); "
        "simulated false alarms",
        cause="the policy is pushed away from what scores well: a wrong sign, or updates that undo each other",
        advice="look at policy/clip_fraction and kl/mean first; where both are calm, look for a wrong sign",
    ),
    Detector(
        code="reward.constant",
        reads=(STD,),
        rule=constant,
        says="mean of 10 steps and mean of the first 5 ≤ {threshold:g}",
        source="the advantage of an answer is its distance from the others: without a spread only the noise of the KL "
        "penalty is left to learn",
        cause="the reward gives every answer the same score",
        advice="score a good and a bad answer by hand; a check that nobody passes needs partial credit or easier "
        "prompts",
    ),
    Detector(
        code="reward.saturated",
        reads=(AT_LIMIT,),
        rule=saturated,
        says="mean of 10 steps and mean of the first 5 > {threshold:g}",
        source="a score at which most answers stand from the start teaches from the others alone; a limit that is "
        "reached by learning is no alarm; simulated false alarms",
        cause="the reward is cut off at a limit, squashed, or a check that hardly any answer fails or passes",
        advice="look at reward/min and reward/max; score without the limit, or use harder (or easier) prompts",
    ),
    Detector(
        code="reward.unrelated",
        reads=(GOLD_CORRELATION,),
        rule=unrelated,
        says="mean of the first 5 looks within ± {threshold:g}",
        source="the noise of a mean of 5 correlations over n answers is 1 / √(5 n): 0.08 for 32; simulated false "
        "alarms",
        cause="the scores belong to other answers, or the reward model reads something else than the answers (another "
        "tokenizer or template)",
        advice="score ten answers one by one and in a batch, and compare; look at the reward's tokenizer and template",
    ),
    Detector(
        code="reward.length_correlation",
        reads=("reward/length_correlation",),
        rule=length_correlation,
        says="mean of 10 steps > {threshold:g}",
        source="reward gains of PPO are mostly gains in length where the two correlate (Singhal et al. 2023); "
        "simulated false alarms",
        cause="the reward model has learnt that longer is better",
        advice="train it with loss.length_control: balance, or add a length penalty to the reward",
    ),
    Detector(
        code="reward.scale",
        reads=(STD,),
        rule=scale,
        says="mean of 5 steps > {threshold:g}",
        source="scores are log-odds: 10 is odds of 22,000 to 1, which no preference data holds",
        cause="the scores are not scaled: the value loss is huge and the KL penalty without weight",
        advice="normalise the scores, or scale kl.start with them",
    ),
    Detector(
        code="reward.scale_drift",
        reads=(STD,),
        rule=scale_drift,
        says="mean of 10 steps > {threshold:g} × the mean of the first 5",
        source="simulated false alarms",
        cause="some answers now score far from the rest: the policy has found texts that the reward model misjudges",
        advice="read the samples with the highest reward; clip the scores; raise kl.start",
    ),
    Detector(
        code="reward.out_of_range",
        reads=("reward/out_of_range",),
        rule=out_of_range,
        says="mean of 5 steps > {threshold:g}",
        source="the range holds every score of reward training; simulated false alarms",
        cause="the answers are unlike anything that the reward model was trained on, so its scores are guesses",
        advice="stop here or lower kl.target; collect preferences on these answers and train the reward model again",
    ),
    Detector(
        code="reward.disagreement",
        reads=("reward/disagreement",),
        rule=disagreement,
        says="mean of 10 steps > {threshold:g} × the mean of the first 5",
        source="members part where they have no data (Coste et al. 2023; Eisenstein et al. 2023); simulated false "
        "alarms",
        cause="the policy has left the reward models' territory",
        advice="combine members by their minimum or mean − std; lower kl.target; collect preferences on these answers",
    ),
    Detector(
        code="reward.unscored",
        reads=("reward/unscored",),
        rule=unscored,
        says="mean of 5 steps > {threshold:g}",
        source="a tenth of the batch lost; simulated false alarms",
        cause="the reward source fails, times out or refuses",
        advice="look at its events; raise its time-out or its number of tries",
    ),
)
