"""`sync: adapter` against a stand-in for vLLM: the adapter alone, by names of its own, and the trial that proves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_parts import Events, base, learn, mismatch, open_vllm, prompts, serving

from kedge.core.errors import ConfigError, SyncError
from kedge.models.forward.lora import activate, required_adapters, with_lora
from kedge.models.loading.adapters import read_adapter, save_adapter
from kedge.models.loading.load import load_causal
from kedge.models.loading.start import with_start
from kedge.models.settings import LoraSettings
from kedge.rollout.vllm import adapter as of_adapter
from kedge.rollout.vllm.adapter import base_of, lora_options, policy_adapter, write_trials
from kedge.rollout.vllm.weights import score

PROBE = (40, 41, 42, 43, 44)


def adapted(folder: Path, rank: int = 2, targets: Any = ("down_proj", "k_proj")) -> Any:
    """A policy with an adapter, and beside it the critic's."""
    model = load_causal(str(base(folder)), dtype="float32")
    for name in ("policy", "critic"):
        with_lora(model, LoraSettings(rank=rank, targets=targets), name=name, seed=1)
    activate(model, "policy")
    return model


def test_an_adapter_arrives_after_every_update_and_the_one_before_it_is_unloaded(tmp_path: Path) -> None:
    model = adapted(tmp_path, targets="all")
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url], "sync": "adapter"}, model=model)
        for version in range(3):
            generator.load_weights(learn(model) if version else {}, version)
            rollouts = generator.generate(prompts(), seed=version)
            name = f"kedge-{version}-{version + 1}"
            assert list(engine.adapters) == [name]
            assert {body["model"] for body in engine.bodies[-8:]} == {name}
            assert rollouts.version == version
            assert mismatch(model, rollouts) < 1e-5
            (folder,) = (tmp_path / "vllm/weights").glob("[0-9]*")
            assert read_adapter(folder).rank == 2  # as peft writes it
            assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        generator.close()
    assert "/collective_rpc" not in engine.calls
    assert "/pause" not in engine.calls
    assert not (tmp_path / "vllm/weights").exists()


@pytest.mark.parametrize("kind", ["k_proj", "down_proj"])
def test_a_layer_that_a_server_leaves_out_is_seen_before_anything_is_sampled(kind: str, tmp_path: Path) -> None:
    """The policy's own adapter is new and changes nothing: it could not tell."""
    model = adapted(tmp_path)
    with serving(tmp_path) as engine:
        engine.ignores = kind
        generator = open_vllm(tmp_path, {"servers": [engine.url], "sync": "adapter"}, model=model)
        generator.load_weights({}, 0)
        with pytest.raises(SyncError, match=rf"a trial adapter, of random numbers on every {kind}, did not arrive at"):
            generator.generate(prompts(), seed=1)
        assert not engine.bodies
        generator.close()


@pytest.mark.parametrize(
    ("path", "status", "reply", "words"),
    [
        (
            "/v1/load_lora_adapter",
            500,
            {"error": {"message": "expected target modules in {'qkv_proj'} but received ['c_attn']"}},
            "could not be handed over.*HTTP 500: expected target modules in",
        ),
        ("/v1/load_lora_adapter", 404, {"detail": "Not Found"}, "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (
            "/v1/models",
            200,
            {"data": [{"id": "kedge", "root": "x"}]},
            "'kedge-trial-down_proj' of .* is not among",
        ),
    ],
)
def test_an_adapter_that_is_not_taken_is_told_in_the_servers_words(
    path: str, status: int, reply: Any, words: str, tmp_path: Path
) -> None:
    with serving(tmp_path) as engine:
        engine.refuses[path] = (status, reply)
        generator = open_vllm(tmp_path, {"servers": [engine.url], "sync": "adapter"}, model=adapted(tmp_path))
        generator.load_weights({}, 1)
        with pytest.raises(SyncError, match=words):
            generator.generate(prompts(1), seed=1)
        generator.close()


def test_an_adapter_that_cannot_be_unloaded_is_told(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path) as engine:
        engine.refuses["/v1/unload_lora_adapter"] = (404, {"error": {"message": "cannot be found."}})
        settings = {"servers": [engine.url], "sync": "adapter"}
        generator = open_vllm(tmp_path, settings, model=adapted(tmp_path), report=events)
        generator.load_weights({}, 1)
        generator.generate(prompts(1), seed=1)
        generator.close()
    assert "'kedge-trial-down_proj' was not unloaded: " in dict(reversed(events))["vllm.unload"]


def test_trials_can_be_seen_and_leave_the_policy_and_its_seeds_as_they_were(tmp_path: Path) -> None:
    model = adapted(tmp_path, targets="all")
    learn(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    state, own = torch.random.get_rng_state(), score(model, PROBE)
    trials = write_trials(tmp_path / "trials", model, PROBE, mismatch=1e-4)
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert [trial.kind for trial in trials] == kinds
    assert all(trial.can_be_seen(1e-4) for trial in trials)
    assert score(model, PROBE) == own
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    written = read_adapter(tmp_path / "trials/k_proj").weights
    assert {name.split(".")[-3] for name, weight in written.items() if "lora_B" in name and weight.any()} == {"k_proj"}


def test_trials_that_prove_nothing_are_told(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path) as engine:
        settings = {"servers": [engine.url], "sync": "adapter", "mismatch": 10.0}
        generator = open_vllm(tmp_path, settings, model=adapted(tmp_path), report=events)
        generator.load_weights({}, 0)
        generator.generate(prompts(1), seed=1)
        generator.close()
    assert "whether vLLM computes adapters of down_proj (" in dict(events)["vllm.trials"]
    assert list(engine.adapters) == ["kedge-0-1"]


def test_what_vllm_does_not_take_is_refused(tmp_path: Path) -> None:
    plain = load_causal(str(base(tmp_path)), dtype="float32")
    with pytest.raises(ConfigError, match="this policy has none: all of its weights learn"):
        open_vllm(tmp_path, {"servers": ["http://127.0.0.1:9"], "sync": "adapter"}, model=plain)
    model = adapted(tmp_path)
    layer = required_adapters(model).layers["model.layers.1.self_attn.k_proj"]
    layer.is_transposed = True
    with pytest.raises(ConfigError, match=r"plain linear layers alone, which model\.layers\.1\.self_attn\.k_proj is"):
        policy_adapter(model)
    with pytest.raises(ConfigError, match="a rank of 513 with what it starts from, and vLLM takes up to 512"):
        policy_adapter(adapted(tmp_path, rank=513))


def test_a_policy_that_starts_from_an_adapter_is_sent_with_it_to_the_base_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = load_causal(str(base(tmp_path)), dtype="float32")
    with_lora(start, LoraSettings(rank=3, targets=("q_proj", "up_proj")), name="policy", seed=2)
    learn(start)
    save_adapter(start, tmp_path / "adapter", name="policy")
    model = with_start(load_causal(str(base(tmp_path)), dtype="float32"), tmp_path / "adapter")
    with_lora(model, LoraSettings(rank=6, rslora=True, targets=("q_proj", "o_proj")), name="policy", seed=3)
    monkeypatch.setattr(of_adapter, "unmerged_base", lambda folder: base(tmp_path))
    assert base_of(model, str(base(tmp_path))) == str(base(tmp_path))
    assert lora_options(model) == {"enable-lora": True, "max-lora-rank": 16, "max-loras": 1}
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url], "sync": "adapter"}, model=model)
        for version in (1, 2):
            generator.load_weights(learn(model), version)
            assert mismatch(model, generator.generate(prompts(), seed=1)) < 1e-5
        generator.close()
