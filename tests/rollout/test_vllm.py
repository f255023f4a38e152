"""The generator `vllm` against a stand-in for its server: protocol, seeds, order, weights that are lost, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from fake_vllm import interpreter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_parts import (
    NEW,
    Events,
    base,
    group_of_port,
    headless_weights_of,
    kill_server,
    mismatch,
    open_vllm,
    prompts,
    serving,
    train,
)

from kedge.core.errors import ConfigError, GeneratorError, SyncError
from kedge.core.records import Prompts, Rollouts
from kedge.core.world import Alone
from kedge.models.forward.lora import with_lora
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.models.settings import LoraSettings
from kedge.rollout.generators import close_generator
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.vllm.generator import devices_of
from kedge.rollout.vllm.processes import FirstProcess
from kedge.rollout.vllm.settings import VllmSettings
from kedge.rollout.vllm.weights import weights_of, write_weights


def test_requests_say_everything_that_changes_what_is_sampled(tmp_path: Path) -> None:
    sampling = SamplingSettings(temperature=1.0, top_k=5, top_p=0.9, min_new_tokens=2, max_new_tokens=4, stop=("x",))
    with serving(tmp_path, mode="raw_logprobs") as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]}, sampling=sampling)
        generator.generate(prompts(2), seed=3)
        generator.generate(prompts(2), seed=4)
        generator.close()
    body = next(body for body in engine.bodies if body["prompt"] == [41, 41])
    expected = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_tokens": 2, "max_tokens": 4, "stop": ["x"]}
    expected |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    expected |= {"return_token_ids": True, "logprobs": 0, "ignore_eos": True, "model": "kedge"}
    assert {name: body[name] for name in expected} == expected
    assert len({body["seed"] for body in engine.bodies}) == 8  # one a row and batch
    assert all(0 <= body["seed"] < 2**63 for body in engine.bodies)


_SMALL: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("settings", [{"model_type": "gpt_neox"}, {"model_type": "mixtral", "num_local_experts": 2}])
def test_weights_are_sent_under_the_names_of_the_files_that_the_server_has_read(
    settings: dict[str, Any], is_adapted: bool, tmp_path: Path
) -> None:
    """transformers calls GPT-NeoX's `embed_out` otherwise, and puts experts together."""
    config = AutoConfig.for_model(**_SMALL, **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_causal(tmp_path, dtype="float32")
    if is_adapted:
        model = with_lora(model, LoraSettings(rank=2), name="policy", seed=1)
    write_weights(tmp_path / "sent", weights_of(model, {}))
    sent, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "sent", tmp_path))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in expected.items())


def test_weights_arrive_after_every_update_with_tied_heads_and_merged_adapters(tmp_path: Path) -> None:
    plain = load_causal(str(base(tmp_path)), dtype="float32")
    adapted = with_lora(load_causal(str(base(tmp_path)), dtype="float32"), LoraSettings(rank=2), name="policy", seed=1)
    for model in (plain, adapted):
        with serving(tmp_path) as engine:
            generator = open_vllm(tmp_path, {"servers": [engine.url]}, model=model)
            for version in range(3):
                weights = train(model) if version else dict(model.named_parameters())
                trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
                generator.load_weights(trained, version)
                rollouts = generator.generate(prompts(), seed=version)
                assert rollouts.version == version
                assert engine.weight_version == str(version)
                assert mismatch(model, rollouts) < 1e-5
            generator.close()
        asked = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert [call for call in engine.calls if call in asked] == asked * 3
        assert not (tmp_path / "vllm/weights").exists()


def test_a_head_that_was_not_sent_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.rollout.vllm.generator.weights_of", headless_weights_of)
    model = load_causal(str(base(tmp_path)), dtype="float32")
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]}, model=model)
        generator.load_weights(train(model), 1)
        with pytest.raises(SyncError, match=r"did not arrive at http.*mismatch allows 0\.0001.*not loaded"):
            generator.generate(prompts(), seed=1)
        assert not engine.bodies  # nothing was sampled with them
        generator.close()


