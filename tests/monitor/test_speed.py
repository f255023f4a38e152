"""Where the time goes: the slowest part with the setting that moves it, and the process that the others wait for."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.core.world import Spent
from kedge.monitor.doctor import Diagnosis, History, diagnose
from kedge.monitor.doctor.speed import process_times
from kedge.recipe.together import time_metrics
from kedge.stages.ppo.settings import PPOSettings
from kedge.stages.sft.settings import SFTSettings

LOSSES = [3 * 0.9**step for step in range(6)]


def sft(times: dict[str, float], *, steps: int = 6, **settings: Any) -> Diagnosis:
    given = SFTSettings.model_validate({"kind": "sft", "data": "d.jsonl", **settings})
    lines = [{"step": step, "train/loss": loss, **times} for step, loss in enumerate(LOSSES[:steps], start=1)]
    return diagnose(_history("sft", lines, given.model_dump(mode="json", by_alias=True)))


def ppo(times: dict[str, float], **settings: Any) -> Diagnosis:
    given = PPOSettings.model_validate({"kind": "ppo", "reward": "reward", "prompts": "p.jsonl", **settings})
    lines = [{"step": step, "kl/mean": 0.1, "reward/mean": step / 6, **times} for step in range(1, 7)]
    return diagnose(_history("ppo", lines, given.model_dump(mode="json", by_alias=True)))


def _history(kind: str, lines: list[dict[str, Any]], settings: dict[str, Any]) -> History:
    return History(kind=kind, metrics=lines, events=[], samples=[], settings=settings, status="done")


def of_two(busy: tuple[float, float], waiting: tuple[float, float]) -> dict[str, float]:
    pairs = zip(busy, waiting, strict=True)
    return time_metrics([Spent(busy=own, communicating=0.5, waiting=idle) for own, idle in pairs])


RL = {"time/step": 10.0, "time/generate": 2.0, "time/judge": 1.0, "time/update": 6.0, "time/save": 1.0}


@pytest.mark.parametrize(
    ("times", "settings", "words"),
    [
        (RL, {"micro_batch": 4}, "learning: 60 % of the time; to move it: `micro_batch`"),
        (RL, {"micro_batch": "auto", "epochs": 4}, "learning: 60 % of the time; to move it: `epochs`"),
        ({**RL, "time/critic_update": 4.0}, {}, "learning of the critic: 40 % of the time"),
        ({**RL, "time/critic_update": 2.0, "time/policy_update": 2.0}, {}, "learning: 60 % of the time"),
        ({**RL, "time/generate": 7.0}, {}, "sampling answers: 70 % of the time; to move it: `memory.generate_rows`"),
        (
            {**RL, "time/judge": 7.0, "time/policy_logprobs": 5.0},
            {},
            "log-probs of the policy: 50 % of the time; to move it: `loss.policy.old_logprobs`",
        ),
        ({**RL, "time/save": 8.0}, {}, "saving checkpoints: 80 % of the time; to move it: `checkpoints.every`"),
        ({**RL, "time/gold_score": 8.0}, {}, "the gold source: 80 % of the time; to move it: `logging.gold_every`"),
    ],
)
def test_the_slowest_part_is_named_with_its_share_and_a_setting(
    times: dict[str, float], settings: dict[str, Any], words: str
) -> None:
    diagnosis = ppo(times, **settings)
    assert diagnosis.is_healthy
    assert words in diagnosis.notes[-1]


def test_stages_over_fixed_data_have_parts_too() -> None:
    diagnosis = sft({"time/step": 4.0, "time/data": 0.5, "time/update": 1.0, "time/evaluate": 2.0})
    assert diagnosis.notes[-1] == (
        "the slowest part of a step is held-out measurements: 50 % of the time; to move it: `eval.every` (measure less "
        "often)"
    )


@pytest.mark.parametrize(("times", "steps"), [({"time/step": 4.0}, 6), ({"time/step": 4.0, "time/update": 3.0}, 2)])
def test_nothing_is_said_of_parts_that_were_not_measured_or_of_too_few_steps(
    times: dict[str, float], steps: int
) -> None:
    assert not any("slowest" in note for note in sft(times, steps=steps).notes)


def test_processes_that_are_about_equal_are_no_news() -> None:
    diagnosis = sft(of_two((5.0, 5.4), (0.5, 0.1)))
    assert diagnosis.notes[-1] == "its 2 processes are busy 87 %, communicating 8 % and waiting 5 % of the time"
    assert diagnosis.verdict.endswith("in 6 steps.")


def test_the_process_that_the_others_wait_for_is_named() -> None:
    diagnosis = sft(of_two((5.0, 7.0), (2.0, 0.0)))
    assert diagnosis.is_healthy
    assert diagnosis.notes[-1].startswith("process 1 keeps the others waiting: it is busy 40 % longer than they are; ")
    assert "But" not in diagnosis.verdict
    assert "`checkpoints.every`" in sft(of_two((7.0, 5.0), (0.0, 2.0))).notes[-1]


def test_much_waiting_is_in_the_verdict_of_a_run_that_stays_healthy() -> None:
    diagnosis = sft(of_two((2.0, 9.0), (7.0, 0.0)))
    assert diagnosis.is_healthy
    assert " But its processes wait for each other 37 % of the time: process 1 keeps " in diagnosis.verdict
    alternating = sft(of_two((5.0, 5.0), (4.0, 4.0)))
    assert " But its processes wait for each other 42 % of the time: no single one is slower" in alternating.verdict


def test_of_a_run_that_was_resumed_on_fewer_processes_those_that_are_left_are_told() -> None:
    three = time_metrics([Spent(busy=9.0, communicating=1.0, waiting=rank) for rank in range(3)])
    two = of_two((4.0, 4.0), (1.0, 1.0))
    assert process_times([three, three, {"step": 3.0}, two, two]) == [
        Spent(busy=8.0, communicating=1.0, waiting=2.0),
        Spent(busy=8.0, communicating=1.0, waiting=2.0),
    ]
    assert process_times([{"time/step": 3.0}]) == []
