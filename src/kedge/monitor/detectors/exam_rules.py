"""Detectors of the looks at a policy while it trains: exams that fall (the alignment tax), and a judge's win rate.

Their p-values are those of `exam/NAME/METRIC/worse` and `judge/fallen`; `/twice` is the larger of two looks in a row.
"""

from __future__ import annotations

from statistics import fmean
from typing import Final

from kedge.monitor.detectors.reward_rules import REWARD
from kedge.monitor.detectors.watchdog import Detector, Sign, Window

LARGE: Final = 50
"""A p-value so many times smaller than the threshold is a large step: one look is enough for it."""
_WORSE, _TWICE = "/worse", "/worse/twice"
FALLEN, RATE = "judge/fallen", "judge/win_rate"


def tax(window: Window, threshold: float) -> Sign | None:
    fallen = sorted(
        (p, name.removesuffix(_WORSE))
        for name, p in window.latest.items()
        if name.startswith("exam/")
        and name.endswith(_WORSE)
        and (window.latest.get(name.removesuffix(_WORSE) + _TWICE, 1.0) < threshold or p < threshold / LARGE)
    )
    if not fallen:
        return None
    exams = [_in_words(window, name) for _, name in fallen]
    return Sign(
        message=f"worse than at the start by more than chance: {'; '.join(exams)}",
        evidence={
            key.removeprefix("exam/"): window.latest[key]
            for _, name in fallen
            for key in (name, f"{name}/change", f"{name}{_WORSE}")
        },
    )


def _in_words(window: Window, name: str) -> str:
    now, change = window.latest[name], window.latest[f"{name}/change"]
    low, high = window.latest[f"{name}/change/low"], window.latest[f"{name}/change/high"]
    exam = name.removeprefix("exam/").replace("/", ".")
    return f"{exam} is {now:.3f}, a change of {change:+.3f} [{low:+.3f}, {high:+.3f}]"


def win_rate_falls(window: Window, threshold: float) -> Sign | None:
    early, rewards = window.early(REWARD), window.values(REWARD)
    p, twice = window.latest.get(FALLEN, 1.0), window.latest.get(f"{FALLEN}/twice", 1.0)
    if early is None or not (twice < threshold or p < threshold / LARGE):
        return None
    reward, rate = fmean(rewards[-5:]), window.latest[RATE]
    if reward <= early:
        return None
    low, high = window.latest[f"{RATE}/low"], window.latest[f"{RATE}/high"]
    return Sign(
        message=f"the judge's win rate over the start has fallen to {rate:.1%} [{low:.1%}, {high:.1%}] while the "
        f"reward is at {reward:.3g}, up from {early:.3g}",
        evidence={"win_rate": rate, "p": p, "reward_at_start": early, "reward": reward},
    )


EXAM_DETECTORS = (
    Detector(
        code="exam.tax",
        reads=("exam/*",),
        is_at_looks=True,
        rule=tax,
        says="`exam/NAME/METRIC/worse` < {threshold:g} at two looks in a row, or a fiftieth of that at one: the "
        "p-value of the first metric of an exam being no worse than at the start, item by item, times the number of "
        "exams",
        source="the alignment tax (Askell et al. 2021; Ouyang et al. 2022, section 4.2); at two looks in a row because "
        "a run is looked at often; simulated false alarms",
        cause="the policy pays for the reward with what it could do before",
        advice="raise kl.start or lower kl.target; mix in text to imitate (loss.imitate); take a checkpoint from "
        "before the fall",
    ),
    Detector(
        code="judge.falls",
        reads=("judge/*", REWARD),
        is_at_looks=True,
        rule=win_rate_falls,
        says="`judge/fallen` < {threshold:g} at two looks in a row, or a fiftieth of that at one, while the reward is "
        "above its start: the p-value of the win rate over the start not having fallen from its best look (½ at the "
        "start), prompt by prompt, times the number of looks",
        source="overoptimisation (Gao et al. 2022); simulated false alarms",
        cause="the policy exploits the reward model: its answers score more and are worse in the eyes of the judge",
        advice="take a checkpoint from before the fall; lower kl.target or raise kl.start; train more reward models",
    ),
)
