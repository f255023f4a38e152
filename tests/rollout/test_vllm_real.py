"""The generator `vllm` with vLLM itself, on the CPU: `make vllm` makes its environment, `make test-vllm` runs these."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from vllm_parts import Events, gaps, headless_weights_of, kill_server, learn, mismatch, open_vllm, parts_of, train

from kedge.core.errors import SyncError
from kedge.core.records import repeated
from kedge.models.forward.lora import with_lora
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.models.settings import LoraSettings
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.vllm.adapter import lora_options
from kedge.rollout.vllm.engines import Engines
from kedge.rollout.vllm.generator import Queue, VllmGenerator, server_spec, trials_of
from kedge.rollout.vllm.http import Api
from kedge.rollout.vllm.server import StartedServer
from kedge.rollout.vllm.settings import VllmSettings

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here: make vllm"),
]
VLLM: dict[str, Any] = {"python": str(PYTHON), "gpus": 0, "mismatch": 1e-4, "extra": {"enforce-eager": True}}
PROMPTS = repeated([[40 + row, 41, 42, 43][: row % 4 + 1] for row in range(8)], ids=range(8), answers=2)


def model_folder(folder: Path, *, is_tied: bool = True) -> Path:
    """A model whose heads are as wide as vLLM needs them on a CPU (32)."""
    place = make_tiny(folder / "model", seed=2, hidden=128, layers=2)
    if not is_tied:
        model = load_causal(str(place), dtype="float32")
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
        model.save_pretrained(place)
    return place


REAL_PARTS: dict[str, Any] = {
    "sampling": SamplingSettings(temperature=0.7, max_new_tokens=24),
    "stop_ids": [258],
    "longest": 256,
}


def open_real(folder: Path, model: Any, *, settings: Any = None, **parts: Any) -> Any:
    values = {"model": model, "source": str(folder / "model"), **REAL_PARTS, **parts}
    return open_vllm(folder, {**VLLM, **(settings or {})}, **values)


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_arrive_after_each_of_five_updates(is_tied: bool, tmp_path: Path) -> None:
    model = load_causal(str(model_folder(tmp_path, is_tied=is_tied)), dtype="float32")
    assert model.config.tie_word_embeddings == is_tied
    generator = open_real(tmp_path, model)
    try:
        for version in range(6):
            generator.load_weights(train(model, 0.01) if version else dict(model.named_parameters()), version)
            started = time.monotonic()
            rollouts = generator.generate(PROMPTS, seed=version)
            seconds, gap = time.monotonic() - started, gaps(model, rollouts)
            figures = f"{gap.mean():.2g} nats a token, {gap.max():.2g} at most"
            print(f"tied {is_tied}, version {rollouts.version}: {figures}; handed over and answered in {seconds:.2f} s")
            assert gap.mean() <= 1e-5
        again = generator.generate(PROMPTS, seed=5)
        assert torch.equal(again.tokens_BT, rollouts.tokens_BT)
    finally:
        generator.close()


def test_a_withheld_head_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.rollout.vllm.generator.weights_of", headless_weights_of)
    model = load_causal(str(model_folder(tmp_path)), dtype="float32")
    generator = open_real(tmp_path, model)
    try:
        generator.load_weights(train(model), 1)
        with pytest.raises(SyncError) as caught:
            generator.generate(PROMPTS, seed=1)
        print(caught.value)
        assert "did not arrive" in str(caught.value)
    finally:
        generator.close()


def test_a_server_killed_in_mid_batch_is_started_again_and_its_rows_are_the_same(tmp_path: Path) -> None:
    model = load_causal(str(model_folder(tmp_path)), dtype="float32")
    events, sampling = Events(), SamplingSettings(temperature=0.7, max_new_tokens=900)
    generator = open_real(tmp_path, model, report=events, sampling=sampling, stop_ids=[], longest=1024)
    try:
        generator.load_weights(train(model), 1)
        expected = generator.generate(PROMPTS, seed=1)
        started = time.monotonic()
        generator.generate(PROMPTS, seed=1)
        whole_s = time.monotonic() - started
        Timer(whole_s / 3, kill_server, [generator]).start()
        rollouts = generator.generate(PROMPTS, seed=1)
        print(f"a batch takes {whole_s:.2f} s; killed in mid-batch, started again and asked again:", events[-1])
        assert events.codes.count("vllm.restarted") == 1
        assert torch.equal(rollouts.tokens_BT, expected.tokens_BT)
        assert mismatch(model, rollouts) <= 1e-5
    finally:
        generator.close()


def test_what_is_cut_at_temperature_1_keeps_the_log_probs_of_all_logits(tmp_path: Path) -> None:
    model = load_causal(str(model_folder(tmp_path)), dtype="float32")
    sampling = SamplingSettings(top_k=40, top_p=0.95, min_new_tokens=3, max_new_tokens=24, stop=("e", "ab"))
    generator = open_real(tmp_path, model, sampling=sampling)
    try:
        generator.load_weights(train(model), 1)
        rollouts = generator.generate(PROMPTS, seed=1)
        gap = mismatch(model, rollouts, temperature=1.0)
        print(f"top_k, top_p, min_new_tokens and stop strings at temperature 1: {gap:.2g} nats at most")
        assert gap <= 1e-5
        rows = zip(rollouts.tokens_BT, rollouts.response_mask_BT, strict=True)
        answers = [tokens_T[mask_T].tolist() for tokens_T, mask_T in rows]
        assert {len(answer) >= 3 for answer in answers} == {True}
        for answer, is_finished in zip(answers, rollouts.finished_B.tolist(), strict=True):
            ends = [end for end in range(3, len(answer) + 1) if has_stopped(answer[:end])]
            assert ends == ([len(answer)] if is_finished else [])
        assert rollouts.finished_B.any()
    finally:
        generator.close()


def has_stopped(answer: list[int]) -> bool:
    """One token a byte: the last one ends the answer, or completes a stop string."""
    return answer[-1] == 258 or bytes(token for token in answer if token < 256).endswith((b"e", b"ab"))


def adapted_model(folder: Path, dtype: Any = "float32") -> Any:
    model = load_causal(str(model_folder(folder)), dtype=dtype)
    return with_lora(model, LoraSettings(rank=4), name="policy", seed=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_adapters_arrive_after_each_of_five_updates(sync: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 merging rounds base and adapter together, which the trainer does not do."""
    model = adapted_model(tmp_path, dtype)
    generator = open_real(tmp_path, model, settings={"sync": sync, "mismatch": 1e-4 if dtype == "float32" else 0.05})
    try:
        for version in range(6):
            learnt = learn(model, 0.01) if version else {}
            generator.load_weights(learnt, version)
            started = time.monotonic()
            rollouts = generator.generate(PROMPTS, seed=version)
            seconds, gap = time.monotonic() - started, gaps(model, rollouts)
            figures = f"{gap.mean():.2g} nats a token, {gap.max():.2g} at most"
            print(f"{sync}, {dtype}, version {version}: {figures}; handed over and answered in {seconds:.2f} s")
            assert gap.mean() <= (1e-5 if dtype == "float32" else 0.05)
    finally:
        generator.close()


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_vllm_takes_the_calls_of_a_server_that_sleeps_in_their_order(sync: str, tmp_path: Path) -> None:
    """On a CPU nothing is freed; but vLLM is asleep, takes weights while it wakes up, and answers when it is awake."""
    model = adapted_model(tmp_path)
    parts = parts_of(tmp_path, model, **REAL_PARTS, source=str(tmp_path / "model"))
    settings = VllmSettings.model_validate({**VLLM, "gpus": "shared", "sync": sync})
    options = lora_options(model) if settings.sends_adapters else {}
    server = StartedServer(server_spec(settings, parts, tmp_path / "log", (), options))
    events = Events()
    engines = Engines([server], settings, events, trials=trials_of(settings, parts, events))
    generator = VllmGenerator(Queue(engines), parts, parts.sampling, settings)
    try:
        for version in range(4):
            assert Api(server.url, timeout_s=60).get("/is_sleeping") == {"is_sleeping": True}
            if version == 3:
                kill_server(generator)  # asleep
            generator.load_weights(learn(model, 0.01), version)
            gap = gaps(model, generator.generate(PROMPTS, seed=version))
            print(f"{sync}, asleep in between, version {version}: {gap.mean():.2g} nats, {gap.max():.2g} at most")
            assert gap.mean() <= 1e-5
        assert Api(server.url, timeout_s=60).get("/is_sleeping") == {"is_sleeping": True}
        assert events.codes.count("vllm.restarted") == 1
    finally:
        generator.close()


