"""Exams that fall and a judge's win rate that falls: found where they do, and hardly ever where nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kedge.evaluate.judged import Judged
from kedge.evaluate.looks import worse
from kedge.exams.changes import exam_metrics
from kedge.exams.exam import Metric
from kedge.exams.rows import ItemRow
from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors import CATALOGUE, DetectorSettings, Watchdog
from kedge.stages.rl.looks import judge_metrics

Only = Callable[[str], DetectorSettings]
SIZES = (48, 42, 40, 40, 24, 80)
"""Items of the main metrics of the set `quick`."""
RUNS, LOOKS = 200, 10
EVERY = 50


class Questions:
    """An exam of which only the metrics are read."""

    title = licence = items_hash = ""

    def __init__(self, place: int) -> None:
        self.name = f"exam-{place}"
        self.metrics = {"right": Metric(better="less" if place % 2 else "more", summary="")}


def rows(exam: str, scores: Sequence[float]) -> list[ItemRow]:
    return [
        ItemRow(exam=exam, metric="right", item=str(n), cluster=str(n), model="policy", score=score, answer="", seed=0)
        for n, score in enumerate(scores)
    ]


def looks(rng: np.random.Generator, sizes: Sequence[int], *, worse_from: int = 99) -> Iterator[dict[str, float]]:
    """The metrics of each look at a model whose items are right with probabilities of their own; those of the first
    exam are lower from a look on."""
    exams = [Questions(place) for place in range(len(sizes))]
    right = [rng.beta(1, 1, size) for size in sizes]

    def drawn(drop: float) -> list[ItemRow]:
        chances = [right[0] - drop, *right[1:]]
        scores = [(rng.random(len(chance)) < chance).astype(float).tolist() for chance in chances]
        return [row for exam, own in zip(exams, scores, strict=True) for row in rows(exam.name, own)]

    start, before = drawn(0.0), dict[str, float]()
    for number in range(LOOKS):
        before = exam_metrics(exams, drawn(0.4 if number >= worse_from else 0.0), start, before)  # pyright: ignore
        yield before


def alarms(settings: DetectorSettings, seen: Iterator[dict[str, float]]) -> list[Alarm]:
    """Of a run with a reward that rises and a look every fifty steps."""
    watchdog = Watchdog(CATALOGUE, settings, kl_target=None, kl_limit=None)
    found: list[Alarm] = []
    for number, look in enumerate(seen, start=1):
        for step in range((number - 1) * EVERY + 1, number * EVERY):
            # Only what comes shortly before a look can matter to it; the steps between are not needed.
            if step <= 12 or step > number * EVERY - 12:
                found += watchdog.observe(step, {"reward/mean": step / 100})
        found += watchdog.observe(number * EVERY, {"reward/mean": number / 2, **look})
    return found


def p_values(rng: np.random.Generator, sizes: Sequence[int], *, drop: float = 0.0) -> Iterator[dict[str, float]]:
    """What the detector reads of looks at a model that stays as it is, or that has lost some chance of each item."""
    right = [rng.beta(1, 1, size) for size in sizes]
    start = [(rng.random(len(chance)) < chance).astype(float) for chance in right]
    last = [1.0] * len(sizes)
    for _ in range(LOOKS):
        now = [(rng.random(len(chance)) < chance - drop).astype(float) for chance in right]
        look: dict[str, float] = {}
        for place in range(len(sizes)):
            p = worse(start[place].tolist(), now[place].tolist(), comparisons=len(sizes))
            name = f"exam/{place}/right"
            look |= {f"{name}/worse": p, f"{name}/worse/twice": max(p, last[place])}
            look |= dict.fromkeys((name, f"{name}/change", f"{name}/change/low", f"{name}/change/high"), 0.0)
            last[place] = p
        yield look


def is_alarmed(seen: Iterator[dict[str, float]]) -> bool:
    watchdog = Watchdog(CATALOGUE, DetectorSettings(), kl_target=None, kl_limit=None)
    found = [alarm for step, look in enumerate(seen, 1) for alarm in watchdog.observe(step, look)]
    return any(alarm.code == "exam.tax" for alarm in found)


@pytest.mark.parametrize("sizes", [SIZES, pytest.param((300,), marks=pytest.mark.slow)], ids=["quick", "one exam"])
def test_equal_models_hardly_ever_raise_an_alarm(sizes: Sequence[int]) -> None:
    assert sum(is_alarmed(p_values(np.random.default_rng(seed), sizes)) for seed in range(RUNS)) <= 0.05 * RUNS
    lost = [is_alarmed(p_values(np.random.default_rng(seed), sizes, drop=0.4)) for seed in range(20)]
    assert sum(lost) >= 18  # and what is lost is found


def judged(preferences: Sequence[float]) -> list[Judged]:
    return [Judged(prompt=n, as_first=p, as_second=p, length=9, baseline_length=9) for n, p in enumerate(preferences)]


def verdicts(rng: np.random.Generator, *, prompts: int, fall_from: int = 99) -> Iterator[dict[str, float]]:
    """A judge that prefers the policy as often as the start, until it hardly does."""
    luck, earlier, before = rng.normal(0.5, 0.2, prompts), list[dict[int, float]](), dict[str, float]()
    for number in range(LOOKS):
        chance = luck - (0.35 if number >= fall_from else 0.0)
        wins = (rng.random(prompts) < chance).astype(float)
        preferences = np.where(rng.random(prompts) < 0.3, 0.5, wins).tolist()
        before = judge_metrics(judged(preferences), earlier, before)
        earlier.append(dict(enumerate(preferences)))
        yield before


@pytest.mark.slow
def test_a_judge_who_sees_no_difference_hardly_ever_raises_an_alarm() -> None:
    def is_fallen(look: dict[str, float]) -> bool:
        return look["judge/fallen/twice"] < 0.025 or look["judge/fallen"] < 0.0005

    runs = [any(map(is_fallen, verdicts(np.random.default_rng(seed), prompts=40))) for seed in range(RUNS // 2)]
    assert sum(runs) <= 0.05 * len(runs)


def test_an_exam_that_falls_is_named_once_with_its_numbers(only: Only) -> None:
    found = alarms(only("exam.tax"), looks(np.random.default_rng(3), (300, 40), worse_from=4))
    assert [alarm.code for alarm in found] == ["exam.tax"]  # once, though it stays down for five more looks
    (alarm,) = found
    assert alarm.step in (5 * EVERY, 6 * EVERY)  # a large step at the first look, else at the second
    assert alarm.message.startswith("worse than at the start by more than chance: exam-0.right is 0.")
    assert "[-0." in alarm.message
    assert alarm.evidence["exam-0/right/change"] < 0  # pyright: ignore[reportOperatorIssue]
    assert "raise kl.start" in alarm.advice


def test_less_of_what_is_better_the_less_is_no_loss() -> None:
    exam = Questions(1)
    start, now = rows("exam-1", [1.0] * 30), rows("exam-1", [0.0] * 30)
    better = exam_metrics([exam], now, start)  # pyright: ignore[reportArgumentType]
    assert better["exam/exam-1/right/change"] == -1.0
    assert better["exam/exam-1/right/worse"] == pytest.approx(1.0)
    lost = exam_metrics([exam], start, now)  # pyright: ignore[reportArgumentType]
    assert lost["exam/exam-1/right/worse"] < 1e-6


def test_a_win_rate_that_falls_while_the_reward_rises_is_overoptimisation(only: Only) -> None:
    found = alarms(only("judge.falls"), verdicts(np.random.default_rng(5), prompts=60, fall_from=5))
    assert [alarm.code for alarm in found] == ["judge.falls"]
    assert found[0].step in (6 * EVERY, 7 * EVERY)
    assert "while the reward is at" in found[0].message


def test_without_a_rising_reward_the_judge_says_nothing(only: Only) -> None:
    watchdog = Watchdog(CATALOGUE, only("judge.falls"), kl_target=None, kl_limit=None)
    fallen = {"judge/fallen": 1e-9, "judge/fallen/twice": 1e-9, "judge/win_rate": 0.1}
    fallen |= {"judge/win_rate/low": 0.05, "judge/win_rate/high": 0.2}
    for step in range(1, 20):
        assert watchdog.observe(step, {"reward/mean": -step, **(fallen if step > 12 else {})}) == []
