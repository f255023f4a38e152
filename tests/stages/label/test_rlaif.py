"""`recipes/rlaif.yaml`: a reward model distilled from a judge beside the judge as reward; the judge is simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import rlaif
from kedge.commands.check import check_recipe
from kedge.commands.compare import compare_runs
from kedge.demo.truth import read_reply, true_preference
from kedge.demo.world import Sizes, make
from kedge.recipe.schema import load_recipe
from simulated_ai import SimulatedJudge

MESSAGE = "Hello. The kettle of order 107 smells of fish. May I have a refund?"
GOOD = "We are very sorry. For the kettle of order 107 you get a refund. Thank you for writing. Yours, the shop."
BAD = "Your message is important to us. We booked a voucher for order 107. Do not write again. Yours, the shop."
FENCE = f"[[{'0' * 32}]]"


def shown(**answers: str) -> str:
    parts = {"conversation": f"user: {MESSAGE}", **{name.replace("_", " "): text for name, text in answers.items()}}
    return "\n".join(f"{FENCE} {name}\n{text}\n{FENCE} end of {name}" for name, text in parts.items())


def test_a_judge_that_notices_everything_sees_the_truth() -> None:
    judge = SimulatedJudge(skill=1.0)
    world = make(3, Sizes(demonstrations=60, pairs=1, prompts=1, heldout=1))["demonstrations"]
    replies = [tuple(message["content"] for message in row["messages"][-2:]) for row in world]
    readings = [(pair, read_reply(*pair)) for pair in replies]
    short = [pair for pair, own in readings if own.num_words <= 32 and own.counts["courtesy"] <= 2]  # no blind spot
    assert len(short) > 30
    for message, text in short:
        assert judge.opinion(message, text, Random(1)) == pytest.approx(true_preference(message, text))
    assert json.loads(judge.reply(shown(answer=GOOD))) == {"score": 9}
    assert json.loads(judge.reply(shown(answer=BAD)))["score"] == round(4 + true_preference(MESSAGE, BAD))
    assert json.loads(judge.reply(shown(answer_A=BAD, answer_B=GOOD))) == {"better": "B"}
    assert json.loads(judge.reply(shown(answer_A=GOOD, answer_B=GOOD))) == {"better": "tie"}


def test_a_judge_that_notices_nothing_has_no_opinion() -> None:
    judge = SimulatedJudge(skill=0.0)
    assert json.loads(judge.reply(shown(answer=GOOD))) == {"score": 4}
    assert json.loads(judge.reply(shown(answer_A=BAD, answer_B=GOOD))) == {"better": "tie"}


def test_both_ways_are_equal_but_for_the_reward_and_the_recipe_is_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_TOKEN", "a-token-of-these-tests")
    recipe = load_recipe(rlaif.RECIPE)
    distilled, direct = (recipe.stages[name].model_dump(exclude={"reward"}) for name in ("distilled", "direct"))
    assert distilled == direct
    report = check_recipe(recipe, offline=True)
    assert [finding.message for finding in report.findings if finding.level in ("warning", "fatal")] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_ways_run_pay_once_and_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", "")  # the benchmark sets its own
    result = rlaif.run_seed(1, tmp_path, rlaif.SMALL)
    assert result.right > 0.7
    assert result.answered == result.paid > 0
    distilled, direct = (result.models[name] for name in rlaif.MODELS[1:])
    assert distilled.calls <= 2 * rlaif.SMALL.prompts  # both orders; equal answers are not asked about
    assert 0 < direct.calls <= 64 * rlaif.SMALL.iterations
    assert distilled.usd > 0 < direct.usd
    assert distilled.kl > 0.05 < direct.kl
    lines = compare_runs([tmp_path / "runs/rlaif" / name for name in rlaif.MODELS[1:]]).lines()
    assert any("ppo on judge judge" in line for line in lines)
    assert any("rewards of different kinds" in line for line in lines)
    assert "direct − distilled" in rlaif.table([1], [result])
