"""What an RL stage passes on: from its settings to the specification of the roles, the generator and the iterations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core import plugins
from kedge.core.seeds import seed_for
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import RewardModel
from kedge.models.roles.build import RoleSpec
from kedge.models.training.passes import PassSize
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.rollout.generators import GeneratorParts, LocalSettings
from kedge.stages.group import train as group_train
from kedge.stages.ppo import train as ppo_train
from kedge.stages.rl import generator as rl_generator
from kedge.stages.rl.judge import load_judge

RunPPO = Callable[..., Path]
OPTIMISER = {"lr": 3e-4, "schedule": "linear", "warmup": 0.1, "eps": 1e-6}


class Seen(Exception):
    """Ends a run once what it was about to do is known."""


def spec_of(run_ppo: RunPPO, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> RoleSpec:
    """What the roles of a run with these settings would be built from."""
    specs: list[RoleSpec] = []

    def build(spec: RoleSpec) -> None:
        specs.append(spec)
        raise Seen

    find = plugins.find
    monkeypatch.setattr(plugins, "find", lambda kind, name: build if kind == "roles" else find(kind, name))
    with pytest.raises(Seen):
        run_ppo(folder, **settings)
    return specs[0]


def test_every_setting_of_the_roles_reaches_them(
    run_ppo: RunPPO, ppo_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = {"dtype": "bfloat16", "lora": {"rank": 3}, "trunk_layers": 1, "recompute": True, "compile": True}
    spec = spec_of(
        run_ppo,
        tmp_path,
        monkeypatch,
        roles="trunk",
        reward=str(ppo_home / "judge"),
        memory=memory,
        iterations=7,
        epochs=3,
        minibatches=2,
        micro_batch=5,
        critic_warmup=2,
        ema=0.9,
        actor=OPTIMISER,
        critic={**OPTIMISER, "lr": 5e-4},
        sampling={"temperature": 0.7, "max_new_tokens": 4},
        loss={"imitate": {"data": str(ppo_home / "demonstrations.jsonl"), "weight": 0.3, "batch": 2}},
    )
    assert Path(spec.base).resolve() == (ppo_home / "tiny").resolve()
    assert spec.reward is not None
    assert spec.reward.resolve() == (ppo_home / "judge").resolve()
    assert (spec.objective, spec.critic_from_reward, spec.device) == (None, True, "cpu")
    assert (spec.dtype, spec.lora.rank, spec.trunk_layers, spec.recompute, spec.compile) == (
        *("bfloat16", 3, 1, True, True),
    )
    assert spec.critic is not None
    assert (spec.actor.lr, spec.actor.schedule, spec.critic.lr) == (3e-4, "linear", 5e-4)
    # 3 epochs of 2 minibatches; the policy learns in 5 of the 7 iterations
    assert (spec.actor_steps, spec.critic_steps) == (30, 42)
    assert (spec.temperature, spec.rows, spec.ema, spec.seed) == (0.7, 5, 0.9, seed_for(5, "ppo"))
    assert spec.imitation is not None
    assert spec.imitation.coef == 0.3
    first, second = (spec.imitation.batches(step)(PassSize(rows=2)) for step in (0, 1))
    assert [len(batch.tokens_BT) for batch in first] == [2]
    assert first[0].tokens_BT.tolist() != second[0].tokens_BT.tolist()


def test_defaults_of_the_roles(run_ppo: RunPPO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = {"dtype": "auto", "critic_from_reward": False}
    spec = spec_of(run_ppo, tmp_path, monkeypatch, memory=memory)
    assert (spec.dtype, spec.reward, spec.critic_from_reward, spec.imitation, spec.ema) == (
        *("auto", None, False, None, None),
    )


@pytest.mark.parametrize("place", ["mixed", "objective"])
def test_the_critic_starts_from_the_first_reward_model_among_the_sources(
    place: str, run_ppo: RunPPO, ppo_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = {"kind": "model", "from": str(ppo_home / "judge"), "objective": "reward"}
    function = {"kind": "function", "path": "rules.py:plain"}
    reward = {"kind": "mix", "parts": {"rule": function, "model": model}} if place == "mixed" else model
    spec = spec_of(run_ppo, tmp_path, monkeypatch, reward=reward)
    assert spec.reward is not None
    assert (spec.reward.resolve(), spec.objective) == ((ppo_home / "judge").resolve(), "reward")


def test_the_generator_is_made_from_what_the_recipe_says(
    run_ppo: RunPPO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[Any, GeneratorParts]] = []

    def open_generator(settings: Any, parts: GeneratorParts) -> Any:
        opened.append((settings, parts))
        raise Seen

    monkeypatch.setattr(rl_generator, "open_generator", open_generator)
    for name, memory, rows in (("all", {}, 12), ("few", {"generate_rows": 3}, 3)):
        with pytest.raises(Seen):
            run_ppo(tmp_path / name, batch=4, answers=3, memory=memory, sampling={"top_k": 5, "max_new_tokens": 6})
        settings, parts = opened.pop()
        assert settings == LocalSettings()
        assert (parts.max_rows, parts.sampling.top_k, parts.sampling.max_new_tokens) == (rows, 5, 6)
        assert parts.decode([72, 105]) == "Hi"
        assert (parts.pad, 258 in parts.stop_ids) == (256, True)


@pytest.mark.parametrize(("method", "top_k"), [("rloo", [7]), ("remax", [7, 1])])
def test_a_method_with_a_greedy_baseline_has_a_second_generator_that_takes_the_likeliest(
    method: str, top_k: list[int], ppo_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[int | None] = []
    open_generator = rl_generator.open_generator

    def noted(settings: Any, parts: GeneratorParts) -> Any:
        opened.append(parts.sampling.top_k)
        return open_generator(settings, parts)

    monkeypatch.setattr(rl_generator, "open_generator", noted)
    recipe = json.loads(ppo_recipe(tmp_path, iterations=1, sampling={"top_k": 7}).read_text())
    settings = recipe["stages"].pop("ppo") | {"kind": "group", "method": method, "answers": 2}
    del settings["critic"]
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**recipe, "stages": {"train": settings}}))
    run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=False, say=print)
    assert opened == top_k


@pytest.mark.parametrize(("kind", "stage"), [("ppo", ppo_train), ("group", group_train)])
def test_no_two_iterations_cut_their_minibatches_alike(
    kind: str, stage: Any, ppo_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The seed of an iteration is its own: with one for all, each would meet its rows in the same order."""
    seeds: list[int] = []
    iteration = stage.iteration

    def noted(*arguments: Any, seed: int, **keywords: Any) -> Any:
        seeds.append(seed)
        return iteration(*arguments, seed=seed, **keywords)

    monkeypatch.setattr(stage, "iteration", noted)
    recipe = json.loads(ppo_recipe(tmp_path, iterations=3).read_text())
    settings = recipe["stages"].pop("ppo")
    if kind == "group":
        settings |= {"kind": "group", "method": "rloo", "answers": 2}
        del settings["critic"]
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**recipe, "stages": {"train": settings}}))
    run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=False, say=print)
    first = seed_for(seed_for(5, "train"), "minibatches")
    assert seeds == [first, first + 1, first + 2]


def test_rollouts_carry_the_version_of_the_weights_that_sampled_them(
    run_ppo: RunPPO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions: list[int] = []
    real = ppo_train.iteration

    def noted(rollouts: Any, *arguments: Any, **keywords: Any) -> Any:
        versions.append(rollouts.version)
        return real(rollouts, *arguments, **keywords)

    monkeypatch.setattr(ppo_train, "iteration", noted)
    run_ppo(tmp_path, iterations=3)
    assert versions == [0, 1, 2]


def test_on_a_cpu_a_judge_scores_in_float32_whatever_it_was_saved_in(tmp_path: Path) -> None:
    judge = build(make_tiny(tmp_path / "tiny", hidden=32, layers=1), objectives=("reward",), seed=1, dtype="bfloat16")
    save(judge, tmp_path / "judge", dtype="bfloat16")
    assert json.loads((tmp_path / "judge/config.json").read_text())["dtype"] == "bfloat16"
    (member,) = load_judge(str(tmp_path / "judge"), device="cpu").members
    assert isinstance(member, RewardModel)
    assert {parameter.dtype for parameter in member.model.parameters()} == {torch.float32}
