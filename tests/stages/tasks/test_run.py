"""What people are asked: pairs by a reward model's doubts and at random, held-out ones at random alone, challenges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kedge.core.errors import ModelError
from kedge.label.incoming import read_items
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import Ensemble, save_ensemble
from kedge.models.reward.reward_files import build, save
from kedge.models.settings import MeanOfMembers
from kedge.stages.tasks.run import challenge_prompts, run
from kedge.stages.tasks.settings import TasksSettings, check, explain

RunStage = Callable[..., Any]
PROMPTS = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tasks")
    make_tiny(home / "tiny", hidden=32, layers=1)
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    weights = load_file(home / "other/model.safetensors")
    loud = {name: 40 * tensor for name, tensor in weights.items()}
    save_file(loud, home / "other/model.safetensors", metadata={"format": "pt"})
    words = ["red", "green", "blue", "white", "black"]
    prompts = [{"prompt": f"What is {a} and {b}?"} for a in words for b in words if a != b][: PROMPTS - 4]
    prompts += [
        {"prompt": f"Tell of {word} things that nobody else has seen so far, please: {n}"}
        for n in range(4)
        for word in ["odd"]
    ]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    members = [build(home / "tiny", seed=seed, dtype="float32") for seed in (3, 4)]
    save(members[0], home / "reward")
    save_ensemble(Ensemble(members=tuple(members), combine=MeanOfMembers()), home / "two")
    return home


@pytest.fixture
def start(home: Path, run_recorded: RunStage, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def start(*, place: str = "stage", **changes: Any) -> list[dict[str, Any]]:
        given: dict[str, Any] = {"kind": "tasks", "models": ["tiny", "other"], "prompts": "p", "max_new_tokens": 5}
        given |= {"answers": 2, "dtype": "float32", "heldout": 0.0} | changes
        settings = TasksSettings.model_validate(given)
        sources: dict[str, Any] = {"models": [str(home / name) for name in settings.models]}
        sources["prompts"] = str(home / "prompts.jsonl")
        if settings.choose.reward:
            sources["choose.reward"] = str(home / settings.choose.reward)
        if settings.choose.asked:
            sources["choose.asked"] = str(settings.choose.asked)
        run_recorded(tmp_path / place, run, settings, **sources)
        return [json.loads(line) for line in (tmp_path / place / "tasks.jsonl").read_text().splitlines()]

    return start


Start = Callable[..., list[dict[str, Any]]]


def test_a_prompt_and_those_nearly_like_it_are_asked_about_once(start: Start, tmp_path: Path) -> None:
    rows = start()
    prompts = [row["prompt"][0]["content"] for row in rows]
    assert len(set(prompts)) == len(prompts)
    assert sum(prompt.startswith("Tell of odd") for prompt in prompts) == 1
    assert len(rows) == PROMPTS - 3
    assert all(len({answer["text"] for answer in row["answers"]}) == 2 for row in rows)
    events = [json.loads(line) for line in (tmp_path / "stage/events.jsonl").read_text().splitlines()]
    assert any(event["code"] == "tasks.fewer" for event in events)


def test_sides_and_order_are_random_and_the_same_seed_gives_the_same_tasks(start: Start) -> None:
    rows = start()
    first = Counter(row["answers"][0]["model"] for row in rows)
    assert set(first) == {"tiny", "other"}
    prompts = [row["prompt"][0]["content"] for row in rows]
    assert prompts != sorted(prompts)
    assert start(place="again") == rows


def test_held_out_tasks_are_at_random_whatever_is_chosen(start: Start) -> None:
    rows = start(count=12, heldout=0.25, choose={"kind": "uncertain", "reward": "reward", "random": 0.5})
    assert Counter(row["reason"] for row in rows) == {"heldout": 3, "uncertain": 5, "random": 4}
    assert [row["reason"] for row in rows if row["heldout"]] == ["heldout"] * 3
    held = [row["propensity"] for row in rows if row["heldout"]]
    assert all(0 < propensity < 1 for propensity in held)
    chosen = [row["propensity"] for row in rows if row["reason"] == "uncertain"]
    assert chosen == [1.0] * 5


@pytest.mark.parametrize("kind", ["uncertain", "ensemble", "d_optimal"])
def test_pairs_are_chosen_by_the_reward_models_doubts(start: Start, kind: str) -> None:
    reward = "two" if kind == "ensemble" else "reward"
    rows = start(count=5, choose={"kind": kind, "reward": reward, "random": 0.0})
    assert {row["reason"] for row in rows} == {kind}
    gaps = [abs(row["answers"][0]["scores"]["reward"] - row["answers"][1]["scores"]["reward"]) for row in rows]
    others = start(place="others", count=PROMPTS, choose={"kind": "uncertain", "reward": reward, "random": 1.0})
    usual = [abs(row["answers"][0]["scores"]["reward"] - row["answers"][1]["scores"]["reward"]) for row in others]
    if kind == "uncertain":
        assert max(gaps) <= sorted(usual)[len(usual) // 2]
    if kind == "d_optimal":
        assert sorted(row["prompt"][0]["content"] for row in rows) != sorted(
            row["prompt"][0]["content"]
            for row in start(place="u", count=5, choose={"kind": "uncertain", "reward": reward, "random": 0.0})
        )


def test_pairs_that_were_left_out_of_the_pool_lower_the_propensity(start: Start) -> None:
    """Six answers have fifteen pairs, fewer where some are equal; eight of them are looked at."""
    rows = start(answers=3, count=4, choose={"kind": "uncertain", "reward": "reward", "random": 0.0})
    assert {row["propensity"] for row in rows} <= {8 / pairs for pairs in range(9, 16)}


def test_what_was_answered_before_is_asked_less(start: Start, tmp_path: Path) -> None:
    """With the first choice known to the head, D-optimal choice asks for something else."""
    choose = {"kind": "d_optimal", "reward": "reward", "random": 0.0}
    (best,) = start(count=1, choose=choose)
    left, right = (answer["text"] for answer in best["answers"])
    known = [{"prompt": best["prompt"], "chosen": left, "rejected": right}] * 400
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known))
    (then,) = start(place="then", count=1, choose=choose | {"asked": str(tmp_path / "known.jsonl")})
    assert {answer["text"] for answer in then["answers"]} != {left, right}


def test_an_ensemble_of_one_cannot_disagree(start: Start) -> None:
    with pytest.raises(ModelError, match="members: 2 or more"):
        start(choose={"kind": "ensemble", "reward": "reward"})


def test_without_a_reward_model_everything_is_at_random(start: Start) -> None:
    assert {row["reason"] for row in start(count=6, choose={"kind": "d_optimal"})} == {"random"}


def test_challenges_are_a_share_of_the_tasks(start: Start) -> None:
    rows = start(count=20, challenge=0.2)
    ours = {prompt.prompt[0].content for prompt in challenge_prompts()}
    assert sum(row["prompt"][0]["content"] in ours for row in rows) == 4
    assert Counter(row["reason"] for row in rows) == {"challenge": 4, "random": 16}


def test_the_challenges_are_many_and_each_says_what_is_true() -> None:
    prompts = challenge_prompts()
    assert len(prompts) >= 60
    assert len({prompt.prompt[0].content.casefold() for prompt in prompts}) == len(prompts)
    assert all(len(str(prompt.extra["truth"]).split()) >= 2 for prompt in prompts)


@pytest.mark.parametrize(("ask", "answers"), [("rank", 4), ("thumb", 1), ("write", 0)])
def test_other_questions_are_about_whole_prompts(start: Start, tmp_path: Path, ask: str, answers: int) -> None:
    models = [] if ask == "write" else ["tiny", "other"]
    rows = start(ask=ask, models=models, count=6)
    assert {len(row["answers"]) for row in rows} <= {answers, 3}
    assert len({row["prompt"][0]["content"] for row in rows}) == 6
    kinds = {"rank": "tasks", "thumb": "tasks", "write": "tasks"}
    assert read_items(str(tmp_path / "stage/tasks.jsonl")).layout == kinds[ask]


BAD = {
    "no answers to compare": ({"models": ["tiny"], "answers": 1}, "needs 2 answers"),
    "a model to write": ({"ask": "write"}, "would answer in vain"),
    "nobody": ({"models": []}, "there is no model"),
    "greedy": ({"top_k": 1}, "would be the same"),
    "chosen thumbs": ({"ask": "thumb", "choose": {"kind": "uncertain", "reward": "r"}}, "is for pairs"),
    "too much": ({"heldout": 0.6, "challenge": 0.5}, "leave nothing"),
    "twice": ({"models": ["tiny", "tiny"]}, "more than once"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_told_before_anything_is_sampled(name: str) -> None:
    changes, words = BAD[name]
    given: dict[str, Any] = {"kind": "tasks", "models": ["tiny", "other"], "prompts": "p"} | changes
    findings = list(check(TasksSettings.model_validate(given)))
    assert any(finding.level == "fatal" and words in finding.message for finding in findings)


def test_the_arithmetic_is_told() -> None:
    given = {"kind": "tasks", "models": ["a", "b"], "prompts": "p", "count": 500, "challenge": 0.07}
    lines = explain(TasksSettings.model_validate(given | {"choose": {"kind": "d_optimal", "reward": "r"}}))
    assert lines[0] == "2 models × 2 answers to each prompt"
    assert lines[1].startswith("500 tasks (pair), 80% by d_optimal; 10% held out at random; 7% with a user who insists")
