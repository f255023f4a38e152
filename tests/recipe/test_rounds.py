"""A recipe with rounds: what `previous.X` becomes, what is done once, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_rounds import write_rounds
from wrong_rounds import CASES, Wrong, attempt

from kedge.commands.checks.rounds import round_lines
from kedge.core.errors import ConfigError
from kedge.recipe.data_inputs import files_to_read
from kedge.recipe.rounds import Rounds, rounds_of
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import template_folder
from kedge.recipe.wiring import EARLIER, connect


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return rounds_of(load_recipe(write_rounds(tmp_path_factory.mktemp("rounds"), rounds={"count": 3})))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_wrong_rounds_are_refused_with_words(case: Wrong) -> None:
    assert attempt(case) is None


def test_previous_without_rounds_is_refused(tmp_path: Path) -> None:
    file = write_rounds(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "rounds": None}))
    with pytest.raises(ConfigError, match=r"'previous.ppo' is what the round before has made, and the recipe has no"):
        connect(load_recipe(file))


def test_in_round_1_previous_is_what_first_says(rounds: Rounds) -> None:
    stages = rounds.recipe(1).resolved()["stages"]
    assert stages["ask"]["models"] == ["sft"]  # once, though both of its names are sft
    assert stages["ppo"]["from"] == "sft"
    assert stages["eval"]["models"] == ["sft", "ppo"]
    assert stages["drift"]["previous_reward"] is None


def test_what_depends_on_no_earlier_round_is_done_once_and_read_from_round_1(rounds: Rounds) -> None:
    assert rounds.once == ("sft",)
    assert connect(rounds.recipe(1)).order == ("sft", "ask", "prepare", "reward", "ppo", "eval", "drift")
    plan = connect(rounds.recipe(3))
    assert plan.order == ("ask", "prepare", "reward", "ppo", "eval", "drift")
    homes = {link.value: link.home for link in plan.links["ask"] if link.stage}
    assert homes == {"sft": "../round-1/sft", "previous.ppo": "../round-2/ppo"}


def test_rounds_have_seeds_of_their_own(rounds: Rounds) -> None:
    assert len({rounds.recipe(number).settings.seed for number in (1, 2, 3)}) == 3
    assert {rounds.recipe(number).stages["drift"].model_dump()["answer_seed"] for number in (1, 2, 3)} == {5}


def test_labels_of_earlier_rounds_are_added_with_the_weight_of_their_age(rounds: Rounds) -> None:
    links = connect(rounds.recipe(3)).links["reward"]
    data = [(link.value, link.weight) for link in links if link.field == "data"]
    assert data == [("prepare.train", None), ("round-1.prepare.train", 0.25), ("round-2.prepare.train", 0.5)]
    assert [link.home for link in links if link.field == EARLIER] == ["../round-1/prepare", "../round-2/prepare"]
    assert rounds.recipe(3).resolved()["stages"]["reward"]["weights"] == "round_weight"
    assert rounds.recipe(1).resolved()["stages"]["reward"]["weights"] is None


def test_without_keep_only_the_round_s_own_labels_are_learnt(tmp_path: Path) -> None:
    rounds = rounds_of(load_recipe(write_rounds(tmp_path, rounds={"keep": {"pairs": "none"}})))
    links = connect(rounds.recipe(2)).links["reward"]
    assert [link.value for link in links if link.field == "data"] == ["prepare.train"]


def test_a_prompt_that_is_held_out_in_any_round_is_trained_on_in_none(rounds: Rounds, tmp_path: Path) -> None:
    links = [link for link in connect(rounds.recipe(2)).links["reward"] if link.is_data]
    prompts = {
        "prepare.train": ("a", "b"),
        "round-1.prepare.train": ("c", "d"),
        "prepare.heldout": ("c",),
        "round-1.prepare.heldout": ("a",),
    }
    sources: list[str] = []
    for link in links:
        file = tmp_path / f"{link.value}.jsonl"
        rows = [{"prompt": prompt, "chosen": "good", "rejected": "bad"} for prompt in prompts[link.value]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append(str(file))
    files = files_to_read(links, sources, tmp_path / "reward", seed=1)
    joined = [json.loads(line) for line in Path(files["data"][0]).read_text().splitlines()]
    assert [(row["prompt"][0]["content"], row["round_weight"]) for row in joined] == [("b", 1.0), ("d", 0.5)]
    assert set(files) == {"data", "heldout"}


def test_drift_compares_with_all_rounds_so_far_on_one_anchor(rounds: Rounds) -> None:
    drift = rounds.recipe(3).resolved()["stages"]["drift"]
    assert (drift["policy"], drift["previous"], drift["first"]) == ("ppo", "previous.ppo", "round-1.sft")
    assert (drift["reward"], drift["previous_reward"]) == ("reward", "previous.reward")
    assert drift["anchor"] == "round-1.prepare.heldout"
    assert drift["heldout"] == ["round-1.prepare.heldout", "round-2.prepare.heldout", "prepare.heldout"]
    assert (drift["prompts"], drift["max_new_tokens"]) == ("heldout.jsonl", 6)
    assert drift["gold"]["path"] == "rules.py:plain"


def test_the_check_tells_what_is_done_how_often_and_what_is_asked_of_people_in_all(tmp_path: Path) -> None:
    stages = {
        "tasks": {"kind": "tasks", "models": ["previous.ppo"], "prompts": "prompts.jsonl", "count": 10},
        "label": {"kind": "label", "data": "tasks", "by": {"kind": "people", "project": "shop"}},
        "reward": {"data": "label.pairs", "heldout": "label.heldout"},
    }
    rounds = rounds_of(load_recipe(write_rounds(tmp_path, rounds={"count": 3}, stages=stages)))
    lines = list(round_lines(rounds))
    assert lines[0] == "3 rounds, each: ask, prepare, reward, ppo, eval, tasks, label, drift"
    assert lines[1] == "once, in round 1, because nothing of an earlier round goes into it: sft"
    assert "tasks: 3 rounds × 10 tasks = 30 tasks in all" in lines
    assert any(line.startswith("label, 3 times: 10 tasks, about 14 labels") for line in lines)
    assert "reward: labels of all rounds so far; those of round 1 count 0.25 in the last" in lines


def test_the_shipped_recipe_has_rounds_that_can_run() -> None:
    rounds = rounds_of(load_recipe(template_folder() / "rounds.yaml"))
    assert (rounds.once, rounds.policy, rounds.reward) == (("sft",), "ppo", "reward")
    assert rounds.repeated == ("ask", "prepare", "reward", "ppo", "eval")


def test_the_shipped_recipe_of_dpo_goes_on_from_the_round_before() -> None:
    rounds = rounds_of(load_recipe(template_folder() / "rounds-dpo.yaml"))
    assert (rounds.once, rounds.policy, rounds.reward) == (("sft",), "dpo", None)
    assert rounds.repeated == ("ask", "prepare", "dpo", "eval")
