"""The plan of whole recipes: lengths from their data, order of their stages, costs, proposals; and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.commands.plan.command import Asked, plan
from kedge.commands.plan.probe import (
    _shortened,  # pyright: ignore[reportPrivateUsage]
    empty_home,
    pass_sizes,
    probe_recipe,
    probed_stages,
)
from kedge.commands.plan.words import plan_panel
from kedge.core.errors import ConfigError, DataError
from kedge.core.seeds import seed_for
from kedge.data.batching import step_rows
from kedge.models.loading.aliases import folder_of
from kedge.plan.diff import changed_text
from kedge.plan.lengths import Items, Row
from kedge.plan.machines import find_machine
from kedge.plan.plan import plan_recipe, works_of
from kedge.plan.shapes import shape_of
from kedge.recipe.schema import Recipe, load_recipe

RECIPE = """\
kedge: 1
name: loop
model: tiny # the smallest
stages:
  sft: {kind: sft, data: demos.jsonl, batch: 4, epochs: 2, max_length: 512}
  reward:
    kind: reward
    from: sft
    data: pairs.jsonl
    batch: 2
    lora: {rank: 4}
  ppo:
    kind: ppo
    from: sft
    reward: reward
    prompts: prompts.jsonl
    batch: 4
    iterations: 3
    minibatches: 2
    sampling: {max_new_tokens: 8}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    def asked(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{number}? " + "why " * (number % 5)}]

    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    write("demos.jsonl", [{"messages": [*asked(n), *answer("yes " * (n % 7 + 1))]} for n in range(20)])
    pairs = [{"prompt": asked(n), "chosen": answer("good"), "rejected": answer("bad bad")} for n in range(20)]
    write("pairs.jsonl", pairs)
    write("prompts.jsonl", [{"prompt": asked(n)} for n in range(12)])
    file = tmp_path / "loop.yaml"
    file.write_text(RECIPE)
    return file


def test_steps_are_those_that_the_run_will_take(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    sft, reward, ppo = works_of(loaded, find_machine("h200"))
    assert (sft.steps, reward.steps, ppo.steps, ppo.updates) == (10, 9, 3, 4)
    tokens = [len(json.loads(line)["messages"][1]["content"]) for line in _lines(recipe.parent / "demos.jsonl")]
    (first,) = list(step_rows(20, epochs=1, batch=4, seed=_seed(loaded, "sft"), max_steps=1))
    # One token a byte: what a step counts is its answers, each with an end of turn.
    assert sum(row.counted for item in sft.looked[0] for row in item) == sum(tokens[row] + 1 for row in first)
    assert all(row.counted == 8 for step in ppo.looked for item in step for row in item)
    assert (ppo.rewards, ppo.shared_reward, ppo.reference) == (1, frozenset({"lora"}), True)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _seed(loaded: Recipe, stage: str) -> int:
    return seed_for(loaded.settings.seed, stage)


def test_a_folder_without_weights_is_enough_and_is_looked_for_beside_the_recipe(
    recipe: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipe.parent / "shape"
    folder.mkdir()
    for file in folder_of("tiny").iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    recipe.write_text(RECIPE.replace("model: tiny", "model: ./shape"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    loaded = load_recipe(recipe)
    found = plan_recipe(loaded, find_machine("h200"))
    recipe.write_text(RECIPE)
    with_weights = plan_recipe(load_recipe(recipe), find_machine("h200"))
    assert [stage.memory for stage in found.stages] == [stage.memory for stage in with_weights.stages]
    (model,) = [text for text in _shortened(loaded, ["sft"], recipe.parent) if text.startswith("model=")]
    assert (Path(json.loads(model.removeprefix("model="))) / "model.safetensors").is_file()


def test_of_several_models_that_are_looked_at_the_largest_counts(recipe: Path) -> None:
    folder = recipe.parent / "wide"
    folder.mkdir()
    for file in folder_of("tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    for models in ("[sft, ./wide]", "[./wide, sft]"):
        recipe.write_text(f"{RECIPE}  eval: {{kind: evaluate, models: {models}, prompts: prompts.jsonl}}\n")
        assert works_of(load_recipe(recipe), find_machine("h200"))[-1].shape.layers == 8


def test_a_card_of_which_only_the_memory_is_known_says_whose_speed_it_is_given(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    told = {gpu: plan_recipe(loaded, find_machine(gpu)).notes for gpu in ("24", "4090")}
    assert [any("as fast as an a100-80g" in note for note in notes) for notes in told.values()] == [True, False]


def test_a_reward_model_has_the_size_of_its_own(recipe: Path) -> None:
    folder = recipe.parent / "wide"
    folder.mkdir()
    config = json.loads((folder_of("tiny") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    own, wide = (
        RECIPE.replace("from: sft\n    reward", "from: sft\n    roles: separate\n    reward"),
        "reward: ./wide\n",
    )
    held: list[int] = []
    for text in (own, own.replace("reward: reward\n", wide)):
        recipe.write_text(text)
        ppo = plan_recipe(load_recipe(recipe), find_machine("h200")).stages[-1]
        held.append(next(role.weights for role in ppo.memory.roles if role.role == "reward"))
    layer = shape_of(config, "tiny").layer_weights
    assert held[1] - held[0] == 2 * 6 * layer


def test_examples_that_are_too_long_are_told(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("max_length: 512", "max_length: 60"))
    (note,) = plan_recipe(load_recipe(recipe), find_machine("h200")).notes
    assert "examples are longer than 60 tokens: left out" in note
    recipe.write_text(RECIPE.replace("max_length: 512", "max_length: 8"))
    with pytest.raises(DataError, match="all 20 examples are longer than 8 tokens"):
        plan_recipe(load_recipe(recipe), find_machine("h200"))


def test_a_huge_batch_is_looked_at_once() -> None:
    items = Items(items=[(Row(3, 1),)], count=1)
    assert len(items.steps(50_000, count=100, seed=0)) == 1
    assert len(items.steps(70_000, count=100, seed=0)[0]) == 70_000
    assert len(items.steps(64, count=100, seed=0)) == 100


def test_what_is_not_reckoned_is_told(recipe: Path) -> None:
    vllm = "generator: {kind: vllm, python: python, gpus: shared}"
    exam = "  exam: {kind: exam, models: [ppo]}\n  write: {kind: tasks, prompts: prompts.jsonl, ask: write}\n"
    exam += f"  ppo2: {{kind: ppo, from: sft, reward: reward, prompts: prompts.jsonl, {vllm}}}\n"
    groups = "placement: {groups: {learner: {gpus: 1}, critic: {roles: [critic]}}}\n"

    def notes(text: str, gpus: int) -> str:
        recipe.write_text(text)
        return "\n".join(plan_recipe(load_recipe(recipe), find_machine("h200", gpus=gpus)).notes)

    told = notes(groups + RECIPE + exam, 2)
    for words in ("placement.groups is not reckoned", "exam: time and memory", "ppo2: vllm is not reckoned"):
        assert words in told
    assert "write:" not in told  # people write, and no model answers
    assert "placement.processes is 4" in notes(f"placement: {{processes: 4}}\n{RECIPE}", 1)
    assert "not reckoned" not in notes(RECIPE, 1)


def test_a_plan_adds_up_and_can_be_written_as_json(recipe: Path) -> None:
    machine = find_machine("h200", gpus=2, price=3.0)
    found = plan_recipe(load_recipe(recipe), machine)
    assert [stage.name for stage in found.stages] == ["sft", "reward", "ppo"]
    assert found.total.seconds == pytest.approx(sum(stage.cost.seconds for stage in found.stages))
    assert found.total.money == pytest.approx(found.total.seconds / 3600 * 2 * 3.0)
    assert found.fits
    assert not found.changes
    values = json.loads(json.dumps(found.as_dict()))
    assert values["stages"][2]["ways"][0]["name"] == "lora"


def test_what_does_not_fit_gets_the_cheapest_way_that_does_as_a_recipe_that_loads(recipe: Path) -> None:
    wide = RECIPE.replace("{kind: sft,", "{kind: sft, optimiser: {lr: 1.0e-4},")
    recipe.write_text(wide)
    target = recipe.parent / "planned.yaml"
    # Between what full weights and what adapters of the tiny model take.
    answer = plan(Asked(recipe=recipe, gpu="0.0035", write=target))
    sft = answer.plan.stages[0]
    assert not sft.fits
    assert sft.best is not None
    fitting = [way for way in sft.ways if way.fits and way.changes is not None]
    assert sft.best.cost.seconds == min(way.cost.seconds for way in fitting)
    assert any(line.startswith("+") for line in answer.diff)
    assert "# the smallest" in target.read_text()
    again = plan(Asked(recipe=target, gpu="0.0035"))
    assert again.plan.stages[0].fits
    with pytest.raises(ConfigError, match="there already"):
        plan(Asked(recipe=recipe, gpu="h200", write=target))
    with pytest.raises(ConfigError, match="would be overwritten"):
        plan(Asked(recipe=recipe, gpu="h200", write=recipe, force=True))


def test_labels_and_rounds_cost_what_they_are_asked(recipe: Path) -> None:
    tasks = "  tasks: {kind: tasks, models: [sft], prompts: prompts.jsonl, max_new_tokens: 8, heldout: 0}\n"
    people = "  label: {kind: label, data: tasks, by: {kind: people, project: p, overlap: {share: 0.5, wanted: 3}}}\n"
    recipe.write_text(RECIPE + tasks + people)
    found = plan_recipe(load_recipe(recipe), find_machine("h200", label_price=0.5))
    label = next(stage for stage in found.stages if stage.name == "label")
    assert label.cost.labels == 12 * 2  # half of the tasks have three labels, half have one
    assert found.total.label_money == pytest.approx(12.0)


def test_what_is_written_has_the_settings_of_the_command_line_and_its_own_place(recipe: Path) -> None:
    target = recipe.parent / "planned.yaml"
    asked = Asked(
        recipe=recipe, gpu="0.0035", overrides=("stages.sft.batch=8", "stages.reward.lora=null"), write=target
    )
    answer = plan(asked)
    written = load_recipe(target).stages["sft"]
    assert (written.batch, written.lora.rank) == (8, 16)  # pyright: ignore[reportAttributeAccessIssue]
    assert any(line.startswith("-") and "batch: 8" in line for line in answer.diff)
    with pytest.raises(ConfigError, match="from its own folder"):
        plan(Asked(recipe=recipe, gpu="h200", write=recipe.parent / "sub" / "planned.yaml"))


def test_adapters_of_a_recipe_below_are_taken_out_by_name() -> None:
    text = changed_text("extends: base.yaml\nstages: {sft: {batch: 4}}\n", {("stages", "sft", "lora"): None})
    assert "lora: null" in text


JUDGE = "{kind: judge, url: 'http://localhost:1/v1', model: m}"


def test_every_reply_of_a_judge_is_a_label(recipe: Path) -> None:
    mixed = f"{{kind: mix, parts: {{model: {{kind: model, from: reward}}, judge: {JUDGE}}}}}"
    compared = (
        f"  eval: {{kind: evaluate, models: [sft, ppo], prompts: prompts.jsonl, judge: {JUDGE}, gold: {JUDGE}}}\n"
    )
    revised = (
        f"  revise: {{kind: revise, from: sft, prompts: prompts.jsonl, constitution: rules.yaml, judge: {JUDGE}, "
        f"by: {JUDGE.replace('kind: judge, ', '')}}}\n"
    )
    recipe.write_text(RECIPE.replace("reward: reward\n", f"reward: {mixed}\n") + compared + revised)
    found = plan_recipe(load_recipe(recipe), find_machine("h200", label_price=0.25))
    labels = {stage.name: stage.cost.labels for stage in found.stages if stage.cost.labels}
    # 3 iterations of 4 answers; 12 prompts, both orders of a comparison, and a grade for each of two models' answers.
    assert labels == {"ppo": 3 * 4, "eval": 12 * 2 + 12 * 2, "revise": 12 * 2}
    assert found.total.label_money == pytest.approx(0.25 * sum(labels.values()))
    assert any("96 calls of m" in note for note in found.notes)  # 4 critiques, 4 revisions


def test_what_is_done_once_is_not_counted_in_every_round(recipe: Path) -> None:
    again = RECIPE.replace("from: sft\n    reward: reward", "from: previous.ppo\n    reward: reward")
    recipe.write_text("rounds: {count: 3, first: {ppo: sft}}\n" + again)
    found = plan_recipe(load_recipe(recipe), find_machine("h200"))
    cost = {stage.name: stage.cost.seconds for stage in found.stages}
    once = cost.pop("sft") + cost.pop("reward")
    assert set(cost) == {"ppo", "drift"}
    assert found.total.seconds == pytest.approx(once + 3 * sum(cost.values()))


def test_simulated_layouts_are_those_of_the_model_of_scale(recipe: Path) -> None:
    answer = plan(Asked(recipe=recipe, gpu="h200", gpus=4, simulate=True))
    assert [row.layout for row in answer.simulated][:2] == ["shared, replicate", "shared, shard"]
    assert {row.stage for row in answer.simulated} == {"ppo"}


def test_the_panel_of_the_studio_has_stages_and_the_total(recipe: Path) -> None:
    panel = dict(plan_panel(load_recipe(recipe)))
    assert {"takes", "sft takes", "ppo takes"} <= panel.keys()
    assert any("peak" in line for line in panel["ppo takes"])


def test_stages_that_wait_for_somebody_are_not_probed(recipe: Path) -> None:
    judged = "  eval: {kind: evaluate, models: [ppo], prompts: prompts.jsonl}\n"
    recipe.write_text(RECIPE + judged)
    assert probed_stages(load_recipe(recipe)) == ["sft", "reward", "ppo"]


ORPHAN = """\
import multiprocessing, time
from kedge.commands.plan.probe import end_with_parent

def work():
    end_with_parent()
    print("working", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


def test_a_probe_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHAN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "working\n"
        parent.kill()
        assert parent.communicate(timeout=30)[0] == ""  # it ends when the child, which has it open too, is gone


def test_the_weights_of_a_probe_are_not_added_to_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    home = empty_home(tmp_path)
    (home / "model.safetensors").touch()
    assert not subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, capture_output=True, check=True).stdout


@pytest.mark.slow
def test_a_probe_measures_every_stage_that_learns(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    machine, loaded = find_machine("cpu"), load_recipe(recipe)
    left = recipe.parent / ".kedge-probe-4194999"  # no process has so large a number
    (left / "run").mkdir(parents=True)
    said: list[str] = []
    rows = probe_recipe(recipe, (), loaded, works_of(loaded, machine), machine, said.append)
    assert [(row.stage, row.problem) for row in rows] == [("sft", ""), ("reward", ""), ("ppo", "")]
    assert all(row.measured_peak > 2**28 and row.measured_step_s > 0 for row in rows)
    assert all(row.corrected_peak == pytest.approx(row.measured_peak, rel=0.1) for row in rows)
    assert said == ["probe: 2 steps of sft, reward, ppo"]
    assert not list(recipe.parent.glob(".kedge-probe-*"))
    again = probe_recipe(recipe, ("stages.sft.data=absent.jsonl",), loaded, works_of(loaded, machine), machine, print)
    assert "absent.jsonl" in again[0].problem


@pytest.mark.parametrize(
    ("message", "chosen", "tried"),
    [
        ("passes of at most 5,822 tokens (119,062 tokens a second; tried 2,048, 2,911)", 5822, 2911),
        ("policy: passes of at most 2,048 tokens (9 tokens a second; tried 2,048, 4,096, 8,192)", 2048, 8192),
        ("passes of at most 2,048 tokens (33,799 tokens a second; tried 2,048)", 2048, 2048),
        ("passes of at most 2,048 tokens (a pass of that many did not fit when it was tried)", 2048, 0),
        ("critic: passes of at most 4,096 tokens (9 tokens a second; tried 2,048, 4,096)", None, None),
    ],
)
def test_the_sizes_of_passes_are_read_as_a_run_says_them(message: str, chosen: int | None, tried: int | None) -> None:
    found = pass_sizes([{"code": "run.start", "message": ""}, {"code": "micro_batch.chosen", "message": message}])
    assert (found.pass_tokens, found.tried_tokens) == (chosen, tried)
