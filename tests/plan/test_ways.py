"""Ways of holding a stage's models: which there are, what chooses them, and which one is proposed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from kedge.plan.diff import changed_text
from kedge.plan.holding import Holding, holding_of
from kedge.plan.machines import find_machine
from kedge.plan.memory import stage_memory
from kedge.plan.ways import changes_to, ways_of
from kedge.recipe.schema import recipe_of

sys.path.insert(0, str(Path(__file__).parent))
from planning import H200, HALF, on, ppo, sft

FULL, LORA = Holding(roles="full"), Holding(roles="lora")
STAGES = {
    "sft": {"kind": "sft", "data": "d.jsonl"},
    "ppo": {"kind": "ppo", "prompts": "p.jsonl", "reward": {"kind": "exact"}, "roles": "separate"},
}
RECIPE = recipe_of({"kedge": 1, "name": "x", "model": "tiny", "stages": STAGES})


def test_the_own_way_comes_first_and_a_cpu_has_exact_ones_alone() -> None:
    names = [way.name() for way in ways_of(sft(HALF, LORA), H200)]
    assert names[0] == "lora"
    assert {"full", "full, recompute", "full, offload optimiser", "lora, base_bits 4"} <= set(names)
    on_cpu = [way.name() for way in ways_of(sft(HALF), find_machine("cpu"))]
    assert on_cpu == ["full", "full, recompute", "lora", "lora, recompute"]


def test_shards_need_several_gpus() -> None:
    assert not any(way.shards > 1 for way in ways_of(ppo(HALF), H200))
    assert {way.shards for way in ways_of(ppo(HALF), on(H200, 4))} == {1, 4}


def test_ways_that_a_check_would_refuse_are_not_offered() -> None:
    names = {way.name() for way in ways_of(replace(ppo(HALF), rewards=0), H200)}
    assert "separate, offload optimiser+reference" in names
    in_eight = {way.name() for way in ways_of(ppo(HALF, Holding(roles="separate", moment_bytes=2)), on(H200, 4))}
    assert "separate, offload reference+reward" in in_eight
    assert not any("shard" in name for name in in_eight)
    assert not any(way.shards > 1 for way in ways_of(ppo(HALF), on(H200, 32)))  # 16 rows a step


def test_a_reward_model_is_shared_under_the_ways_that_it_was_trained_for() -> None:
    shared = replace(ppo(HALF), shared_reward=frozenset({"lora"}))
    held = {
        way.roles: next(
            role.weights for role in stage_memory(replace(shared, holding=way), H200).roles if role.role == "reward"
        )
        for way in (Holding(roles="trunk"), LORA)
    }
    assert held["trunk"] == 2 * HALF.scoring > held["lora"]


def test_settings_say_how_models_are_held() -> None:
    assert holding_of(RECIPE.stages["sft"]).roles == "full"
    assert holding_of(RECIPE.stages["ppo"]).roles == "separate"


def test_changes_are_settings_of_the_recipe_and_unknown_ones_cannot_be_chosen() -> None:
    settings = RECIPE.stages["sft"]
    lora = replace(LORA, base_bits=4, recompute=True)
    assert changes_to(lora, FULL, "sft", settings) == {
        ("stages", "sft", "lora", "rank"): 16,
        ("stages", "sft", "lora", "base_bits"): 4,
        ("stages", "sft", "memory", "recompute"): True,
    }
    assert changes_to(FULL, LORA, "sft", settings) == {("stages", "sft", "lora"): None}
    moved = changes_to(replace(FULL, offload=frozenset({"optimiser"})), FULL, "sft", settings)
    has_setting = "offload" in type(settings.memory).model_fields  # pyright: ignore[reportAttributeAccessIssue]
    assert (moved is not None) == has_setting


def test_roles_of_rl_and_placement_are_changed_where_they_stand() -> None:
    own = holding_of(RECIPE.stages["ppo"])
    changes = changes_to(replace(own, roles="lora", base_bits=8), own, "ppo", RECIPE.stages["ppo"])
    assert changes == {("stages", "ppo", "roles"): "lora", ("stages", "ppo", "memory", "lora", "base_bits"): 8}
    sharded = changes_to(replace(own, shards=4), own, "ppo", RECIPE.stages["ppo"])
    assert sharded == {("placement", "weights"): "shard", ("placement", "processes"): 4}


def test_a_changed_recipe_keeps_its_comments() -> None:
    text = "kedge: 1  # the format\nstages:\n  sft:\n    kind: sft # why\n    lora: {rank: 8}\n"
    changed = changed_text(text, {("stages", "sft", "lora"): None, ("stages", "sft", "memory", "recompute"): True})
    assert "# the format" in changed
    assert "kind: sft # why" in changed
    assert "lora" not in changed
    assert "memory: {recompute: true}" in changed


def test_lines_that_are_not_changed_stay_as_long_as_they_are() -> None:
    long = "  ppo: {kind: ppo, " + ", ".join(f"key_{number}: {number}" for number in range(20)) + "}"
    text = f"stages:\n  sft: {{kind: sft}}\n{long}\n"
    assert changed_text(text, {("stages", "sft", "batch"): 8}) == text.replace("kind: sft}", "kind: sft, batch: 8}")
