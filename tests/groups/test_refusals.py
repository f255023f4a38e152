"""What is refused of groups before anything is started, with words, and the layout that `kedge check` prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kedge
from kedge.commands.check import check_recipe, refuse_unfit
from kedge.commands.checks.groups import group_findings, layout_of, refuse_groups
from kedge.commands.run import alone, run_placed
from kedge.core.errors import ConfigError, PluginError
from kedge.recipe.schema import load_recipe
from kedge.runtime import ray_groups as ray_file
from kedge.runtime import worker

Write = Callable[[str, str], Path]

RECIPE = """
kedge: 1
name: short
model: tiny
device: cpu
placement:
  groups: {learner: {gpus: 2}, critic: {roles: [critic], gpus: 1}}
stages:
  ppo:
    kind: ppo
    roles: separate
    reward: {kind: function, path: "reward.py:score"}
    prompts: prompts.jsonl
    sampling: {max_new_tokens: 6}
    max_prompt_tokens: 64
"""


@pytest.fixture
def file(write: Write) -> Path:
    write("reward.py", "def score(answers):\n    return [1.0 for _ in answers]\n")
    write("prompts.jsonl", '{"prompt": "a question"}\n{"prompt": "another one"}\n')
    return write("r.yaml", RECIPE)


@pytest.fixture(autouse=True)
def _as_if_ray_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_file, "missing_ray", lambda: None)


def with_groups(groups: str) -> str:
    return RECIPE.replace("{learner: {gpus: 2}, critic: {roles: [critic], gpus: 1}}", groups)


@dataclass(frozen=True, slots=True)
class Case:
    settings: tuple[str, ...]
    code: str
    words: str
    groups: str = "{learner: {gpus: 2}, critic: {roles: [critic], gpus: 1}}"


ENGINES = "{learner: {gpus: 1}, engines: {roles: [generator], gpus: 1}}"
CASES = [
    Case(("stages.ppo.roles=lora",), "groups.sharing", "shares weights between policy, reference, critic, generator"),
    Case(("stages.ppo.roles=trunk",), "groups.sharing", "critic in critic, generator in learner: what is shared"),
    Case(("stages.ppo.roles=lora",), "groups.sharing", "generator in engines", ENGINES),
    Case(
        ("stages.ppo.generator={kind: vllm, gpus: 1, python: /nowhere}",),
        "groups.vllm",
        "vLLM beside groups is asked on servers that run already",
    ),
    Case(
        ("stages.ppo.generator={kind: vllm, servers: ['http://127.0.0.1:1']}",),
        "groups.generator",
        "samples elsewhere already",
        ENGINES,
    ),
]


def test_groups_shard_their_weights_where_the_placement_says_so_and_they_say_nothing_else(file: Path) -> None:
    groups = "{learner: {gpus: 2}, critic: {roles: [critic]}, judge: {roles: [reward], weights: replicate}}"
    file.write_text(with_groups(groups))
    recipe = load_recipe(file, ["placement.weights=shard"])
    shard, replicate = "shard", "replicate"
    assert {group.name: group.weights for group in layout_of(recipe)} == {
        "learner": shard, "critic": shard, "judge": replicate,
    }  # fmt: skip
    assert {group.weights for group in layout_of(load_recipe(file))} == {replicate}
    assert [finding for finding in group_findings(recipe) if finding.level == "fatal"] == []
    with alone(recipe) as world:
        assert world.mesh is None, "the driver holds no part of anything"
    trunk = load_recipe(file, ["placement.weights=shard", "stages.ppo.roles=trunk"])
    assert "placement.shard" in {finding.code for finding in group_findings(trunk)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.settings[0])
def test_what_groups_cannot_hold_is_refused(file: Path, case: Case) -> None:
    file.write_text(with_groups(case.groups))
    recipe = load_recipe(file, case.settings)
    found = {finding.code: finding.message for finding in group_findings(recipe) if finding.level == "fatal"}
    assert case.words in found[case.code]
    with pytest.raises(ConfigError, match="its groups cannot run, and nothing was started"):
        refuse_groups(recipe)
    with pytest.raises(ConfigError, match="not fit to run, and nothing was started"):
        refuse_unfit(recipe, offline=True)


def test_a_reward_may_be_apart_from_roles_that_share_weights(file: Path) -> None:
    file.write_text(with_groups("{learner: {gpus: 1}, judge: {roles: [reward], gpus: 1}}"))
    refuse_groups(load_recipe(file, ["stages.ppo.roles=lora"]))


def test_processes_and_groups_exclude_each_other(file: Path) -> None:
    with pytest.raises(ConfigError, match="the processes of a run are either alike or in groups; leave one out"):
        load_recipe(file, ["placement.processes=2"])


@pytest.mark.parametrize("nothing", ["{}", "null"])
def test_a_run_goes_on_without_the_groups_of_its_recipe(file: Path, nothing: str) -> None:
    recipe = load_recipe(file, [f"placement.groups={nothing}", "placement.processes=2"])
    assert (recipe.settings.placement.groups, recipe.settings.placement.processes) == (None, 2)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("{learner: {gpus: 1}, judge: {gpus: 2}}", "judge holds no role, and its 2 GPU"),
        (
            "{learner: {gpus: 3}, all: {roles: [policy, reference, critic, reward, gold, generator]}}",
            "learner holds no role, and its 3 GPU",
        ),
        ("{learner: {gpus: 1}, judge: {roles: [reward, reward]}}", "the role reward is twice in judge"),
        ("{learner: {gpus: 1}, judge: {roles: reward}}", "judge.roles: must be a list, found 'reward'"),
    ],
)
def test_a_group_that_would_do_nothing_or_the_same_twice_is_refused(file: Path, groups: str, words: str) -> None:
    file.write_text(with_groups(groups))
    with pytest.raises(ConfigError, match=words):
        load_recipe(file)


def test_more_processes_than_a_machine_has_room_for_on_its_cpu_are_refused(file: Path) -> None:
    file.write_text(with_groups("{learner: {gpus: 64}, judge: {roles: [reward]}}"))
    with pytest.raises(
        ConfigError, match="the groups have 65 processes together, on the CPU of one machine; at most 64"
    ):
        refuse_groups(load_recipe(file))


def test_only_groups_that_learn_share_the_rows_of_a_step(file: Path) -> None:
    file.write_text(with_groups("{learner: {gpus: 1}, judge: {roles: [reward], gpus: 33, weights: shard}}"))
    refuse_groups(load_recipe(file, ["stages.ppo.batch=32", "stages.ppo.minibatches=1"]))
    file.write_text(with_groups("{learner: {gpus: 1}, critic: {roles: [critic], gpus: 33, weights: shard}}"))
    with pytest.raises(ConfigError, match="an optimiser step has 32 rows, and 33 processes share them"):
        refuse_groups(load_recipe(file, ["stages.ppo.batch=32", "stages.ppo.minibatches=1"]))


def test_groups_hold_their_parts_within_what_the_placement_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(file, ["placement.weights=shard", "placement.shard_within=all"])
    learner, _ = layout_of(recipe)
    told: list[str] = []
    world = SimpleNamespace(write_stacks_to=lambda folder: None, shard_weights=told.append)
    monkeypatch.setattr(worker, "joined", lambda *_, **__: nullcontext(world))
    member = worker.Member({}, learner, 0, on_gpu=False, timeout_s=1.0, stacks=file.parent)
    monkeypatch.chdir(file.parent)
    member.build(("127.0.0.1", 1), str(file.parent), {}, lambda order, **_: {}, None)
    assert told == ["all"]


def test_more_gpus_than_there_are_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.commands.checks.groups.gpus_of", lambda device: 2)
    (finding,) = (finding for finding in group_findings(load_recipe(file)) if finding.code == "machine.groups")
    assert finding.message == "the groups have 3 GPUs together, and the cluster has 2"


def test_groups_without_ray_are_refused_with_the_command_that_installs_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(ray_file, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'kedge\[ray\]'"):
        refuse_groups(load_recipe(file))
    with pytest.raises(PluginError, match="needs Ray"), ray_file.ray_groups([], device="cpu", timeout_s=1, restarts=0):
        raise AssertionError("unreachable")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kedge[ray]'")
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", r"nobody answers at 127\.0\.0\.1:1 \(RAY_ADDRESS\): .*refused"),
        ("http://127.0.0.1:8265", r"is http://127\.0\.0\.1:8265, where a cluster takes jobs: ray job submit"),
        ("ray://127.0.0.1:10001", r"is for Ray Client; the driver of groups runs inside of the cluster"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_at_once(
    file: Path, address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=words):
        refuse_groups(load_recipe(file))


def test_groups_are_driven_by_one_process_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one process drives the groups, and 2 were started"):
        run_placed(load_recipe(file), file.parent, is_resumed=False, command=[], check=_never, run=_never, say=_never)


def test_runs_are_not_written_into_a_copy_of_the_folder_that_ray_deletes(file: Path) -> None:
    folder = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs/short")
    with pytest.raises(ConfigError, match=r"--runs: .* which the machines do not share and Ray deletes"):
        run_placed(load_recipe(file), folder, is_resumed=False, command=[], check=_never, run=_never, say=_never)


@pytest.mark.parametrize("started", [1, 2])
def test_weights_that_cannot_be_sharded_are_refused_where_a_run_goes_on_too(
    file: Path, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its placement may have changed since it was checked; and torchrun says how many processes there are."""
    file.write_text(
        RECIPE.replace("  groups: {learner: {gpus: 2}, critic: {roles: [critic], gpus: 1}}", "  weights: shard")
    )
    recipe = load_recipe(file, ["stages.ppo.roles=trunk"] if started == 1 else ["stages.ppo.batch=1"])
    words = "roles: trunk keeps hidden states" if started == 1 else "has 1 row, and 2 processes share them"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        if started == 2:
            monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"cannot be sharded \(placement\.weights\), and nothing was started:\n.*{words}"
    ):
        run_placed(recipe, file.parent, is_resumed=True, command=[], check=_never, run=_never, say=_never)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing may be started")


