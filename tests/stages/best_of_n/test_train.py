"""The stage `best_of_n`: what it writes and imitates, and that a run taken up again is the run that never ended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kedge.core.errors import DataError
from kedge.data.reading import load
from kedge.models.training.train_step import TrainStep
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.rollout.local import LocalGenerator
from kedge.stages.best_of_n import train as best_of_n
from kedge.stages.best_of_n.bond import own_weights
from kedge.stages.best_of_n.settings import BestOfNSettings, Bond, check, explain
from kedge.stages.rl.answers import ScoredAnswer, chosen, frontier, round_metrics

Records = Callable[[Path], list[dict[str, Any]]]
RunStage = Callable[..., Path]
RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8

def odd(answer):
    return len(answer.text) % 2

def some(answer):
    return float("nan") if answer.prompt[-1][1] == "Say a" else 1.0
"""
STAGE: dict[str, Any] = {
    "kind": "best_of_n",
    "reward": {"kind": "function", "path": "rules.py:plain"},
    "gold": {"kind": "function", "path": "rules.py:odd"},
    "n": 3,
    "batch": 4,
    "micro_batch": 3,
    "max_prompt_tokens": 40,
    "sampling": {"max_new_tokens": 6},
    "rows": 3,
    "samples": 2,
    "optimiser": {"lr": 1e-2},
    "checkpoints": {"every": 2, "keep": 9},
}
REJECTION = {"kind": "rejection", "rounds": 2, "epochs": 2, "finished": False}
BOND = {"kind": "bond", "steps": 5, "anchors": 4}
DROPOUT = {"rank": 2, "dropout": 0.3}


@pytest.fixture(scope="session")
def run_stage(ppo_home: Path) -> RunStage:
    """A run of one best-of-N stage below a folder; gives the folder of the stage."""

    def run(place: Path, *, resumed: bool = False, **settings: Any) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        (place / "rules.py").write_text(RULES)
        stage = {**STAGE, "prompts": str(ppo_home / "prompts.jsonl"), **settings}
        recipe = {"kedge": 1, "name": "short", "seed": 5, "model": str(ppo_home / "tiny"), "device": "cpu"}
        (place / "recipe.yaml").write_text(json.dumps({**recipe, "stages": {"best": stage}}))
        return run_recipe(load_recipe(place / "recipe.yaml"), place / "runs", is_resumed=resumed, say=print) / "best"

    return run