def test_a_weight_update_that_fails_is_told_in_the_servers_words(tmp_path: Path) -> None:
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]})
        engine.refuses["/collective_rpc"] = (500, {"error": {"message": "Worker failed: no space", "code": 500}})
        generator.load_weights({}, 4)
        with pytest.raises(SyncError, match=r"version 4 could not be handed over.*HTTP 500: Worker failed: no space"):
            generator.generate(prompts(), seed=1)
        engine.refuses.clear()
        with pytest.raises(SyncError):  # a server that failed there has no weights: it is not asked again
            generator.generate(prompts(), seed=1)
        generator.close()


@pytest.mark.parametrize(
    ("path", "status", "reply", "words"),
    [
        (
            "/v1/completions",
            400,
            {"error": {"message": "max_tokens=800 cannot be greater"}},
            "HTTP 400: max_tokens=800",
        ),
        ("/v1/completions", 404, {"error": {"message": "The model `kedge` does not exist."}}, "does not exist"),
        ("/v1/completions", 200, {"choices": [{"finish_reason": "stop"}]}, "without 'token_ids'"),
        (
            "/v1/completions",
            200,
            {"choices": [{"finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": [None]}}]},
            "not a log-prob for each",
        ),
        ("/v1/completions", 302, {}, "HTTP 302"),
        ("/weight_info", 200, {"weight_version": "7"}, "it has weights of version '7', sent was 1"),
        ("/pause", 404, {"detail": "Not Found"}, "VLLM_SERVER_DEV_MODE=1"),
        ("/reset_prefix_cache", 200, {"success": False}, "keys and values of the old weights"),
    ],
)
def test_a_reply_that_cannot_be_used_ends_the_batch(
    path: str, status: int, reply: Any, words: str, tmp_path: Path
) -> None:
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]})
        if path != "/v1/completions":
            engine.refuses[path] = (status, reply)
        generator.load_weights({}, 1)
        generator.submit(prompts(1), seed=1).exception()
        engine.refuses[path] = (status, reply)
        with pytest.raises(GeneratorError) as caught:
            generator.generate(prompts(1), seed=1)
        assert words in str(caught.value)
        generator.close()


def test_an_old_server_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as engine:
        engine.refuses["/version"] = (200, {"version": "0.11.2"})
        with pytest.raises(GeneratorError, match=r"is vLLM 0\.11\.2.*0\.32 or newer"):
            open_vllm(tmp_path, {"servers": [engine.url]})


def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match=r"no vLLM server answers at http://127\.0\.0\.1:9.*refused"):
        open_vllm(tmp_path, {"servers": ["http://127.0.0.1:9"]})


def test_rows_of_a_given_server_that_dies_are_answered_by_the_others(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path) as engine:
        alone = open_vllm(tmp_path, {"servers": [engine.url]})
        expected = alone.generate(prompts(), seed=5)
        alone.close()
        with serving(tmp_path) as other:
            both = open_vllm(tmp_path, {"servers": [engine.url, other.url]}, report=events)
            assert torch.equal(both.generate(prompts(), seed=5).tokens_BT, expected.tokens_BT)
            assert other.answered == 4  # of 8
        assert torch.equal(both.generate(prompts(), seed=5).tokens_BT, expected.tokens_BT)
        assert events.codes == ["vllm.servers", "vllm.lost"]
    with pytest.raises(GeneratorError, match=r"no vLLM server is left.*--resume"):
        both.generate(prompts(), seed=5)
    both.close()


def test_a_server_that_fails_once_and_lives_is_asked_again(tmp_path: Path) -> None:
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]})
        expected = generator.generate(prompts(), seed=5)
        engine.fails_at = engine.answered + 3
        assert torch.equal(generator.generate(prompts(), seed=5).tokens_BT, expected.tokens_BT)
        assert engine.answered == 17
        engine.refuses["/v1/completions"] = (503, {"error": {"message": "EngineCore encountered an issue"}})
        with pytest.raises(GeneratorError, match="HTTP 503: EngineCore encountered an issue"):
            generator.generate(prompts(), seed=5)
        generator.close()


