"""`placement`: what it takes, what it refuses, and that a resumed run may have another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.commands.check import check_recipe
from kedge.commands.checks import machine as check_machine
from kedge.core.errors import ConfigError
from kedge.models.loading.describe import describe
from kedge.recipe.placement import PlacementSettings, num_processes
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe

Write = Callable[[str, str], Path]

PAIRS = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "d", "chosen": "e", "rejected": "f"}\n'
RECIPE = "kedge: 1\nname: p\nmodel: tiny\ndevice: cpu\nstages:\n  prepare: {kind: data, files: [pairs.jsonl]}\n"
SFT = "  sft: {kind: sft, data: demos.jsonl, batch: 4, max_length: 64}\n"


@pytest.fixture
def file(write: Write) -> Path:
    write("pairs.jsonl", PAIRS)
    write("demos.jsonl", '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    return write("a.yaml", RECIPE)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("processes=0", "placement.processes: must be auto or a whole number from 1 to 1,024, found 0"),
        ("processes=all", "placement.processes: must be auto or a whole number from 1 to 1,024, found 'all'"),
        ("processes=true", "found 'true'"),
        ("weights=halve", "weights"),
        ("groups={judge: 1}", "placement.groups.judge: must be a mapping of settings, found 1"),
        ("groups={judge: {gpus: 0}}", "placement.groups.judge.gpus: must be at least 1, found 0"),
        ("groups={learner: {roles: [critik]}}", "no role 'critik' .did you mean 'critic'..; the roles are policy"),
        ("groups={learner: {weights: halve}}", "placement.groups.learner.weights"),
        ("groups={lerner: {roles: [policy]}}", "live in `learner`, which is not among them .did you mean 'lerner'..;"),
        ("groups={learner: {roles: [critic]}, b: {roles: [critic]}}", "the role critic is in learner and in b"),
        ("groups={A B: {gpus: 1}, learner: {gpus: 1}}", "placement.groups.A B"),
        ("restarts=-1", "placement.restarts: must be at least 0"),
        ("timeout=0", "placement.timeout: must be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused_with_words(file: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_recipe(file, [f"placement.{setting}"])


def test_another_placement_may_resume_a_run(file: Path, tmp_path: Path) -> None:
    run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=False, say=lambda _: None)
    changed = load_recipe(file, ["placement.processes=2", "placement.timeout=5"])
    run_recipe(changed, tmp_path / "runs", is_resumed=True, say=lambda _: None)


def test_processes_are_counted_by_the_machine() -> None:
    assert num_processes(PlacementSettings(), num_gpus=8) == 1
    assert num_processes(PlacementSettings(processes="auto"), num_gpus=8) == 8
    assert num_processes(PlacementSettings(processes="auto"), num_gpus=None) == 1
    assert num_processes(PlacementSettings(processes=3), num_gpus=None) == 3
    with pytest.raises(ConfigError, match="9 processes need a GPU each, and torch finds 8 here; use at most 8"):
        num_processes(PlacementSettings(processes=9), num_gpus=8)
    with pytest.raises(ConfigError, match="at most 64"):
        num_processes(PlacementSettings(processes=65), num_gpus=None)
    assert num_processes(PlacementSettings(processes=6), num_gpus=8, num_sampling=2) == 6
    with pytest.raises(ConfigError, match="finds 8 here, of which vLLM has 2; use at most 6"):
        num_processes(PlacementSettings(processes=7), num_gpus=8, num_sampling=2)


def test_check_prints_the_layout_and_refuses_what_the_machine_lacks(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(RECIPE + SFT)
    assert check_recipe(load_recipe(file)).placement == ()
    layout = check_recipe(load_recipe(file, ["placement.processes=2"])).placement
    assert layout[0] == "2 processes on the CPU, each with all weights; process 0 also writes the run folder"
    work = "4 rows a step, about 2 a process; 963.0 KiB of gradients added up a step"
    assert layout[1] == f"sft: each holds the model that learns, about 3.8 MiB; {work}"
    monkeypatch.setattr(check_machine, "gpus_of", lambda _: 1)
    (finding,) = check_machine.placement_findings(load_recipe(file, ["placement.processes=2"]))
    assert finding.message.startswith("2 processes need a GPU each, and torch finds 1 here")


def sample_on_eight_gpus(file: Path, monkeypatch: pytest.MonkeyPatch, generator: str) -> None:
    """A recipe with PPO and this generator, on a machine with eight GPUs."""
    reward = "{kind: function, path: 'rules.py:plain'}"
    ppo = f"  ppo: {{kind: ppo, reward: {reward}, prompts: prompts.jsonl, batch: 24, generator: {generator}}}\n"
    file.write_text(RECIPE + SFT + ppo)
    monkeypatch.setattr(check_machine, "gpus_of", lambda _: 8)
    monkeypatch.setattr(check_machine, "_gpu_bytes", lambda: 80 * 2**30)


def test_gpus_of_vllm_do_not_learn(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_on_eight_gpus(file, monkeypatch, "{kind: vllm, python: python, gpus: 2}")
    (finding,) = check_machine.placement_findings(load_recipe(file, ["placement.processes=7"]))
    assert "torch finds 8 here, of which vLLM has 2; use at most 6" in finding.message
    lines = list(check_machine.placement_lines(load_recipe(file, ["placement.processes=auto"]), {}, {}))
    assert lines[0].startswith("6 processes on cuda:0 to cuda:5, each with all weights; ")
    assert lines[-1].startswith("ppo: 24 answers an iteration, about 4 a process; 6 rows a step")
    assert lines[-1].endswith("vLLM is asked by process 0, for all")


def test_gpus_that_vllm_shares_learn(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_on_eight_gpus(file, monkeypatch, "{kind: vllm, python: python, gpus: shared}")
    assert not list(check_machine.placement_findings(load_recipe(file, ["placement.processes=8"])))
    lines = list(check_machine.placement_lines(load_recipe(file, ["placement.processes=auto"]), {}, {}))
    assert lines[0].startswith("8 processes on cuda:0 to cuda:7, each with all weights; ")
    assert lines[-1].endswith("vLLM is asked by process 0, for all, on the same GPUs, asleep while it is learnt")


def test_gpus_that_nobody_uses_are_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "gpus_of", lambda _: 2)
    (line,) = check_machine.placement_lines(load_recipe(file), {}, {})
    assert line == "one process on cuda:0; torch finds 2 GPUs here: placement.processes: auto takes them all"
    monkeypatch.setattr(check_machine, "gpus_of", lambda _: 1)
    assert list(check_machine.placement_lines(load_recipe(file), {}, {})) == []


_PPO = """
  ppo: {kind: ppo, reward: {kind: function, path: "r.py:score"}, prompts: p.jsonl, batch: 8, answers: 3, minibatches: 2}
