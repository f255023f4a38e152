"""A model of ours behind `kedge serve` as a judge, offline: in `label`, and as the reward of PPO. One so small cannot
judge, and that has to be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import NAME, TOKEN, Served

from kedge.core.errors import ContractStop, RewardError
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.rewards.judge_protocol import token_at


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KEDGE_TOKEN", TOKEN)


def settings(server: Served, **more: Any) -> dict[str, Any]:
    asked = {"kind": "judge", "url": f"{server.url}/v1", "model": NAME, "key_variable": "KEDGE_TOKEN", "max_tokens": 8}
    return asked | {"retries": 0} | more


def run(folder: Path, model: Path, stage: dict[str, Any], *, answer: str = "no") -> Path:
    words = ("yes", "why", "when")
    tasks = [{"prompt": f"Say {word}", "answers": [{"text": word}, {"text": answer}]} for word in words]
    prompts = [{"prompt": f"Say {word}"} for word in ("yes", "why", "when", "where")]
    for name, rows in {"tasks": tasks, "prompts": prompts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"kedge": 1, "name": "local", "seed": 3, "model": str(model), "device": "cpu", "stages": {"one": stage}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return run_recipe(load_recipe(folder / "recipe.yaml"), folder / "runs", is_resumed=False, say=print)


def test_labels_of_a_served_model_that_cannot_judge_are_counted_and_refused(
    server: Served, model_folder: Path, tmp_path: Path
) -> None:
    by = settings(server, trust={"without": "a test"}, logprobs=True)
    with pytest.raises(ContractStop, match="not one of 3 comparisons has a verdict that can be read") as stopped:
        run(tmp_path, model_folder, {"kind": "label", "data": "tasks.jsonl", "by": by})
    assert "this judge cannot judge" in str(stopped.value)
    numbers = json.loads((tmp_path / "runs/local/one/agreement.json").read_text())
    assert (numbers["comparisons"], numbers["labels"], numbers["judges"][0]["spent"]["calls"]) == (3, 0, 6)
    assert numbers["exports"]["pairs"]["left_out"] == {"without a readable verdict": 3}


def test_a_served_model_that_cannot_grade_stops_ppo_and_says_what_it_replied(
    server: Served, model_folder: Path, tmp_path: Path
) -> None:
    stage = {"kind": "ppo", "reward": settings(server), "prompts": "prompts.jsonl", "roles": "separate"}
    small = {"iterations": 1, "batch": 4, "epochs": 1, "minibatches": 1, "sampling": {"max_new_tokens": 4}}
    with pytest.raises(
        RewardError, match=r"no score to any of 4 answers.*expected one JSON object after the last mark"
    ):
        run(tmp_path, model_folder, {**stage, **small, "max_prompt_tokens": 40})


def test_a_request_that_does_not_fit_the_window_is_told_with_its_length(
    server: Served, model_folder: Path, tmp_path: Path
) -> None:
    by = settings(server, trust={"without": "a test"})
    with pytest.raises(RewardError, match=r"comparisons could not be asked.*HTTP 400"):
        run(tmp_path, model_folder, {"kind": "label", "data": "tasks.jsonl", "by": by}, answer="no " * 5000)


def test_its_log_probabilities_are_those_of_the_reply(server: Served) -> None:
    """What means of grades and certainties are read from: tokens that make up the reply, each with alternatives."""
    messages = [{"role": "user", "content": "Grade it."}]
    body = {"model": NAME, "messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    for seed in range(20):  # a token a byte: half of them are parts of characters, which have no text
        choice = server.post("/v1/chat/completions", **{**body, "seed": seed}).json()["choices"][0]
        content, tokens = choice["message"]["content"], choice["logprobs"]["content"]
        if content.isascii() and content:
            place = token_at(content, tokens, len(content) - 1)
            assert place is not None
            assert len(place[0]["top_logprobs"]) == 20
            return
    pytest.fail("no reply was ASCII")
