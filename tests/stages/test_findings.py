"""What the checks of the stages' settings say before a run."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.core.stage import Stage
from kedge.stages.best_of_n.settings import STAGE as BEST_OF_N
from kedge.stages.evaluate.settings import STAGE as EVALUATE
from kedge.stages.reward.settings import STAGE as REWARD


@pytest.mark.parametrize(
    ("stage", "settings", "code", "where", "fix"),
    [
        *(
            (
                REWARD,
                {"kind": "reward", "data": ["a", "b"], "objectives": ["helpful", "brief"], field: files},
                "reward.objectives",
                field,
                "one file for each",
            )
            for field, files in (("data", ["a", "b", "c"]), ("data", "a"), ("heldout", ["c"]))
        ),
        (
            REWARD,
            {"kind": "reward", "data": "a", "lora": {"rank": 2}, "frozen_layers": 1},
            "reward.frozen_layers",
            "frozen_layers",
            "leave out",
        ),
        *(
            (
                REWARD,
                {"kind": "reward", "data": "a", "loss": {"length_control": "residual"}, **soft},
                "reward.labels",
                "loss.length_control",
                "use length_control: balance",
            )
            for soft in ({"labels": "soft"}, {"ties": "half"})
        ),
        (
            BEST_OF_N,
            {"kind": "best_of_n", "prompts": "p", "reward": "r", "method": "rejection", "sampling": {"top_k": 1}},
            "best_of_n.greedy",
            "sampling.top_k",
            "leave top_k out",
        ),
        (
            EVALUATE,
            {"kind": "evaluate", "models": ["a", "b", "a"], "prompts": "p"},
            "evaluate.models",
            "models",
            "name each model once",
        ),
    ],
)
def test_settings_that_cannot_be_are_fatal_before_the_run_and_say_what_to_do(
    stage: Stage, settings: dict[str, Any], code: str, where: str, fix: str
) -> None:
    (finding,) = stage.check(stage.settings.model_validate(settings))
    assert (finding.level, finding.code, finding.where) == ("fatal", code, where)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("given", "is_said"),
    [({}, True), ({"reward": "r"}, False), ({"gold": "g"}, False), ({"reward": "r", "gold": "g"}, False)],
)
def test_an_evaluation_that_nobody_scores_is_told(given: dict[str, str], is_said: bool) -> None:
    settings = EVALUATE.settings.model_validate({"kind": "evaluate", "models": ["a"], "prompts": "p", **given})
    assert any("nobody scores" in line for line in EVALUATE.explain(settings)) == is_said
