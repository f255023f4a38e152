"""Whole runs with a stand-in for vLLM: started, synced, stopped by what went wrong, taken up again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parents[2] / "rollout"))

from fake_vllm import interpreter

from kedge.core.errors import GeneratorError
from kedge.rollout.vllm import generator as vllm
from kedge.rollout.vllm.http import Api
from kedge.rollout.vllm.shared import GPUMemory
from kedge.runs.folder import Run, status_of
from kedge.stages.ppo.settings import STAGE, PPOSettings
from kedge.stages.rl import run as rl_run

Recipe = Callable[..., Path]
Kedge = Callable[..., int]
Records = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def generator(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "vllm", "python": str(interpreter(tmp_path)), "gpus": 0, "mismatch": 1e-4}


def test_a_run_samples_from_vllm_with_its_own_weights_and_ends_it(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, generator: dict[str, Any], tmp_path: Path
) -> None:
    recipe = ppo_recipe(tmp_path, generator=generator, roles="lora", sampling={"temperature": 0.7}, kl={"limit": 100.0})
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 0  # its heads are too narrow for vLLM
    stage = tmp_path / "runs/short/ppo"
    lines = records(stage / "metrics.jsonl")
    assert len(lines) == 2
    assert max(line["policy/mismatch"] for line in lines) < 1e-5
    assert "vllm.servers" in [event["code"] for event in records(stage / "events.jsonl")]
    assert not (stage / "vllm/weights").exists()
    assert "exit code -15" in (stage / "vllm/server-0.log").read_text()  # ended with the run


def test_answers_of_other_weights_stop_a_run_which_goes_on_before_them(
    ppo_recipe: Recipe,
    kedge: Kedge,
    records: Records,
    generator: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = ppo_recipe(tmp_path, generator=generator)
    load, check = vllm.weights_of, vllm.score

    def frozen(model: Any, trained: Any) -> Any:
        """The first weights each time, and a probe that does not see it: the answers themselves have to."""
        return first.setdefault("weights", {name: weight.clone() for name, weight in load(model, trained).items()})

    first: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(vllm, "weights_of", frozen)
        patched.setattr(vllm, "score", lambda model, probe: first.setdefault("score", check(model, probe)))
        assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 1
    assert "policy/mismatch is" in (told := "".join(capsys.readouterr()))
    assert "the weights did not arrive" in told
    stage = tmp_path / "runs/short/ppo"
    assert status_of(stage) == "failed"
    assert Run.open(stage, for_writing=False).checkpoints.steps() == [0, 1]  # the second update is not among them
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 0
    lines = records(stage / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["policy/mismatch"] for line in lines) < 1e-5


def test_under_a_lag_weights_that_do_not_arrive_stop_a_run_before_their_answers_are_learnt_from(
    ppo_recipe: Recipe,
    kedge: Kedge,
    records: Records,
    generator: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Old answers tell nothing of whether weights arrived: the probe does, at every handover."""
    recipe = ppo_recipe(tmp_path, generator={**generator, "lag": 1}, iterations=4)
    load, first = vllm.weights_of, dict[str, Any]()

    def frozen(model: Any, trained: Any) -> Any:
        return first or first.update(load(model, trained)) or {name: weight.clone() for name, weight in first.items()}

    with monkeypatch.context() as patched:
        patched.setattr(vllm, "weights_of", frozen)
        assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 1
    assert "the same text scores" in "".join(capsys.readouterr())
    stage = tmp_path / "runs/short/ppo"
    lines = records(stage / "metrics.jsonl")
    assert [(line["step"], line["age/mean"]) for line in lines] == [(1, 0), (2, 1)]  # both of weights that had arrived
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 0
    lines = records(stage / "metrics.jsonl")
    assert [line["age/mean"] for line in lines] == [0, 1, 0, 1]  # the batch that failed is asked for again
    assert max(line["policy/mismatch"] for line in lines if line["age/mean"] == 0) < 1e-5
    assert all("policy/mismatch" not in line for line in lines if line["age/mean"])


