"""Detectors of what the scores mean: leaving the reward model's territory, length, scale."""

from __future__ import annotations

import math
from statistics import fmean

from kedge.monitor.detectors.window import Detector, Sign, Window, trend

REWARD, GOLD, STD = "reward/mean", "gold/mean", "reward/std"


def gold_falls(window: Window, threshold: float) -> Sign | None:
    both = [row for row in window.recent if math.isfinite(row.get(GOLD, math.nan) + row.get(REWARD, math.nan))][-20:]
    early = window.early(REWARD)
    if not window.is_fresh(GOLD) or early is None or len(both) < 10:
        return None
    gold, reward = [row[GOLD] for row in both], [row[REWARD] for row in both]
    is_higher = fmean(reward[-5:]) > early and trend(reward) > -2
    if not is_higher or trend(gold) > -threshold:
        return None
    begin, end = fmean(gold[:5]), fmean(gold[-5:])
    return Sign(
        message=f"gold has fallen from {begin:.3g} to {end:.3g} while the reward is at {fmean(reward[-5:]):.3g}, up "
        f"from {early:.3g}",
        evidence={"gold_before": begin, "gold": end, "reward_at_start": early, "reward": fmean(reward[-5:])},
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
    if mean is None or mean <= threshold:
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


DETECTORS = (
    Detector(
        code="reward.gold_falls",
        reads=(REWARD, GOLD),
        rule=gold_falls,
        says="over up to 20 looks at gold (10 at least): t of its slope < −{threshold:g}, while the reward is "
        "above its start and not falling itself (t > −2)",
        source="overoptimisation (Gao et al. 2022); t of 5 by simulated false alarms",
        cause="the policy exploits the reward model: what it scores and what is wanted have come apart",
        advice="take a checkpoint from before the fall; lower kl.target or raise kl.start; train more reward models",
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
