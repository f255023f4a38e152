"""Servers on the GPUs that learn, against a stand-in that sleeps: the order of calls, faults at every call, memory."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import vllm_faults
from fake_vllm import interpreter
from test_vllm import ThreadWorld
from vllm_faults import Case, open_shared
from vllm_parts import NEW, Events, base, kill_server, learn, mismatch, open_vllm, prompts

from kedge.core.errors import ConfigError, GeneratorError
from kedge.core.records import Rollouts
from kedge.models.loading.load import load_causal
from kedge.rollout.generators import close_generator
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.vllm import generator as vllm
from kedge.rollout.vllm.generator import devices_of
from kedge.rollout.vllm.http import Api
from kedge.rollout.vllm.settings import VllmSettings
from kedge.rollout.vllm.shared import GPUMemory, share_of

GIB = 2**30
SLEEP = ["/sleep level=2", "/is_sleeping"]
WAKE = [
    "/wake_up weights", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/wake_up kv_cache",
    "/is_sleeping", "/weight_info", "score",
]  # fmt: skip


def test_a_server_wakes_up_gets_weights_answers_and_sleeps(tmp_path: Path) -> None:
    generator, server, model, _ = open_shared(tmp_path)
    calls = server.engine.calls
    assert calls == ["/version", *SLEEP]  # it comes up awake
    calls.clear()
    for version in (1, 2):
        generator.load_weights(learn(model), version)
        generator._queue.submit(lambda: None).result()
        assert calls == []  # new weights wait for the batch
        rollouts = generator.generate(prompts(2), seed=version)
        assert calls == [*WAKE, *["answer"] * 4, *SLEEP]
        assert rollouts.version == version
        assert mismatch(model, rollouts) < 1e-5
        calls.clear()
    greedy = generator.with_sampling(SamplingSettings(temperature=0.7, top_k=1, max_new_tokens=NEW))
    assert mismatch(model, greedy.generate(prompts(1), seed=3)) < 1e-5  # the same weights once more
    assert calls == [*WAKE, *["answer"] * 2, *SLEEP]
    generator.close()
    assert not (tmp_path / "vllm/weights").exists()


def test_an_adapter_goes_to_a_server_whose_base_waits_in_the_memory_of_the_host(tmp_path: Path) -> None:
    generator, server, model, _ = open_shared(tmp_path, sync="adapter")
    server.engine.calls.clear()
    generator.load_weights(learn(model), 1)
    assert mismatch(model, generator.generate(prompts(2), seed=1)) < 1e-5
    load = ["/v1/load_lora_adapter", "/v1/models"]
    first = ["/wake_up weights", *load, "/wake_up kv_cache", "/is_sleeping", "score"]
    others = [*load, "score", "/v1/unload_lora_adapter"] * 2  # of the other kind of layer, and the policy's own
    assert server.engine.calls == [*first, *others, *["answer"] * 4, "/sleep level=1", "/is_sleeping"]
    generator.close()


QUICK = [case for case in vllm_faults.CASES if case.fault != "hang" or case.call == "/sleep"]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in vllm_faults.CASES if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SLOW], ids=str)
def test_a_fault_at_any_call_leads_to_the_same_answers_or_to_the_servers_words(case: Case) -> None:
    assert vllm_faults.attempt(case) is None


def test_a_server_that_stays_awake_ends_the_run(tmp_path: Path) -> None:
    generator, server, model, _ = open_shared(tmp_path)
    server.engine.stays_awake = True
    generator.load_weights(learn(model), 1)
    with pytest.raises(GeneratorError, match=r"does not sleep.*told to sleep, and is awake still.*\n.*last line of"):
        generator.generate(prompts(1), seed=1)
    generator.close()


def test_a_server_that_loses_its_weights_asleep_is_not_asked_without_them(tmp_path: Path) -> None:
    generator, _, _, _ = open_shared(tmp_path)
    with pytest.raises(GeneratorError, match="no weights were handed over for it to wake up with"):
        generator.generate(prompts(1), seed=1)
    generator.close()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process learn on a GPU."""
    monkeypatch.setattr(vllm, "gpu_memory", lambda device: GPUMemory(free=60 * GIB, total=80 * GIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.mark.usefixtures("gpus")
def test_a_server_killed_in_its_sleep_is_started_again_with_its_share_of_the_gpu(tmp_path: Path) -> None:
    events, model = Events(), load_causal(str(base(tmp_path)), dtype="float32")
    settings = {"python": str(interpreter(tmp_path)), "gpus": "shared"}
    generator = open_vllm(tmp_path, settings, model=model, report=events)
    generator.load_weights(learn(model), 1)
    first = generator.generate(prompts(), seed=5)
    kill_server(generator)
    assert torch.equal(generator.generate(prompts(), seed=5).tokens_BT, first.tokens_BT)
    generator.close()
    assert events.codes.count("vllm.restarted") == 1
    assert "awake it may take 0.37 of a GPU of 80.0 GiB is 29.6 GiB" in dict(events)["vllm.memory"]
    log = (tmp_path / "vllm/server-0.log").read_text()
    assert '"--enable-sleep-mode": "", "--gpu-memory-utilization": "0.37"' in log
    assert log.count("asleep level=2") == 3  # after the first start and each batch; a server started again is awake


@pytest.mark.usefixtures("gpus")
def test_all_processes_release_their_memory_before_a_server_wakes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, table, order, wake = Barrier(2), dict[int, Any](), list[str](), Api._wake
    models = [load_causal(str(base(tmp_path)), dtype="float32") for _ in range(2)]
    thread = threading.local()
    monkeypatch.setattr(vllm, "release_memory", lambda: (time.sleep(0.5 * thread.rank), order.append("released")))
    monkeypatch.setattr(Api, "_wake", lambda api, tag: (order.append(tag), wake(api, tag)))
    settings = {"python": str(interpreter(tmp_path)), "gpus": "shared", "tensor_parallel": 2}

    def process(rank: int) -> Rollouts:
        thread.rank = rank  # the second is late
        generator = open_vllm(tmp_path, settings, world=ThreadWorld(rank, meeting, table), model=models[rank])
        generator.load_weights({}, 2)
        rollouts = generator.submit(prompts(), 5).result()
        close_generator(generator)
        return rollouts

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(process, [0, 1])
    assert order == ["released", "released", "released", "weights", "kv_cache"]  # all, and the first once more
    assert torch.equal(first.tokens_BT, second.tokens_BT)
    assert (tmp_path / "vllm/server-0.log").exists()
    assert not (tmp_path / "vllm/server-1.log").exists()  # one server over both GPUs


def test_sharing_the_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is shared, and this run learns on the CPU: vLLM sleeps on NVIDIA GPUs"):
        open_vllm(tmp_path, {"python": str(interpreter(tmp_path)), "gpus": "shared"})
    assert not (tmp_path / "vllm").exists()


def share(free: int, weights: int, **settings: Any) -> float:
    chosen = VllmSettings.model_validate({"python": "p", "gpus": "shared", **settings})
    gpus = [GPUMemory(free=75 * GIB, total=80 * GIB), GPUMemory(free=free * GIB, total=80 * GIB)]
    return share_of(chosen, gpus, weights=weights * GIB).share


def test_the_share_of_memory_is_half_of_what_is_free_on_the_fullest_gpu() -> None:
    assert share(60, 14) == 0.37
    assert share(60, 14, memory_share=0.7) == 0.7
    with pytest.raises(ConfigError, match=r"of 80\.0 GiB is 64\.0 GiB, and 60\.0 GiB are free.*at most 0\.75"):
        share(60, 14, memory_share=0.8)
    with pytest.raises(ConfigError, match=r"is 29\.6 GiB, and the weights of the policy alone take 30\.0 GiB there"):
        share(60, 30)
    assert share(60, 30, tensor_parallel=2) == 0.37


def test_shared_servers_are_on_the_gpus_that_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    settings = VllmSettings(python="p", gpus="shared", tensor_parallel=2)
    assert devices_of(settings, 4) == [("4", "5"), ("6", "7")]
    assert devices_of(settings, 2) == [("4", "5")]
    with pytest.raises(ConfigError, match=r"3 GPU\(s\) that learn cannot be cut into servers of 2"):
        devices_of(settings, 3)
    with pytest.raises(ConfigError, match=r"8 processes learn on this machine.* sees 4 GPU"):
        devices_of(settings, 8)