@pytest.fixture(scope="session")
def whole(run_stage: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run that nothing interrupted, made once for each method."""
    made: dict[str, Path] = {}

    def run(method: Mapping[str, Any], **settings: Any) -> Path:
        key = json.dumps([method, settings])
        if key not in made:
            made[key] = run_stage(tmp_path_factory.mktemp("whole"), method=method, **settings)
        return made[key]

    return run


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def best_rows(file: Path, n: int) -> dict[int, dict[str, Any]]:
    """By prompt, the first of the highest among the first n answers."""
    best: dict[int, dict[str, Any]] = {}
    for row in rows_of(file):
        if row["number"] < n and (row["prompt"] not in best or row["score"] > best[row["prompt"]]["score"]):
            best[row["prompt"]] = row
    return best


def test_rejection_tells_of_all_answers_and_of_the_best(whole: Callable[..., Path]) -> None:
    stage = whole(REJECTION)
    lines = [one for one in rows_of(stage / "metrics.jsonl") if "best_of/round" in one]
    assert [(one["best_of/round"], one["step"]) for one in lines] == [(0, 0), (1, 5), (-1, 10)]
    drawn, best = rows_of(stage / "answers-1.jsonl"), best_rows(stage / "answers-1.jsonl", 3)
    assert len(drawn) == 30
    assert len(best) == 10
    assert lines[0]["reward/mean"] == pytest.approx(sum(row["score"] for row in drawn) / 30)
    assert lines[0]["reward/best"] == pytest.approx(sum(row["score"] for row in best.values()) / 10)
    assert lines[0]["gold/best"] == pytest.approx(sum(row["gold"] for row in best.values()) / 10)
    assert lines[0]["length/mean"] == pytest.approx(sum(len(row["tokens"]) for row in drawn) / 30)
    assert lines[0]["kl/mean"] == 0
    assert lines[0]["kl/best"] == pytest.approx(math.log(3) - 2 / 3)
    told = [row["kl"] for row in rows_of(stage / "answers-2.jsonl")]
    assert lines[1]["kl/mean"] == pytest.approx(sum(told) / 30)
    assert 0 < lines[1]["kl/mean"] < lines[2]["kl/mean"]  # it moves on
    later = best_rows(stage / "answers-2.jsonl", 3).values()
    assert lines[1]["kl/best"] == pytest.approx(math.log(3) - 2 / 3 + sum(row["kl"] for row in later) / 10)
    assert "reward/best" not in lines[2]
    assert lines[2]["reward/mean"] > lines[0]["reward/mean"]


def test_what_was_imitated_is_data_for_other_stages(whole: Callable[..., Path]) -> None:
    stage = whole(REJECTION)
    taught = load(stage / "chosen.jsonl", kind="demonstrations")
    best = best_rows(stage / "answers-2.jsonl", 3)
    assert [one.messages[-1].content for one in taught] == [best[prompt]["text"] for prompt in sorted(best)]
    assert taught[0].messages[0].content == "Say a"
    curve = json.loads((stage / "best-of.json").read_text())["curve"]
    first = best_rows(stage / "answers-1.jsonl", 3).values()
    assert [point["n"] for point in curve] == [1, 2, 3]
    assert curve[-1]["reward"] == pytest.approx(sum(row["score"] for row in first) / 10)
    assert curve[0]["reward"] == pytest.approx(sum(row["score"] for row in rows_of(stage / "answers-1.jsonl")) / 30)
    assert curve[1]["kl"] == pytest.approx(math.log(2) - 1 / 2)


def test_bond_logs_every_step(whole: Callable[..., Path]) -> None:
    stage = whole(BOND)
    lines = [one for one in rows_of(stage / "metrics.jsonl") if "train/loss" in one]
    assert [one["step"] for one in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-5)  # nothing is learnt when the first step samples
    assert lines[-1]["kl/mean"] > 0.05
    assert {"reward/mean", "gold/mean", "length/mean", "train/nll"} <= set(lines[0])
    assert len(rows_of(stage / "answers-1.jsonl")) == 40  # anchors, of which the first 3 are chosen from
    best = best_rows(stage / "answers-1.jsonl", 3)
    assert [row["extra"]["score"] for row in rows_of(stage / "chosen.jsonl")] == [
        best[row]["score"] for row in dict.fromkeys(one["prompt"] for one in rows_of(stage / "answers-1.jsonl"))
    ]


class Fallen(Exception):
    pass


def falls(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    calls = iter(range(1, 9999))

    def function(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == call:
            raise Fallen
        return real(*arguments, **settings)

    return function


@pytest.mark.parametrize(
    ("method", "lora", "owner", "name", "call"),
    [
        pytest.param(
            REJECTION, None, LocalGenerator, "generate", 2, marks=pytest.mark.slow
        ),  # half of a round is drawn
        (REJECTION, None, TrainStep, "learn", 2),  # before the first checkpoint
        pytest.param(REJECTION, None, best_of_n, "log_trained_policy", 1, marks=pytest.mark.slow),
        (REJECTION, DROPOUT, LocalGenerator, "generate", 3),  # between two rounds
        pytest.param(REJECTION, DROPOUT, TrainStep, "learn", 8, marks=pytest.mark.slow),  # in the second round
        (BOND, None, LocalGenerator, "generate", 6),
        pytest.param(BOND, DROPOUT, TrainStep, "learn", 4, marks=pytest.mark.slow),
    ],
)
def test_taken_up_again_it_is_the_same_run(
    method: dict[str, Any],
    lora: dict[str, Any] | None,
    owner: Any,
    name: str,
    call: int,
    whole: Callable[..., Path],
    run_stage: RunStage,
    records: Records,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, falls(getattr(owner, name), call))
        with pytest.raises(Fallen):
            run_stage(tmp_path, method=method, lora=lora)
    found, expected = run_stage(tmp_path, resumed=True, method=method, lora=lora), whole(method, lora=lora)
    for journal in ("metrics.jsonl", "samples.jsonl", "chosen.jsonl"):
        assert records(found / journal) == records(expected / journal)
    assert len(records(expected / "metrics.jsonl")) in (13, 7)
    model = "model/model.safetensors"
    assert (found / model).read_bytes() == (expected / model).read_bytes()


def drawn(prompt: int, *scores: float, **fields: Any) -> list[ScoredAnswer]:
    about: dict[str, Any] = {"tokens": (5, 6), "text": "x", "is_finished": True, "gold": None, "kl": 0.5, **fields}
    return [ScoredAnswer(prompt=prompt, number=number, score=score, **about) for number, score in enumerate(scores)]


def test_an_answer_without_a_score_is_never_the_best() -> None:
    groups = [drawn(0, math.nan, 1.0, 2.0), drawn(1, math.nan, math.nan, math.nan), drawn(2, 4.0, 4.0, 0.0)]
    assert [(one.prompt, one.number) for one in chosen(groups, 3)] == [(0, 2), (2, 0)]
    metrics = round_metrics(groups, 3)
    assert metrics["reward/unscored"] == pytest.approx(4 / 9)
    assert metrics["reward/mean"] == pytest.approx(11 / 5)
    assert metrics["length/truncated"] == 0
    assert round_metrics([drawn(0, 1.0), drawn(1, 1.0, is_finished=False)], 1)["length/truncated"] == 0.5
    assert metrics["reward/best"] == pytest.approx(3.0)
    assert metrics["kl/best"] == pytest.approx(0.5 + math.log(3) - 2 / 3)
    assert "reward/best" not in round_metrics(groups, 1)
    assert round_metrics([drawn(0, 1.0, 5.0)], 2)["reward/best"] == 5.0
    found = frontier(groups, 3)
    assert (found["prompts"], found["left_out"]) == (1, 2)
    assert [point["reward"] for point in found["curve"]] == pytest.approx([8 / 3, 4.0, 4.0])


def test_the_weight_of_an_own_answer_on_paper() -> None:
    """Two prompts with two answers each; the anchor's scores of the first are 0 and 2, of the second unknown."""
    method = Bond(answers=2, forward=0.25)
    anchors_BM = torch.tensor([[0.0, 2.0, math.nan]] * 2 + [[math.nan] * 3] * 2)
    scores_B, kl_B = torch.tensor([1.0, 3.0, 1.0, 9.0]), torch.tensor([0.1, 0.4, 0.0, 0.0])
    # n = 2. Score 1: F = 2/3, F₋ = 1/3, ratio (4/9 − 1/9) / (1/3) = 1. Score 3: F = 1, F₋ = 2/3, ratio 5/3.
    gains = [math.log(1) - 0.1, math.log(5 / 3) - 0.4]
    factor = 0.75 / 2
    expected = [factor * (gains[0] - gains[1]), factor * (gains[1] - gains[0]), 0.0, 0.0]
    torch.testing.assert_close(
        own_weights(scores_B, kl_B, anchors_BM, method, n=2),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-6,
        atol=0,
    )
    three = Bond(answers=3, forward=0.25)
    scores_B, kl_B = torch.tensor([1.0, 3.0, math.nan]), torch.tensor([0.1, 0.4, 0.0])
    of_three_B = own_weights(scores_B, kl_B, anchors_BM[:1].expand(3, -1), three, n=2)
    # the third has no score: the other two are compared with each other alone
    gap = 0.75 / 3 * (gains[0] - gains[1])
    torch.testing.assert_close(of_three_B, torch.tensor([gap, -gap, 0.0], dtype=torch.float64), rtol=1e-6, atol=0)
    scores_B, kl_B = torch.tensor([1.0, 1.0, 3.0]), torch.tensor([0.1, 0.1, 0.4])
    of_three_B = own_weights(scores_B, kl_B, anchors_BM[:1].expand(3, -1), three, n=2)
    expected_B = torch.tensor([gap / 2, gap / 2, -gap], dtype=torch.float64)  # beside the mean of the other two
    torch.testing.assert_close(of_three_B, expected_B, rtol=1e-6, atol=0)
    kl_B = torch.tensor([0.1, 0.4, 0.0, 0.0])
    alone_B = torch.tensor([1.0, math.nan, 1.0, 9.0])
    assert own_weights(alone_B, kl_B, anchors_BM, method, n=2).tolist() == [0.0] * 4


def test_settings_leave_out_chosen_answers(run_stage: RunStage, tmp_path: Path) -> None:
    method = {**REJECTION, "rounds": 1, "above": 0.125, "share": 0.5}
    stage = run_stage(tmp_path / "half", method=method)
    told = [one["message"] for one in rows_of(stage / "events.jsonl") if one["code"] == "best_of_n.kept"]
    scores = [row["extra"]["score"] for row in rows_of(stage / "chosen.jsonl")]
    above = [row["score"] for row in best_rows(stage / "answers-1.jsonl", 3).values() if row["score"] > 0.125]
    assert sorted(scores) == sorted(sorted(above)[-math.ceil(len(above) / 2) :])
    assert f"{len(scores)} of 10 prompts have an answer to imitate" in told[0]
    with pytest.raises(DataError, match="none of 10 prompts has an answer worth imitating: 10 have a best answer that"):
        run_stage(tmp_path / "cut", method={"kind": "rejection"})


def test_prompts_that_cannot_be_chosen_for_are_left_out_and_said(run_stage: RunStage, tmp_path: Path) -> None:
    reward, failures = {"kind": "function", "path": "rules.py:some"}, {"max_share": 0.5}
    stage = run_stage(tmp_path, method={**BOND, "steps": 2}, reward=reward, failures=failures)
    told = {one["code"]: one["message"] for one in rows_of(stage / "events.jsonl")}
    assert told["best_of_n.few_scores"].startswith("1 of 10 prompts have fewer than 3 answers with a score")
    assert "7 of 66 answers have no score so far" in told["reward.unscored"]  # 4 of 40 at first, one a batch since
    assert len(rows_of(stage / "chosen.jsonl")) == 9
    curve = json.loads((stage / "best-of.json").read_text())
    assert (curve["prompts"], curve["left_out"]) == (9, 1)


def test_what_a_recipe_may_say() -> None:
    given = {"kind": "best_of_n", "reward": "reward", "prompts": "prompts.jsonl"}
    assert BestOfNSettings.model_validate({**given, "method": "bond"}).method == Bond()
    with pytest.raises(ValidationError, match=r"no method 'bnd' \(did you mean 'bond'\?\); methods: rejection"):
        BestOfNSettings.model_validate({**given, "method": "bnd"})
    for renamed in ("distil", {"kind": "distil", "steps": 5}):
        with pytest.raises(ValidationError, match="distil is called bond now"):
            BestOfNSettings.model_validate({**given, "method": renamed})
    with pytest.raises(ValidationError, match="leave out top_p and top_k"):
        BestOfNSettings.model_validate({**given, "method": "bond", "sampling": {"top_p": 0.9}})
    greedy = BestOfNSettings.model_validate({**given, "sampling": {"top_k": 1}})
    assert [finding.code for finding in check(greedy)] == ["best_of_n.greedy"]
    assert explain(BestOfNSettings.model_validate({**given, "method": "bond", "batch": 16}))[-1] == (
        "100 optimiser steps of 16 prompts × (1 chosen answer and 2 of the policy) = 48 rows, "
        "in passes of at most N tokens, chosen at the start"
    )
    assert explain(greedy)[0] == "the best of 8 is 1.20 nats from one answer, at most"