"""


@pytest.mark.parametrize(
    ("roles", "held"),
    [
        ("separate", "actor, critic, reference, about 8.5 MiB of 80.0 GiB"),
        ("lora", "base, actor, critic, reference, about 2.3 MiB of 80.0 GiB"),
        ("trunk", "all roles"),
    ],
)
def test_the_layout_says_which_roles_a_gpu_holds_and_how_much_of_it_they_take(
    file: Path, monkeypatch: pytest.MonkeyPatch, roles: str, held: str
) -> None:
    monkeypatch.setattr(check_machine, "gpus_of", lambda _: 4)
    monkeypatch.setattr(check_machine, "_gpu_bytes", lambda: 80 * 2**30)
    file.write_text(RECIPE + _PPO)
    recipe = load_recipe(file, ["placement.processes=auto", f"stages.ppo.roles={roles}"])
    facts = describe("tiny", dtype="float32")
    first, ppo = check_machine.placement_lines(recipe, {"ppo": facts}, {})
    assert first.startswith("4 processes on cuda:0 to cuda:3, each with all weights; ")
    assert ppo.startswith(
        f"ppo: each holds {held}; 24 answers an iteration, about 6 a process; 12 rows a step, about 3 a process; "
    )


_SHARD = ["placement.weights=shard", "placement.processes=3"]


@pytest.mark.parametrize(
    ("stage", "where", "words"),
    [
        (_PPO.replace("answers: 3", "roles: trunk"), "stages.ppo.roles", "trunk keeps hidden states"),
        (_PPO.replace("answers: 3", "memory: {lora: {base_bits: 8}}"), "stages.ppo.memory.lora.base_bits", "8 bits"),
        (SFT.replace("batch: 4", "lora: {base_bits: 4}"), "stages.sft.lora.base_bits", "a base of 4 bits"),
        (SFT.replace("batch: 4", "optimiser: {name: adamw_8bit}"), "stages.sft.optimiser.name", "moments in 8 bits"),
        (
            SFT.replace("batch: 4", "memory: {offload: [optimiser]}"),
            "stages.sft.memory.offload",
            "not moved to the host",
        ),
        (_PPO.replace("answers: 3", "memory: {frozen_bits: 8}"), "stages.ppo.memory.frozen_bits", "models of 8 bits"),
        (SFT.replace("batch: 4", "batch: 2"), "stages.sft.batch", "step has 2 rows, and 3 processes share them"),
        (_PPO.replace("minibatches: 2", "minibatches: 12"), "stages.ppo.batch", "has 2 rows"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_starts(
    file: Path, monkeypatch: pytest.MonkeyPatch, stage: str, where: str, words: str
) -> None:
    monkeypatch.setattr("kedge.core.optimiser.eight_bit_package", lambda: "torchao")
    file.write_text(RECIPE + stage)
    (finding,) = check_machine.placement_findings(load_recipe(file, _SHARD))
    assert (finding.level, finding.where) == ("fatal", where)
    assert re.search(words, finding.message), finding.message
    assert not list(check_machine.placement_findings(load_recipe(file, _SHARD[1:])))


def test_the_layout_of_sharded_weights_says_who_holds_which_part(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "gpus_of", lambda _: 4)
    monkeypatch.setattr(check_machine, "_gpu_bytes", lambda: 80 * 2**30)
    file.write_text(RECIPE + _PPO)
    facts = {"ppo": describe("tiny", dtype="float32")}
    recipe = load_recipe(file, ["placement.weights=shard", "placement.processes=auto", "stages.ppo.roles=separate"])
    first, ppo = check_machine.placement_lines(recipe, facts, {})
    assert first.startswith("4 processes on cuda:0 to cuda:3, each with a part of every weight that learns or is ")
    assert ppo.startswith(
        "ppo: each holds 1 of 4 parts of actor, critic, reference, about 2.1 MiB of 80.0 GiB; "
        "and a whole copy of the policy to sample from, 481.5 KiB; 24 answers an iteration"
    )
    assert ppo.endswith("1.9 MiB of gradients added up a pass")
    alone, _ = check_machine.placement_lines(load_recipe(file, ["placement.weights=shard"]), facts, {})
    assert alone.startswith("one process on cuda:0 with sharded weights: it holds all parts")
