"""How a PPO run is held and cut, which may change memory and speed and nothing else; and how its answers are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.core.errors import ModelError
from kedge.core.settings import Section
from kedge.stages.ppo.settings import STAGE, PPOSettings

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]

SLOW = pytest.mark.slow
LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklm"]
ONE: dict[str, Any] = {
    "iterations": 1,
    "batch": 16,
    "minibatches": 1,
    "micro_batch": 5,
    "sampling": {"max_new_tokens": 8, "stop": LETTERS},
    "logging": {"samples": 16},
}
"""One step on answers of 1 to 8 tokens."""


@pytest.mark.parametrize("roles", ["separate", "lora", "trunk"])
def test_before_the_first_step_policy_reference_and_generator_agree(
    roles: str, run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    sampling = {"temperature": 0.1, "top_p": 0.9, "top_k": 200}
    (found,) = records(run_ppo(tmp_path, **ONE | {"sampling": sampling}, roles=roles) / "metrics.jsonl")
    assert found["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert found["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert (found["kl/mean"], found["policy/clip_fraction"]) == (0.0, 0.0)
    assert found["policy/mismatch"] < 1e-4
    assert found["entropy/mean"] < math.log(259) - 0.1  # at the temperature of sampling


def test_sampled_log_probs_change_no_number_in_float32(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    """Two steps on one batch, answers cut by top_p: what the generator notes is of all tokens, as the trainer's is."""
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 8}
    found: list[dict[str, Any]] = []
    for how in ("recomputed", "sampled"):
        settings = ONE | {"sampling": sampling, "minibatches": 2, "memory": {"dtype": "float32"}}
        stage = run_ppo(tmp_path / how, **settings, roles="separate", loss={"policy": {"old_logprobs": how}})
        found += records(stage / "metrics.jsonl")
    recomputed, sampled = found
    assert set(recomputed) - set(sampled) == {"policy/mismatch"}
    for name in ("policy/grad_norm", "value/loss", "reward/mean", "entropy/mean", "policy/ratio", "policy/ratio_max"):
        assert sampled[name] == pytest.approx(recomputed[name], rel=1e-4)
    assert sampled["kl/mean"] == pytest.approx(0.0, abs=1e-4)


def test_sampled_log_probs_are_warned_of() -> None:
    common = {"kind": "ppo", "reward": "r", "prompts": "p"}
    settings = PPOSettings.model_validate(common | {"loss": {"policy": {"old_logprobs": "sampled"}}})
    assert [one.code for one in STAGE.check(settings)] == ["ppo.sampled_logprobs"]
    assert list(STAGE.check(PPOSettings.model_validate(common))) == []