def test_a_server_that_dies_in_mid_batch_is_started_again_and_its_rows_are_the_same(tmp_path: Path) -> None:
    events = Events()
    model = load_causal(str(base(tmp_path)), dtype="float32")
    weights, rollouts = train(model), list[Rollouts]()
    for dies_at in (0, 3):
        settings = {"python": str(interpreter(tmp_path, dies_at=dies_at)), "gpus": 0, "extra": {"max_num_seqs": 7}}
        generator = open_vllm(tmp_path, settings, model=model, report=events)
        generator.load_weights(weights, 1)
        rollouts.append(generator.generate(prompts(), seed=5))
        generator.close()
    assert events.codes.count("vllm.restarted") == 1
    assert torch.equal(rollouts[0].tokens_BT, rollouts[1].tokens_BT)
    assert max(mismatch(model, batch) for batch in rollouts) < 1e-5  # it got the weights of the run, not those of disk
    log = (tmp_path / "vllm/server-0.log").read_text()
    assert '"--logprobs-mode": "processed_logprobs"' in log
    assert '"--max-num-seqs": "7"' in log
    assert '"--dtype": "float32"' in log
    assert "exit code 9" in log


def test_a_server_that_dies_again_and_again_ends_the_batch(tmp_path: Path) -> None:
    file = interpreter(tmp_path)
    settings = {"python": str(file), "gpus": 0, "restarts": 1}
    generator = open_vllm(tmp_path, settings, report=(events := Events()))
    kill_server(generator)
    file.write_text("#!/bin/sh\necho this machine is full\nexit 3\n")
    with pytest.raises(GeneratorError, match=r"ended while it started.*server-0\.log(.|\n)*this machine is full"):
        generator.generate(prompts(), seed=1)
    generator.close()
    assert events.codes == ["vllm.start", "vllm.servers", "vllm.restarted"]


def test_a_server_that_does_not_start_in_time_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\necho loading\nexec sleep 60\n")
    file.chmod(0o755)
    with pytest.raises(GeneratorError, match=r"not ready within 0\.3 s \(generator\.start_s\)(.|\n)*loading"):
        open_vllm(tmp_path, {"python": str(file), "gpus": 0, "start_s": 0.3})


ORPHAN = """
import sys, time
from pathlib import Path
from kedge.rollout.vllm.server import ServerSpec, StartedServer
spec = ServerSpec(python=sys.argv[1], model=sys.argv[2], dtype="float32", max_tokens=None, logprobs_mode="raw_logprobs",
    tensor_parallel=1, devices=(), extra={}, log=Path(sys.argv[3]), start_s=30, timeout_s=5)
server = StartedServer(spec)
server.wait()
print(server.url, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_kedge(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(interpreter(tmp_path)), str(base(tmp_path)), str(tmp_path / "log")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as kedge:
        assert kedge.stdout is not None
        url = kedge.stdout.readline().strip()
        assert group_of_port(url)
        kedge.send_signal(number)
    deadline = time.monotonic() + 20
    while group_of_port(url) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_of_port(url)


def test_batches_are_served_in_order_and_close_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]})
        generator.generate(prompts(1), seed=1)
        engine.lock.acquire()  # it hangs
        under_way = generator.submit(prompts(1), seed=1)
        started = time.monotonic()
        while not generator._queue.engines._asking and time.monotonic() < started + 5:
            time.sleep(0.01)
        generator.close()
        engine.lock.release()
        assert isinstance(under_way.exception(), GeneratorError)
        assert time.monotonic() < started + 10


class ThreadWorld(Alone):
    """Two processes as two threads: what the first has, both get."""

    def __init__(self, rank: int, meeting: Barrier, table: dict[int, Any]) -> None:
        self.rank, self.size, self._meeting, self._table = rank, 2, meeting, table

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._meeting.wait(10)
        values = [self._table[rank] for rank in range(self.size)]
        self._meeting.wait(10)
        return values

    def same(self, value: Any) -> Any:
        return self.gather(value)[0]


def test_of_two_processes_the_first_asks_and_both_get_the_answers_and_the_errors(tmp_path: Path) -> None:
    meeting, table = Barrier(2), dict[int, Any]()
    models = [load_causal(str(base(tmp_path)), dtype="float32") for _ in range(2)]

    def process(rank: int) -> tuple[Rollouts, str]:
        world = ThreadWorld(rank, meeting, table)
        with pytest.raises(GeneratorError, match="no vLLM server answers"):
            open_vllm(tmp_path, {"servers": ["http://127.0.0.1:9"]}, world=world, model=models[rank])
        generator = open_vllm(tmp_path, {"servers": [engine.url]}, world=world, model=models[rank])
        generator.load_weights({}, 2)
        rollouts = generator.submit(prompts(), 5).result()
        engine.refuses["/v1/completions"] = (400, {"error": {"message": "no more"}})
        with pytest.raises(GeneratorError) as caught:
            generator.submit(prompts(), 6).result()
        close_generator(generator)
        return rollouts, str(caught.value)

    with serving(tmp_path) as engine, ThreadPoolExecutor(2) as threads:
        (first, words), (second, other_words) = threads.map(process, [0, 1])
    assert engine.answered == 8  # each row once
    assert first.version == second.version == 2
    assert torch.equal(first.tokens_BT, second.tokens_BT)
    assert "no more" in words
    assert words == other_words


class SlowGenerator:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers: list[Future[Rollouts]] = []

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        self.answers.append(Future())
        return self.answers[-1]

    def load_weights(self, weights: Any, version: int) -> None: ...


def test_others_keep_meeting_the_first_process_while_it_waits_and_batches_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch may take longer than processes wait for each other (placement.timeout)."""
    monkeypatch.setattr("kedge.rollout.vllm.processes._PATIENCE_S", 0.02)
    meeting, table, slow, meetings = Barrier(2), dict[int, Any](), SlowGenerator(), list[int]()
    batch = Rollouts(**{**record_of(), "version": 4})

    class CountingWorld(ThreadWorld):
        def same(self, value: Any) -> Any:
            meetings.append(self.rank)
            if meetings.count(0) == 5 and self.rank == 0:
                slow.answers[0].set_result(batch)
            return super().same(value)

    def process(rank: int) -> tuple[Any, Any, bool]:
        world = CountingWorld(rank, meeting, table)
        generator = FirstProcess(world, slow if rank == 0 else None, device=torch.device("cpu"), max_mismatch=1.0)
        first, second = generator.submit(prompts(), 1), generator.submit(prompts(), 2)
        second.cancel()
        return first.exception(), first.result().version, second.cancelled()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(process, [0, 1])) == [(None, 4, True)] * 2
    assert meetings.count(0) == meetings.count(1) > 4
    assert slow.answers[1].cancelled()


