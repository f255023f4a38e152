"""Each class trains, on data and rewards as a script has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import kedge
from kedge.core.errors import ConfigError, DataError, ModelError, RewardError
from kedge.testing.journals import records

PPO = Callable[..., kedge.PPO]
Settings = dict[str, Any]

SUPERVISED = {"batch": 4, "micro_batch": 4, "max_length": 64, "optimiser": {"lr": 1e-3}, "device": "cpu"}
DEMONSTRATIONS = [{"prompt": f"Say {word}", "completion": f"{word} it is."} for word in ("yes", "no", "never", "maybe")]
PAIRS = [{"prompt": f"Say {n}", "chosen": f"{n} is it", "rejected": f"no {n}"} for n in range(12)]


def same_weights(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == its_name and torch.equal(value, its) for (name, value), (its_name, its) in pairs)


def test_ppo_with_a_function_on_a_list_of_prompts_makes_a_model_of_transformers(done: kedge.Run) -> None:
    assert done.status == "done"
    model, tokenizer = done.stage("ppo").load()
    folder = done.folder / "ppo/model"
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(folder))
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    rows = [json.loads(line) for line in (done.folder / "inputs/prompts.jsonl").read_text().splitlines()]
    assert rows[1] == {"prompt": [{"role": "user", "content": "Say b"}]}
    assert [record["step"] for record in done.metrics()] == [1, 2, 3]
    manifest = json.loads((done.folder / "run.json").read_text())
    assert manifest["name"] == "done"
    assert manifest["settings"]["stages"]["ppo"]["prompts"] == "inputs/prompts.jsonl"
    assert manifest["settings"]["stages"]["ppo"]["reward"].items() >= {"kind": "callable", "importable": True}.items()


def test_sft_then_a_reward_model_then_preferences(tiny: str, runs: Path) -> None:
    sft = kedge.SFT(tiny, data=DEMONSTRATIONS, samples=0, **SUPERVISED).run(runs / "sft", say=None)
    reward = kedge.Reward(sft, data=[PAIRS], if_unfit="go_on", **SUPERVISED).run(runs / "reward", say=None)
    judge, _ = reward.stage("reward").load()
    assert same_weights(judge, AutoModelForSequenceClassification.from_pretrained(reward.stage("reward").model))
    data = Dataset.from_list(PAIRS).with_format("torch")
    preference = kedge.Preference(sft.stage("sft"), data=data, samples=0, lora={"rank": 2}, **SUPERVISED)
    dpo = preference.run(runs / "dpo", say=None)
    assert dpo.status == "done"
    assert (dpo.folder / "inputs/data.jsonl").read_bytes() == (reward.folder / "inputs/data-1.jsonl").read_bytes()
    model, _ = kedge.load_model(dpo.folder)
    assert not same_weights(model, sft.stage("sft").load()[0])


def length(answers: list[kedge.Answer], most: list[int]) -> list[float]:
    """Reads a field of the prompt's record."""
    return [min(len(answer.text), limit) / limit for answer, limit in zip(answers, most, strict=True)]


def test_group_best_of_n_and_evaluate(rollouts: Settings, runs: Path, tiny: str) -> None:
    group = kedge.Group(**{**rollouts, "iterations": 1}, answers=2, method="rloo").run(runs / "group", say=None)
    assert group.status == "done"
    prompts = [{"prompt": f"Say {word}", "most": 4} for word in ("yes", "no")]
    sampled: Settings = {"prompts": prompts, "device": "cpu", "seed": 3}
    short: Settings = {"max_prompt_tokens": 40, "sampling": {"max_new_tokens": 6}}
    method = {"kind": "rejection", "finished": False}
    best = kedge.BestOfN(tiny, reward=length, n=2, method=method, **short, **sampled).run(runs / "best", say=None)
    made = best.stage("best_of_n")
    assert set(made.outputs) == {"model", "demonstrations"}
    sources = [length, {"kind": "regex", "pattern": "."}]
    evaluate = kedge.Evaluate(models=[tiny, made], reward=sources, max_new_tokens=6, **sampled)
    evaluate = evaluate.run(runs / "eval", say=None)
    evaluation = json.loads(evaluate.stage("evaluate").outputs["evaluation"].read_text())
    assert set(evaluation["models"]) == {tiny, str(made.model)}


def test_a_list_of_functions_is_their_sum(ppo: PPO, runs: Path) -> None:
    def half(answer: kedge.Answer) -> float:
        return 0.5

    def doubled(answer: kedge.Answer) -> float:
        return len(answer.text) / 4

    one = ppo(reward=[half, doubled, half], iterations=1).run(runs / "sum", say=None)
    other = ppo(reward=lambda answer: 1.0 + len(answer.text) / 4, iterations=1).run(runs / "one", say=None)
    first, second = next(one.metrics()), next(other.metrics())
    assert first["reward/mean"] == pytest.approx(second["reward/mean"], rel=1e-6)
    parts = one.stage("ppo").settings["reward"]["parts"]
    assert list(parts) == ["half", "doubled", "half-2"]
    assert [part["importable"] for part in parts.values()] == [False] * 3


def test_an_exception_costs_a_row_its_score_and_too_many_stop_the_run(ppo: PPO, runs: Path) -> None:
    def broken(answer: kedge.Answer) -> float:
        raise KeyError(answer.text)

    failing = ppo(reward=broken, failures={"window": 4})
    with pytest.raises(RewardError, match=r"'reward' gave no score to any of 4 answers.*KeyError"):
        failing.run(runs / "failing", say=None)
    assert kedge.Run(runs / "failing").status == "failed"


