"""What `benchmarks/rounds.py` and `rounds_dpo.py` ask for and read from runs: closed forms, no training."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kedge.core.seeds import seed_for
from kedge.recipe.rounds import rounds_of
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import template_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MESSAGE = "The kettle of order 101 smells of fish. May I have a refund?"
FACT = "For the kettle of order 101 you get a refund."
SPENT = Namespace(labels=30, epochs=3.0, iterations=2, start=0.1, target=8.0)


def read_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return read_module("rounds")


@pytest.fixture
def by_dpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return read_module("rounds_dpo")


def answer(gold: float, reward: float, *, model: str = "ppo", message: int = 1, text: str = FACT) -> dict[str, Any]:
    prompt = [{"role": "user", "content": MESSAGE}]
    scores = {"gold": gold, "reward": reward}
    return {"model": model, "prompt": prompt, "answer": text, "scores": scores, "origin": f"prompts.jsonl:{message}"}


def test_accuracy_is_that_on_the_policy_s_answers_to_one_message_which_differ_in_truth(benchmark: ModuleType) -> None:
    answers = [
        answer(3.0, 1.0),
        answer(3.0, 9.0),  # as good as the first: the two say nothing
        answer(1.0, 5.0),  # liked better than the first, which is wrong, and less than the second, which is right
        answer(0.0, 0.0, message=2),
        answer(5.0, 1.0, message=2),  # right
        answer(9.0, -9.0, model="sft"),  # not the policy's
    ]
    assert benchmark.accuracy(answers) == pytest.approx(2 / 3)


def test_accuracy_of_equal_answers_is_that_of_a_coin(benchmark: ModuleType) -> None:
    assert benchmark.accuracy([answer(3.0, 1.0), answer(3.0, 2.0)]) == 0.5


def test_truth_tells_the_policy_from_the_other_model(benchmark: ModuleType) -> None:
    answers = [answer(1.0, 0.0, model="runs/sft/model"), answer(2.0, 0.0), answer(4.0, 0.0)]
    assert benchmark.truth(answers, "ppo").tolist() == [2.0, 4.0]
    assert benchmark.truth(answers, "sft").tolist() == [1.0]


def test_the_peak_is_the_best_mean_of_five_in_a_row(benchmark: ModuleType) -> None:
    assert benchmark.peak([9.0, 0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 0.0]) == pytest.approx(12 / 5)


def test_faults_are_means_over_the_policy_s_answers(benchmark: ModuleType) -> None:
    twice = f"{FACT} {FACT} Yours, the shop."
    wrong = "We booked a voucher for the kettle. We are very sorry."
    faults = benchmark.faults([answer(0.0, 0.0, text=twice), answer(0.0, 0.0, text=wrong)])
    assert faults == {
        "facts missing": 0.5,
        "facts wrong": 0.5,
        "nonsense": 0.0,
        "repeated": 0.5,
        "courtesies": 0.5,
        "no closing": 0.5,
    }


def test_labels_are_worth_what_their_answers_differ_by(benchmark: ModuleType) -> None:
    polite = f"We are very sorry. {FACT}"

    def label(chosen: str, rejected: str) -> dict[str, Any]:
        said = {"prompt": MESSAGE, "chosen": chosen, "rejected": rejected}
        return {part: [{"role": "any", "content": text}] for part, text in said.items()}

    # Four points and three: one label is right, one mistaken, and one is about equals, which is no better than either.
    labels = [
        label(polite, FACT),
        label(FACT, polite),
        label(FACT, "There will be a refund for the kettle of order 101."),
    ]
    assert benchmark.worth(labels) == {"labels apart": pytest.approx(2 / 3), "labels right": pytest.approx(1 / 3)}


def test_differences_are_told_with_student_s_interval(benchmark: ModuleType) -> None:
    # The mean of 0, 1 and 2 is 1, its standard error 1/√3, and the quantile of Student's t with 2 degrees 4.303.
    assert benchmark.over_seeds([0.0, 1.0, 2.0]) == "+1.00 [-1.48, +3.48], above 0 on 2 of 3 seeds"


def test_the_arms_differ_in_the_second_labels_alone(benchmark: ModuleType, tmp_path: Path) -> None:
    recipe = template_folder() / "rounds.yaml"
    settings = {**benchmark.in_the_demo_s_world(tmp_path), **benchmark.spending(tmp_path, SPENT)}
    two = rounds_of(load_recipe(recipe, {**settings, **benchmark.rounds(5)}))
    one = load_recipe(recipe, {**settings, **benchmark.alone(5, "sft", settings)})
    assert one.settings.seed == seed_for(5, "round", 1) == two.recipe(1).settings.seed
    same = {"from", "models", "files"}
    for stage in ("ask", "prepare", "reward", "ppo", "eval"):
        ours, theirs = (run.stages[stage].model_dump(by_alias=True) for run in (one, two.recipe(2)))
        assert {name: ours[name] for name in ours.keys() - same} == {name: theirs[name] for name in ours.keys() - same}
    asked = {"models", "gold"}
    again, ask = (one.stages[stage].model_dump(by_alias=True) for stage in ("again", "ask"))
    assert {name: again[name] for name in again.keys() - asked} == {name: ask[name] for name in ask.keys() - asked}
    assert again["models"] == ["sft"]
    assert two.recipe(2).stages["ask"].model_dump()["models"] == ["previous.ppo"]


def test_the_arms_of_dpo_differ_in_the_second_labels_and_where_they_go_on_alone(
    by_dpo: ModuleType, tmp_path: Path
) -> None:
    recipe = template_folder() / "rounds-dpo.yaml"
    spent = Namespace(labels=30, epochs=3.0, rate=1e-3, imitate=0.5)
    settings = {**by_dpo.in_the_demo_s_world(tmp_path), **by_dpo.spending(tmp_path, spent)}
    two = rounds_of(load_recipe(recipe, {**settings, **by_dpo.rounds(5)}))
    one = load_recipe(recipe, {**settings, **by_dpo.alone(5, "sft", settings)})
    assert one.settings.seed == seed_for(5, "round", 1) == two.recipe(1).settings.seed
    same = {"from", "models", "files"}
    for stage in ("ask", "prepare", "dpo", "eval"):
        ours, theirs = (run.stages[stage].model_dump(by_alias=True) for run in (one, two.recipe(2)))
        assert {name: ours[name] for name in ours.keys() - same} == {name: theirs[name] for name in ours.keys() - same}
    assert one.stages["prepare"].model_dump()["files"] == ["ask.pairs", "again.pairs"]
    assert [one.stages[stage].model_dump()["models"] for stage in ("ask", "again")] == [["sft"], ["sft"]]
    assert two.recipe(2).stages["ask"].model_dump()["models"] == ["previous.dpo"]
    assert two.recipe(2).stages["dpo"].model_dump(by_alias=True)["from"] == "previous.dpo"
    assert one.stages["dpo"].model_dump()["epochs"] == 3.0


def test_the_truth_of_dpo_is_that_of_its_own_answers(by_dpo: ModuleType) -> None:
    answers = [answer(1.0, 0.0, model="runs/sft/model"), answer(2.0, 0.0, model="dpo")]
    assert by_dpo.truth(answers) == [2.0]
    assert by_dpo.truth(answers, is_policy=False) == [1.0]