def record_of() -> dict[str, Any]:
    """The fields of a batch: one row with an answer of one token."""
    zero_BT, yes_BT = torch.zeros(1, 2), torch.tensor([[True, True]])
    return {
        "tokens_BT": zero_BT.long(),
        "attention_mask_BT": yes_BT,
        "response_mask_BT": torch.tensor([[False, True]]),
        "behaviour_logp_BT": zero_BT,
        "group_B": torch.tensor([0]),
        "finished_B": torch.tensor([True]),
    }


def test_weights_of_a_version_that_comes_again_are_files_of_their_own(tmp_path: Path) -> None:
    """After a rollback version 1 is sent again while an earlier 1 and 2 are in the queue still."""
    model = load_causal(str(base(tmp_path)), dtype="float32")
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]}, model=model)
        with engine.lock:  # nothing is served yet
            generator.load_weights(train(model), 1)
            generator.load_weights(train(model), 2)
            generator.load_weights(train(model), 1)
            rollouts = generator.submit(prompts(), 5)
        assert mismatch(model, rollouts.result()) < 1e-5
        assert rollouts.result().version == 1
        assert len(list((tmp_path / "vllm/weights").iterdir())) == 1
        generator.close()


def test_another_way_of_sampling_shares_servers_and_weights(tmp_path: Path) -> None:
    with serving(tmp_path) as engine:
        generator = open_vllm(tmp_path, {"servers": [engine.url]})
        generator.load_weights({}, 3)
        greedy = generator.with_sampling(SamplingSettings(temperature=0.7, top_k=1, max_new_tokens=NEW))
        first, second = greedy.generate(prompts(), seed=1), greedy.generate(prompts(), seed=2)
        assert torch.equal(first.tokens_BT, second.tokens_BT)
        assert first.version == 3
        generator.close()


def test_servers_get_the_last_gpus_and_never_one_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(python="python", gpus=4, tensor_parallel=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,5,7")
    assert devices_of(settings, 2) == [("2", "3"), ("5", "7")]
    with pytest.raises(ConfigError, match="is 4, beside 3 that learn, and torch finds 6"):
        devices_of(settings, 3)
    assert devices_of(VllmSettings(python="python", gpus=0), 6) == [()]