def test_without_a_server_left_everything_is_saved_and_the_run_goes_on_later(
    ppo_recipe: Recipe,
    kedge: Kedge,
    records: Records,
    generator: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"checkpoints": {"every": 100}}
    recipe = ppo_recipe(tmp_path, generator={**generator, "restarts": 0}, **settings)
    finish = rl_run.RLRun.finish

    def kill_after_one(run: rl_run.RLRun, number: int, *rest: Any) -> None:
        finish(run, number, *rest)
        if number == 0:
            (server,) = run.generator._queue.engines._servers  # pyright: ignore
            os.killpg(server._process.pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(rl_run.RLRun, "finish", kill_after_one)
        assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 1
    assert "no vLLM server is left" in "".join(capsys.readouterr())
    stage = tmp_path / "runs/short/ppo"
    assert Run.open(stage, for_writing=False).checkpoints.steps() == [0, 1]
    again = ppo_recipe(tmp_path, generator={**generator, "restarts": 5}, **settings)  # how it is done may change
    assert kedge("run", again, "--runs", tmp_path / "runs", "--resume") == 0
    found = records(stage / "metrics.jsonl")
    undisturbed = ppo_recipe(tmp_path / "undisturbed", generator=generator, **settings)
    assert kedge("run", undisturbed, "--runs", tmp_path / "undisturbed/runs", "--no-check") == 0
    expected = records(tmp_path / "undisturbed/runs/short/ppo/metrics.jsonl")
    assert [without_mismatch(line) for line in found] == [without_mismatch(line) for line in expected]


def without_mismatch(line: dict[str, Any]) -> dict[str, Any]:
    """Which rows are computed together changes the last bits of log-probs that servers note."""
    return {name: value for name, value in line.items() if name != "policy/mismatch"}


def test_a_run_sends_its_adapter_alone(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, generator: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"roles": "lora", "memory": {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}}
    recipe = ppo_recipe(tmp_path, generator={**generator, "sync": "adapter"}, kl={"limit": 100.0}, **settings)
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 0
    stage = tmp_path / "runs/short/ppo"
    lines = records(stage / "metrics.jsonl")
    assert max(line["policy/mismatch"] for line in lines) < 1e-5
    log = (stage / "vllm/server-0.log").read_text()
    assert '"--enable-lora": "", "--max-lora-rank": "8"' in log
    names = [line.split()[1] for line in log.splitlines() if line.startswith("adapter")]
    assert names == ["kedge-trial-down_proj", "kedge-trial-q_proj", "kedge-0-1", "kedge-1-2", "kedge-2-3"]
    assert not (stage / "vllm/weights").exists()


@pytest.mark.parametrize("is_compared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_on_shared_gpus_that_vllm_does_not_free_goes_on_later_and_gives_the_numbers_of_other_gpus(
    is_compared: bool,
    ppo_recipe: Recipe,
    kedge: Kedge,
    records: Records,
    generator: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vllm, "gpu_memory", lambda device: GPUMemory(free=60 << 30, total=80 << 30))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    recipe = ppo_recipe(tmp_path, generator={**generator, "gpus": "shared"})
    sleep, calls = Api.sleep, list[int]()

    def insomnia(api: Api, level: int) -> None:
        calls.append(level)
        if len(calls) == 3:  # after the start, the first batch, the second
            raise GeneratorError("HTTP 500: Worker failed: no sleep")
        sleep(api, level)

    with monkeypatch.context() as patched:
        patched.setattr(Api, "sleep", insomnia)
        assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 1
    told = "".join(capsys.readouterr())
    assert "vLLM does not sleep, and what learns needs its memory (HTTP 500: Worker failed: no sleep)" in told
    assert "asleep level=2" in told  # the end of its log
    stage = tmp_path / "runs/short/ppo"
    assert Run.open(stage, for_writing=False).checkpoints.steps() == [0, 1]
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 0
    lines = records(stage / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["policy/mismatch"] for line in lines) < 1e-5
    if is_compared:
        undisturbed = ppo_recipe(tmp_path / "undisturbed", generator=generator)
        assert kedge("run", undisturbed, "--runs", tmp_path / "undisturbed/runs", "--no-check") == 0
        expected = records(tmp_path / "undisturbed/runs/short/ppo/metrics.jsonl")
        assert [without_mismatch(line) for line in lines] == [without_mismatch(line) for line in expected]


def test_sharing_gpus_is_refused_where_a_recipe_learns_on_the_cpu(
    ppo_recipe: Recipe, kedge: Kedge, generator: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge("check", ppo_recipe(tmp_path, generator={**generator, "gpus": "shared"})) == 2
    told = " ".join("".join(capsys.readouterr()).split())
    assert "generator.gpus is shared, and this recipe learns on the CPU here: vLLM sleeps on NVIDIA GPUs alone" in told


@pytest.mark.slow
def test_a_run_of_two_processes_that_loses_its_server_gives_the_numbers_of_one(
    ppo_recipe: Recipe, records: Records, tmp_path: Path
) -> None:
    lines: list[list[dict[str, Any]]] = []
    for processes, dies_at in ((1, 0), (2, 6)):
        folder = tmp_path / str(processes)
        folder.mkdir()
        python = str(interpreter(folder, dies_at=dies_at))
        generator = {"kind": "vllm", "python": python, "gpus": 0, "mismatch": 1e-4, "lag": 1}
        recipe = ppo_recipe(folder, generator=generator, iterations=3)
        placement = ["--set", f"placement.processes={processes}"]
        command = [sys.executable, "-m", "kedge.cli", "run", str(recipe), "--no-check", "--runs", "runs", *placement]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        codes = [event["code"] for event in records(folder / "runs/short/ppo/events.jsonl")]
        assert codes.count("vllm.restarted") == (processes == 2)
        lines.append(records(folder / "runs/short/ppo/metrics.jsonl"))
    one, two = lines
    assert [line["age/mean"] for line in two] == [0, 1, 1]
    for name in ("reward/mean", "length/mean", "kl/mean", "policy/approx_kl", "value/loss"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], abs=1e-5), name


def test_greedy_answers_of_a_baseline_come_from_the_same_server(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, generator: dict[str, Any], tmp_path: Path
) -> None:
    recipe = ppo_recipe(tmp_path, generator=generator)
    content = json.loads(recipe.read_text())
    stage = content["stages"].pop("ppo")
    for name in ("critic", "roles"):
        stage.pop(name)
    content["stages"]["group"] = {**stage, "kind": "group", "method": "remax", "minibatches": 1, "kl": {"limit": 100}}
    recipe.write_text(json.dumps(content))
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 0
    log = (tmp_path / "runs/short/group/vllm/server-0.log").read_text()
    assert log.count("options") == 1
    versions = [line.split()[1] for line in log.splitlines() if line.startswith("version")]
    assert versions == ["0", "1", "2"]  # the last policy is measured against the KL budget too, with its own weights
    lines = records(tmp_path / "runs/short/group/metrics.jsonl")
    assert max(line["policy/mismatch"] for line in lines) < 1e-5


ADAPTER: dict[str, Any] = {"roles": "lora", "generator": {"sync": "adapter"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"generator": {"kind": "vllm"}}, "needs `python`"),
    "both": ({"generator": {"python": "python", "servers": ["http://a:1"]}}, "both are given"),
    "no share": ({"generator": {"gpus": "shard"}}, "from 0 to 1024, or shared (those that learn); found 'shard'"),
    "shared lag": ({"generator": {"gpus": "shared", "lag": 1}}, "nothing is sampled ahead: lag must be 0, found 1"),
    "shared given": ({"generator": {"servers": ["http://a:1"], "gpus": "shared"}}, "for servers that Kedge starts"),
    "servers and gpus": (
        {"generator": {"servers": ["http://a:1"], "gpus": 4}},
        "gpus is for servers that Kedge starts",
    ),
    "servers in parts": (
        {"generator": {"servers": ["http://a:1"], "tensor_parallel": 2}},
        "tensor_parallel is for servers that Kedge starts",
    ),
    "one server twice": ({"generator": {"servers": ["http://a:1", "http://a:1/"]}}, "http://a:1 is named twice"),
    "shared memory": ({"generator": {"gpus": "shared", "extra": {"gpu_memory_utilization": 0.3}}}, "is that share"),
    "much": ({"generator": {"gpus": "shared", "memory_share": 1.5}}, "share of each GPU between 0 and 1 (0.4)"),
    "memory": ({"generator": {"memory_share": 0.5}}, "memory_share is for gpus: shared"),
    "sleep": ({"generator": {"extra": {"enable-sleep-mode": True}}}, "set by Kedge itself"),
    "no adapter": ({**ADAPTER, "roles": "separate"}, "generator.sync is adapter, and this policy has none"),
    "adapter": ({"generator": {"sync": "delta"}}, "'merged' or 'adapter'"),
    "rank": ({**ADAPTER, "memory": {"lora": {"rank": 600}}}, "rank is 600, and vLLM takes adapters of up to 512"),
    "adapter bits": ({**ADAPTER, "memory": {"lora": {"base_bits": 4}}}, "adapter on the base as it is on disk"),
    "dora": ({**ADAPTER, "memory": {"lora": {"use_dora": True}}}, "DoRA is not computed here"),
    "partial": ({"generator": {"partial_rollouts": True}}, "partial_rollouts: answers that go on under new weights"),
    "in flight": ({"generator": {"in_flight_updates": True}}, "every answer is of one version of the weights"),
    "cut": ({"generator": {"python": "python", "gpus": 3, "tensor_parallel": 2}}, "3 GPUs cannot be cut"),
    "reserved": ({"generator": {"python": "python", "extra": {"max_model_len": 3}}}, "set by Kedge itself"),
    "no URL": ({"generator": {"servers": ["localhost:8000"]}}, "expected http://HOST"),
    "top_p": ({"sampling": {"top_p": 0.9, "temperature": 0.7}}, "sampling.top_p with a temperature of 0.7"),
    "min": ({"sampling": {"min_new_tokens": 2, "temperature": 0.7}}, "sampling.min_new_tokens with a temperature"),
    "bits": ({"roles": "lora", "memory": {"lora": {"rank": 2, "base_bits": 8}}}, "base_bits is 8"),
    "sampled": ({"loss": {"policy": {"old_logprobs": "sampled"}}}, "nobody sees whether vLLM samples"),
    "no program": ({"generator": {"python": "no/such/python", "gpus": 0}}, "there is no program 'no/such/python'"),
    "no vLLM": ({"generator": {"python": sys.executable, "gpus": 0}}, "has no vLLM"),
    "no GPU": ({"generator": {"gpus": 99}}, "generator.gpus is 99, beside 1 that learn, and torch finds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_cannot_do_is_refused(case: str, generator: dict[str, Any]) -> None:
    settings, words = REFUSED[case]
    assert words in " ".join(refusals(settings, case, generator))


def refusals(settings: dict[str, Any], case: str, generator: dict[str, Any]) -> list[str]:
    given = settings.get("generator", {})
    own = given if {"python", "servers"} & given.keys() or case == "neither" else {**generator, **given}
    stage = {"kind": "ppo", "reward": "judge", "prompts": "p.jsonl", **settings, "generator": {"kind": "vllm", **own}}
    try:
        findings = list(STAGE.check(PPOSettings.model_validate(stage)))
    except ValidationError as error:
        return [str(problem["msg"]) for problem in error.errors()]
    return [finding.message for finding in findings if finding.level == "fatal"]


def test_a_sound_recipe_is_not_refused(generator: dict[str, Any]) -> None:
    assert refusals({"sampling": {"temperature": 0.7}}, "", generator) == []
    assert refusals({"sampling": {"top_p": 0.9, "top_k": 5, "min_new_tokens": 3}}, "", generator) == []
    assert refusals({**ADAPTER, "memory": {"lora": {"rank": 512}}}, "", generator) == []
    assert refusals({"generator": {"gpus": "shared", "memory_share": 0.4}}, "", generator) == []


def test_check_and_run_refuse_before_anything_is_started(
    ppo_recipe: Recipe, kedge: Kedge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = {"kind": "vllm", "python": str(interpreter(tmp_path, version="0.11.0")), "gpus": 0}
    recipe = ppo_recipe(tmp_path, generator=generator)
    for command in (("check", recipe), ("run", recipe, "--runs", tmp_path / "runs")):
        assert kedge(*command) == 2
        assert "has vLLM 0.11.0, whose weight API is another" in " ".join("".join(capsys.readouterr()).split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has attention heads of 8, and vLLM on a CPU needs 32"),
        ({"head_dim": 32, "final_logit_softcapping": 30.0}, "changes its logits after the head"),
    ],
)
def test_a_model_that_vllm_or_the_trainer_cannot_compute_is_refused(
    config: dict[str, Any],
    words: str,
    ppo_recipe: Recipe,
    ppo_home: Path,
    kedge: Kedge,
    generator: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(ppo_home / "tiny", tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    recipe = ppo_recipe(tmp_path, generator=generator, **{"from": str(tmp_path / "model")})
    assert kedge("check", recipe) == 2
    assert words in " ".join("".join(capsys.readouterr()).split())


def test_a_newer_vllm_is_a_warning(tmp_path: Path) -> None:
    python = str(interpreter(tmp_path, version="0.40.1"))
    stage = {"kind": "ppo", "reward": "j", "prompts": "p", "generator": {"kind": "vllm", "python": python, "gpus": 0}}
    found = [finding for finding in STAGE.check(PPOSettings.model_validate(stage)) if finding.code == "vllm.version"]
    assert [(finding.level, "newer than 0.32" in finding.message) for finding in found] == [("warning", True)]