def test_answers_are_drawn_as_the_recipe_says(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    def answers(name: str, **sampling: Any) -> list[str]:
        stage = run_ppo(tmp_path / name, **ONE | {"sampling": sampling})
        return [one["answer"] for one in records(stage / "samples.jsonl")]

    likeliest = answers("k", top_k=1, max_new_tokens=4)
    assert answers("p", top_p=1e-6, max_new_tokens=4) == likeliest
    assert answers("t", temperature=1e-4, max_new_tokens=4) == likeliest
    stage = run_ppo(tmp_path / "min", **ONE | {"sampling": {"stop": LETTERS, "min_new_tokens": 6}})
    lengths = [one["length"] for one in records(stage / "samples.jsonl")]
    assert (min(lengths), max(lengths)) == (6, 8)


def test_a_trunk_of_all_layers_is_refused(run_ppo: RunPPO, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found 2 shared layers, expected 1 to 1 of the 2"):
        run_ppo(tmp_path, roles="trunk", memory={"trunk_layers": 2})


@pytest.mark.parametrize("roles", ["separate", *(pytest.param(roles, marks=SLOW) for roles in ("lora", "trunk"))])
def test_recomputing_activations_changes_nothing(roles: str, run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    plain, again = (
        records(run_ppo(tmp_path / str(recompute), roles=roles, memory={"recompute": recompute}) / "metrics.jsonl")
        for recompute in (False, True)
    )
    assert len(plain) == 2
    for one, other in zip(plain, again, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("roles", ["separate", *(pytest.param(roles, marks=SLOW) for roles in ("lora", "trunk"))])
def test_the_micro_batch_changes_nothing(roles: str, run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    """Two whole iterations: answers, metrics and what is learnt from them."""
    settings = {**ONE, "iterations": 2, "minibatches": 2, "roles": roles, "actor": {"lr": 1e-3}}
    found = {
        rows: run_ppo(tmp_path / str(rows), **settings | {"micro_batch": rows}, loss={"policy": {"per": "sequence"}})
        for rows in (1, 4, 16)
    }
    expected = records(found[16] / "metrics.jsonl")
    for rows in (1, 4):
        for one, other in zip(records(found[rows] / "metrics.jsonl"), expected, strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
        answers = [[one["answer"] for one in records(found[n] / "samples.jsonl")] for n in (rows, 16)]
        assert answers[0] == answers[1]


def test_layers_are_compiled_when_asked(
    run_ppo: RunPPO, ppo_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every model of the four roles, and only then; what a compiler makes of them is not this test's business."""
    compiled: list[Any] = []
    for place in ("loading.start", "reward.reward_model"):
        monkeypatch.setattr(f"kedge.models.{place}.compile_layers", compiled.append)
    settings = {**ONE, "roles": "separate", "reward": str(ppo_home / "judge")}
    run_ppo(tmp_path / "off", **settings)
    assert compiled == []
    run_ppo(tmp_path / "on", **settings, memory={"compile": True})
    assert len({id(model) for model in compiled}) == 4


def test_passes_of_tokens_change_nothing_and_max_steps_ends_the_run(
    run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    short = {**ONE, "iterations": 9, "max_steps": 2, "memory": {"save_dtype": "bfloat16"}}
    by_rows = run_ppo(tmp_path / "rows", **short)
    by_tokens = run_ppo(tmp_path / "tokens", **{**short, "micro_batch": "auto"})
    losses = [[one["policy/loss"] for one in records(stage / "metrics.jsonl")] for stage in (by_rows, by_tokens)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    chosen = [one["message"] for one in records(by_tokens / "events.jsonl") if one["code"] == "micro_batch.chosen"]
    assert sorted(chosen) == [f"{role}: passes of at most 2,048 tokens" for role in ("critic", "policy")]
    weights = load_file(by_tokens / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_samples_are_written_when_asked(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    stage = run_ppo(tmp_path, iterations=5, logging={"every": 2, "samples": 3})
    found = [(one["step"], one["number"]) for one in records(stage / "samples.jsonl")]
    assert found == [(step, number) for step in (1, 2, 4, 5) for number in range(3)]


def test_every_setting_is_named_by_a_test_of_this_stage() -> None:
    """A setting that nothing here speaks of is one that nobody has tried."""
    # tested where they live
    elsewhere = {"actor", "critic", "lora", "checkpoints", "reward", "gold", "detectors", "prompts", "eval"}
    elsewhere |= {"offload", "frozen_bits"}
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("*.py"))
    text += (Path(__file__).parents[1] / "conftest.py").read_text()

    def leaves(section: type[Section]) -> list[str]:
        names: list[str] = []
        for name, info in section.model_fields.items():
            inner = sections((info.annotation, *getattr(info.annotation, "__args__", ())))
            if name not in elsewhere:
                names += [leaf for one in inner for leaf in leaves(one)] if inner else [info.alias or name]
        return names

    found = leaves(PPOSettings)
    assert len(found) > 50
    assert [name for name in found if f'"{name}"' not in text and f"{name}=" not in text] == []


def sections(found: Iterable[Any]) -> list[type[Section]]:
    return [one for one in found if isinstance(one, type) and issubclass(one, Section)]