def test_a_function_of_a_script_must_be_one_that_others_can_import(tmp_path: Path) -> None:
    groups = {"groups": {"learner": {"gpus": 1}}}
    stage = kedge.PPO(
        model="tiny", reward=lambda answers: [0.0], prompts=["a"], placement=groups, device="cpu", roles="separate"
    )
    with pytest.raises(ConfigError, match="cannot be imported by another process: it is a lambda"):
        stage.run(tmp_path / "run", check=False)
    assert not (tmp_path / "run").exists()


def test_the_layout_says_who_holds_what(file: Path) -> None:
    lines = check_recipe(load_recipe(file), offline=True).placement
    assert lines == (
        "ppo: group learner on 2 processes holds policy, reference, reward, generator, about 4.7 MiB each",
        "ppo: group critic on 1 process holds critic, about 3.8 MiB each",
    )
    file.write_text(with_groups(ENGINES))
    apart = check_recipe(load_recipe(file), offline=True)
    assert apart.placement[-1] == "ppo: 963.0 KiB of weights go from group learner to engines an iteration"


def test_a_recipe_without_rl_is_told_that_groups_do_nothing(file: Path) -> None:
    above, _, _ = RECIPE.partition("  ppo:")
    file.write_text(f"{above}  sft: {{kind: sft, data: prompts.jsonl}}")
    assert [finding.code for finding in group_findings(load_recipe(file))] == ["groups.unused"]
