"""Runs as scripts read them."""

from __future__ import annotations

from pathlib import Path

import pytest

import kedge
from kedge.core.errors import ConfigError, ModelError, RunError


def test_a_run_is_opened_by_its_folder_or_that_of_a_stage(done: kedge.Run) -> None:
    run, stage = kedge.Run(done.folder), kedge.Run(done.folder / "ppo")
    assert list(run.stages) == list(stage.stages) == ["ppo"]
    assert [{"stage": "ppo", **each} for each in run.stage("ppo").metrics()] == list(stage.metrics("ppo"))
    assert run.stage("ppo").settings["iterations"] == 3
    assert {each["code"] for each in run.events()} >= {"run.memory"}
    assert all(each["stage"] == "ppo" and each["answer"] for each in run.samples())
    assert run.report() == done.folder / "report.html"
    assert repr(run) == f"<run '{done.folder}': done>"


def test_what_is_not_there_is_said_with_the_nearest_name(done: kedge.Run) -> None:
    with pytest.raises(RunError, match=r"no stage 'pop' \(did you mean 'ppo'\?\); those that began: ppo"):
        done.stage("pop")
    with pytest.raises(ConfigError, match=r"there is no such folder \(did you mean 'done'\?\)"):
        kedge.Run(done.folder.with_name("dona"))


def test_a_model_is_loaded_from_wherever_it_is(done: kedge.Run, tiny: str) -> None:
    for place in (done.folder, done.folder / "ppo", str(done.folder / "ppo/model"), Path(tiny)):
        model, tokenizer = kedge.load_model(place)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_tensors="pt", return_dict=True)
        assert model.generate(**text, max_new_tokens=2, do_sample=False).shape[1] == text["input_ids"].shape[1] + 2
    with pytest.raises(ModelError, match="no model here; expected a folder with config"):
        kedge.load_model(done.folder / "inputs")
    with pytest.raises(ModelError, match="no model named 'tinny'"):
        kedge.load_model("tinny")


def test_an_ensemble_or_several_models_are_not_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model/ensemble.json").touch()
    with pytest.raises(ModelError, match=r"holds 2 models; name one: \S+one/model, \S+two/model"):
        kedge.load_model(tmp_path)
    (tmp_path / "one/model/member-0").mkdir()
    (tmp_path / "one/model/member-0/config.json").touch()
    with pytest.raises(ModelError, match=r"an ensemble of reward models.*; load a member: \S+member-0"):
        kedge.load_model(tmp_path / "one")