@pytest.mark.parametrize(
    ("roles", "lag", "sync"),
    [("separate", 0, "merged"), ("lora", 0, "merged"), ("lora", 1, "merged"), ("lora", 0, "adapter")],
)
def test_a_run_of_five_iterations_agrees_with_vllm(roles: str, lag: int, sync: str, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "def plain(answer):\n    return sum(letter < 'n' for letter in answer.text) / 8\n"
    )
    rows = "".join(json.dumps({"prompt": f"Say something about {number}"}) + "\n" for number in range(12))
    (tmp_path / "prompts.jsonl").write_text(rows)
    optimiser = {"lr": 3e-3, "schedule": "constant", "warmup": 0.0}
    stage = {
        "kind": "ppo", "reward": {"kind": "function", "path": "rules.py:plain"}, "roles": roles,
        "prompts": str(tmp_path / "prompts.jsonl"), "memory": {"dtype": "float32"},
        "generator": {"kind": "vllm", **VLLM, "lag": lag, "sync": sync}, "iterations": 5, "batch": 8, "epochs": 2,
        "minibatches": 2, "actor": optimiser, "critic": optimiser,
        "sampling": {"max_new_tokens": 16, "temperature": 0.7},
    }  # fmt: skip
    recipe = {"kedge": 1, "name": "r", "model": str(model_folder(tmp_path)), "device": "cpu", "stages": {"ppo": stage}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    run_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "runs", is_resumed=False, say=print)
    lines = [json.loads(line) for line in (tmp_path / "runs/r/ppo/metrics.jsonl").read_text().splitlines()]
    by_age = [(int(line["age/mean"]), line.get("policy/mismatch")) for line in lines]
    correction = [line["correct/weight"] for line in lines]
    print(f"{roles}, lag {lag}, {sync}: ages and policy/mismatch {by_age}; weights {correction}")
    assert [age for age, _ in by_age] == [0, lag, lag, lag, lag]
    assert all((mismatch is not None and mismatch <= 1e-5) == (age == 0) for age, mismatch in by_age)
    assert abs(lines[-1]["kl/mean"]) > 0.01  # the policy has moved
