"""The model card: front matter that a hub can read, and plain words about what is not known."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from kedge.report.card import last_values, model_card
from kedge.runs.manifest import Artefact, Manifest, new_manifest


def manifest(kind: str, inputs: tuple[Artefact, ...] = (), **settings: Any) -> Manifest:
    return new_manifest(name="hh", stage=kind, kind=kind, seed=11, settings={"kind": kind, **settings}, inputs=inputs)


def front_matter(card: str) -> dict[str, Any]:
    _, text, _ = card.split("---\n", 2)
    return dict(YAML(typ="safe").load(text))


def test_a_policy_on_a_hub_model() -> None:
    inputs = (
        Artefact(name="from", kind="model", path="org/base-135m", hash="hub"),
        Artefact(name="prompts", kind="prompts", path="/home/someone/secret/prompts.jsonl", hash="ab" * 16),
    )
    card = model_card(manifest("ppo", inputs, iterations=50), {"reward/mean": 1.5, "kl/mean": 5.25, "policy/lr": 1e-5})
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kedge", "rlhf", "ppo"],
        "base_model": "org/base-135m",
    }
    assert f"| prompts | prompts | `prompts.jsonl` | `{'ab' * 16}` |" in card
    assert "| from | model | `org/base-135m` | on a hub, by name |" in card
    assert "someone" not in card
    assert "| `kl/mean` | 5.25 |" in card
    assert "policy/lr" not in card
    assert "AutoModelForCausalLM" in card
    assert "It was not compared with another model" in card
    assert "iterations: 50" in card
    assert "seed 11" in card


def test_a_local_base_is_not_linked_to() -> None:
    inputs = (Artefact(name="from", kind="model", path="../sft/model", hash="00" * 16),)
    card = model_card(manifest("ppo", inputs), {})
    assert "base_model" not in front_matter(card)
    assert "`sft/model`" in card
    assert "Nothing was measured." in card


@pytest.mark.parametrize(
    ("members", "loads", "absent"),
    [(1, "AutoModelForSequenceClassification", "kedge score PATH"), (3, "kedge score PATH", "AutoModelFor")],
)
def test_a_reward_model_and_an_ensemble(members: int, loads: str, absent: str) -> None:
    card = model_card(
        manifest("reward", members=members), {"heldout/accuracy": 0.742}, verdict="Fit to optimise against."
    )
    assert front_matter(card)["pipeline_tag"] == "text-classification"
    assert loads in card
    assert absent not in card
    assert "Fit to optimise against." in card
    assert "| `heldout/accuracy` | 0.742 |" in card
    assert "It was not compared with another model" not in card


def test_an_evaluation_becomes_a_table() -> None:
    estimate = {"mean": 1.0, "low": 0.5, "high": 1.5}
    model = {"scores": {}, "kl": None, "length": estimate, "finished": 1.0, "repetition": 0.0, "distinct": 0.5}
    evaluation = {
        "baseline": "sft",
        "prompts": 1200,
        "models": {"sft": model, "ppo": model},
        "comparisons": {"ppo": {}},
    }
    card = model_card(manifest("ppo"), {}, evaluation=evaluation)
    assert "On 1,200 prompts" in card
    assert "|  | sft | ppo |\n| --- | --- | --- |\n" in card
    assert "| length, tokens (end of turn aside) | 1.0 [0.5, 1.5] | 1.0 [0.5, 1.5] |" in card
    assert "It was not compared with another model" not in card


def test_the_last_value_of_each_metric_counts() -> None:
    records = [
        {"step": 1, "at": 5.0, "train/loss": 2.0, "heldout/loss": 2.5},
        {"step": 2, "at": 6.0, "train/loss": 1.0},
    ]
    assert last_values(records) == {"train/loss": 1.0, "heldout/loss": 2.5}


def test_what_is_not_known_depends_on_how_it_learnt() -> None:
    offline, online = "comparisons of answers that it did not write", "Its own answers were compared by a reward"
    told = model_card(manifest("preference", data="pairs.jsonl", method="dpo"), {})
    assert offline in told
    assert online not in told
    told = model_card(manifest("preference", online={"rounds": 2}, method="dpo"), {})
    assert online in told
    assert offline not in told
    told = model_card(manifest("best_of_n", n=4, method={"kind": "rejection"}), {})
    assert "it became more reliable rather than more able" in told
    assert "best-of-n" in told.split("---")[1]
    told = model_card(manifest("group", method={"kind": "rloo"}), {})
    assert "it may have learnt to please the reward" in told
    assert "rl-without-a-critic" in told.split("---")[1]