def test_options_and_fields_fill_the_parameters_of_a_function(ppo: PPO, runs: Path) -> None:
    seen: list[tuple[str, int]] = []

    def score(answer: kedge.Answer, unit: str, number: int) -> float:
        seen.append((unit, number))
        return 0.0

    prompts = [{"prompt": f"Say {number}", "number": number} for number in range(4)]
    source = {"kind": "callable", "function": score, "options": {"unit": "km"}}
    ppo(reward=source, prompts=prompts, iterations=1).run(runs / "filled", say=None)
    assert sorted(seen) == [("km", 0), ("km", 1), ("km", 2), ("km", 3)]
    with pytest.raises(ConfigError, match=r"nothing fills its parameter `unit`: the prompts' records have number"):
        ppo(reward=score, prompts=prompts).run(runs / "missing", say=None)
    assert not (runs / "missing").exists()


def test_data_may_be_a_file_or_a_dataset(ppo: PPO, tmp_path: Path, done: kedge.Run) -> None:
    rows = [{"prompt": f"Say {letter}", "note": None} for letter in "abcdef"]
    expected = (done.folder / "inputs/prompts.jsonl").read_bytes()
    for prompts in (rows, Dataset.from_list(rows), Dataset.from_list(rows).to_pandas(), iter(rows)):
        inputs = ppo(prompts=prompts)._inputs
        assert b"".join(inputs.files["inputs/prompts.jsonl"]) == expected
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(expected)
    as_file = ppo(prompts=file, iterations=3).run(tmp_path / "runs/file", say=None)
    assert records(as_file.folder / "ppo/metrics.jsonl") == records(done.folder / "ppo/metrics.jsonl")


def test_settings_are_checked_when_the_object_is_made(rollouts: Settings) -> None:
    wrong = {**rollouts, "iterations": 0, "kl": {"tagret": 6.0}, "sede": 8, "from": "tiny", "roles": "lorra"}
    with pytest.raises(ConfigError) as caught:
        kedge.PPO(**wrong)
    assert str(caught.value).splitlines() == [
        "PPO: 5 problem(s)",
        "  sede: not a setting here (did you mean 'seed'?)",
        "  from: not a keyword here; what the stage starts from is `model`",
        "  roles: must be 'lora', 'separate' or 'trunk', found 'lorra' (did you mean 'lora'?)",
        "  iterations: must be at least 1, found 0",
        "  kl.tagret: not a setting here (did you mean 'target'?)",
    ]
    with pytest.raises(ConfigError, match=r"PPO: 2 problem\(s\)\n  model: is required.*\n  reward: is required"):
        kedge.PPO(prompts=["one"])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["one", {"prompt": 3}], r"prompts\[1\]: field 'prompt' is 3; it must be text or messages"),
        ([{"prompt": "one"}, 7], r"prompts\[1\]: expected text or a dict of fields, found 7 \(int\)"),
        ([], "prompts: there are no rows in it"),
        ([{"promt": "one"}], "prompts: no known format has these fields: promt. Did you mean 'promt' → 'prompt'"),
        (DatasetDict(train=Dataset.from_list([{"prompt": "a"}])), "prompts: found a mapping with train; give rows"),
    ],
)
def test_a_bad_row_is_named_when_the_object_is_made(ppo: PPO, prompts: Any, message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        ppo(prompts=prompts)


def test_rows_of_another_kind_and_lists_that_mix_files_with_rows_are_refused(tiny: str) -> None:
    with pytest.raises(DataError, match="data: holds prompts, recognised by prompt; demonstrations are needed here"):
        kedge.SFT(tiny, data=[{"prompt": "one"}])
    with pytest.raises(ConfigError, match="data: found files and rows in one list"):
        kedge.Reward(tiny, data=[PAIRS, "pairs.jsonl"], objectives=["a", "b"])


def test_inputs_inside_of_sections_may_be_functions_and_rows(tiny: str) -> None:
    online = {"prompts": ["one", "two"], "reward": lambda answer: 0.0, "max_prompt_tokens": 40}
    preference = kedge.Preference(tiny, online=online)
    settings = preference.recipe().resolved()["stages"]["preference"]["online"]
    assert settings["prompts"] == "inputs/online.prompts.jsonl"
    assert settings["reward"]["kind"] == "callable"


def test_what_check_finds_names_rows_without_a_passing_folder(ppo: PPO, runs: Path) -> None:
    findings = ppo(minibatches=9).check()
    assert [(finding.level, finding.code) for finding in findings] == [("fatal", "ppo.minibatches")]
    with pytest.raises(ConfigError, match=r"PPO: not fit to run, and nothing was started.*\n  minibatches: 9 minibatc"):
        ppo(minibatches=9).run(runs / "unfit", say=None)
    assert not runs.exists()
    twice = ppo(prompts=["Say a", "Say a", "Say b"]).check()
    assert [finding.where for finding in twice if finding.code == "duplicates.exact"] == ["inputs/prompts.jsonl:2"]


def test_a_model_that_is_not_there_yet(ppo: PPO, runs: Path) -> None:
    stopped = ppo().run(runs / "stopped", on_step=lambda step, metrics: True, say=None)
    with pytest.raises(ModelError, match=r"stage 'ppo' has no model: it is interrupted, and has made nothing yet"):
        stopped.stage("ppo").load()
