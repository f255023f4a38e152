"""The doctor on stages that make passes over fixed data: one planted history for each failure."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kedge.monitor.doctor import Diagnosis, History, diagnose, supervised
from kedge.stages.sft.settings import SFTSettings


def named(diagnosis: Diagnosis) -> str:
    assert diagnosis.verdict.startswith(f"Not healthy: {diagnosis.causes[0].title}, since step ")
    return diagnosis.causes[0].code


def changes(diagnosis: Diagnosis) -> dict[str, tuple[Any, Any]]:
    return {change.key: (change.old, change.new) for change in diagnosis.changes}


def sft(losses: list[float], heldout: dict[int, float] | None = None, **about: Any) -> History:
    settings = SFTSettings.model_validate({"kind": "sft", "data": "d.jsonl", "epochs": 4, **about.pop("settings", {})})
    metrics: list[dict[str, Any]] = [
        {"step": step, "train/loss": loss} | ({"heldout/loss": heldout[step]} if heldout and step in heldout else {})
        for step, loss in enumerate(losses, start=1)
    ]
    known = {"kind": "sft", "events": [], "samples": [], "status": "done", "metrics": metrics}
    return History(**{**known, "settings": settings.model_dump(mode="json", by_alias=True), **about})


FALLING = [3 * 0.97**step + 0.1 * (-1) ** step for step in range(100)]


def test_healthy_imitation() -> None:
    diagnosis = diagnose(sft(FALLING, {50: 1.2, 100: 0.9}))
    assert diagnosis.is_healthy
    assert (diagnosis.changes, diagnosis.notes) == ((), ())
    assert diagnosis.verdict.endswith("heldout/loss ended at 0.9.")


def test_a_loss_that_diverges() -> None:
    diagnosis = diagnose(sft([*FALLING[:60], *(0.5 * 1.1**step for step in range(40))]))
    assert named(diagnosis) == "train.diverged"
    assert changes(diagnosis) == {"optimiser.lr": (2e-5, 7e-6)}
    assert "nothing is held out" in diagnosis.notes[0]


@pytest.mark.parametrize("seed", range(20))
def test_small_batches_whose_losses_scatter_have_not_diverged(seed: int) -> None:
    """Losses of eight comparisons a batch scatter by a third around 0.55."""
    rng = Random(seed)
    diagnosis = diagnose(sft([0.7 - 0.15 * step / 70 + rng.gauss(0, 0.18) for step in range(70)]))
    assert "train.diverged" not in [cause.code for cause in diagnosis.causes]


def test_overfitting_is_cut_short_where_it_began() -> None:
    heldout = {25: 1.6, 50: 1.2, 75: 1.4, 100: 1.9}
    diagnosis = diagnose(sft(FALLING, heldout))
    assert named(diagnosis) == "train.overfitted"
    assert diagnosis.causes[0].since == 50
    assert changes(diagnosis) == {"epochs": (4.0, 2.0), "eval.patience": (None, 3)}
    patient = diagnose(sft(FALLING, heldout, settings={"eval": {"patience": 3}}))
    assert patient.is_healthy
    assert patient.notes == ("early stopping: the held-out loss was best at step 50 (1.2)",)


def test_nothing_learnt() -> None:
    diagnosis = diagnose(sft([2.0 + 0.01 * (-1) ** step for step in range(60)]))
    assert named(diagnosis) == "train.still"
    assert changes(diagnosis) == {"optimiser.lr": (2e-5, 6e-5)}


def test_steps_that_were_dropped() -> None:
    events = [{"step": step, "level": "warning", "code": "step.not_finite", "message": "dropped"} for step in (41, 40)]
    diagnosis = diagnose(sft(FALLING, events=events))
    assert named(diagnosis) == "train.not_finite"
    assert diagnosis.causes[0].since == 40
    assert changes(diagnosis) == {"optimiser.lr": (2e-5, 2e-6)}


def test_preferences_guessed_like_a_coin() -> None:
    history = sft(FALLING, kind="reward")
    history.metrics[-1]["heldout/accuracy"] = 0.49  # type: ignore[index]
    assert named(diagnose(history)) == "train.coin"
    history.metrics[-1]["heldout/accuracy"] = 0.7  # type: ignore[index]
    assert diagnose(history).is_healthy


def reported(value: float, low: float, **about: Any) -> dict[str, Any]:
    return {"is_fit": True, "findings": [], "accuracy": {"value": value, "low": low}, **about}


def test_a_reward_model_is_judged_by_the_interval_of_its_accuracy() -> None:
    flat = [0.6 + 0.01 * (-1) ** step for step in range(60)]
    assert named(diagnose(sft(flat, kind="reward"))) == "train.still"
    assert diagnose(sft(flat, kind="reward", reward_report=reported(0.9, 0.88))).is_healthy
    # 0.56 of 50 pairs might be a half; of 800 pairs it is not.
    few = diagnose(sft(FALLING, kind="reward", reward_report=reported(0.56, 0.42)))
    assert (few.causes[0].code, few.causes[0].weight) == ("train.coin", 6)
    assert "its 95 % interval begins at 42.0%" in few.causes[0].evidence[0]
    assert diagnose(sft(FALLING, kind="reward", reward_report=reported(0.56, 0.525))).is_healthy


def test_what_the_reward_report_complains_of_is_told() -> None:
    findings = [{"level": "warning", "message": "length in disguise"}, {"level": "ok", "message": "fine"}]
    unfit = diagnose(sft(FALLING, kind="reward", reward_report=reported(0.7, 0.6, is_fit=False, findings=findings)))
    assert [(cause.code, cause.evidence) for cause in unfit.causes] == [("train.unfit", ("length in disguise",))]
    usable = diagnose(sft(FALLING, kind="reward", reward_report=reported(0.7, 0.6, findings=findings)))
    assert usable.is_healthy
    assert usable.notes[0] == "length in disguise"


@pytest.mark.parametrize("has_rates", [True, False], ids=["by learning rate", "by count"])
def test_members_that_are_trained_one_after_the_other_do_not_look_like_divergence(has_rates: bool) -> None:
    member = [0.7 * 0.97**step for step in range(40)]
    history = sft([*member, *member, *(0.25 + loss for loss in member)], kind="reward")
    for index, row in enumerate(history.metrics):
        if has_rates:
            row["train/lr"] = min(index % 40 + 1, 40 - index % 40) * 1e-6  # type: ignore[index]
    assert not diagnose(history).is_healthy  # as one learner it would be
    ensemble = History(**{**{name: getattr(history, name) for name in History.__slots__}, "settings": {"members": 3}})
    assert diagnose(ensemble).is_healthy


def test_the_ends_of_the_losses_are_those_that_the_report_tells() -> None:
    metrics = [{"step": step, "train/loss": 30.0 - step} for step in range(1, 21)]
    told = History(kind="sft", status="done", settings={}, metrics=metrics, events=[], samples=[])
    assert supervised.story(told) == "train/loss went from 28.5 to 10.5 in 20 steps"


def test_a_heldout_loss_that_ends_above_its_start_is_worth_a_note() -> None:
    def notes(*losses: float, **settings: Any) -> tuple[str, ...]:
        metrics = [{"step": 10 * at, "heldout/loss": loss} for at, loss in enumerate(losses)]
        told = History(kind="preference", status="done", settings=settings, metrics=metrics, events=[], samples=[])
        return tuple(line for line in diagnose(told).notes if "before training" in line)

    (note,) = notes(25.0, 24.0, 25.9)
    assert note.startswith("heldout/loss is 25.9 and was 25 before training")
    assert notes(25.0, 26.0, 20.1) == notes(25.0) == notes(25.0, 25.9, eval={"patience": 2}) == ()
