"""The generator `vllm`: rows become requests with a seed of their own, answers become rollouts.

One thread serves in order: new weights wait for the batches submitted before them. What is sampled for a row depends on
the seed, its group and its answer index; which rows are computed together changes the last bits of its log-probs.
Shape letters: B rows, T token positions.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.core.errors import ConfigError, GeneratorError
from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts, to_device
from kedge.models.forward import heads
from kedge.models.loading.describe import window_of
from kedge.models.loading.resolve import resolve
from kedge.rollout.generators import GeneratorParts, Report
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.steps import row_keys
from kedge.rollout.vllm.adapter import base_of, lora_options, write_adapter, write_trials
from kedge.rollout.vllm.engines import Engines, GivenServer, Server
from kedge.rollout.vllm.handover import Handover
from kedge.rollout.vllm.http import MODEL, Answer
from kedge.rollout.vllm.processes import first_process
from kedge.rollout.vllm.server import ServerSpec, StartedServer
from kedge.rollout.vllm.settings import VllmSettings, logprobs_mode, too_few_gpus
from kedge.rollout.vllm.shared import GPUMemory, gpu_memory, release_memory, share_of, shared_devices, weight_bytes
from kedge.rollout.vllm.weights import probe_tokens, remove_weights, score, weights_of, write_weights

T = TypeVar("T")


class Queue:
    """The engines with one thread before them. After an error nothing more is served."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.version = 0
        self._handovers = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kedge-vllm")
        self._failure: Exception | None = None

    def next_name(self, version: int) -> str:
        """A name for the next weights. A rollback leads to a version again whose files may wait in the queue still."""
        self._handovers += 1
        return f"{version}-{self._handovers}"

    def submit(self, call: Callable[[], T]) -> Future[T]:
        return self._thread.submit(self._serve, call)

    def _serve(self, call: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except Exception as error:
            self._failure = error
            raise

    def close(self) -> None:
        self._failure = self._failure or GeneratorError("the run has ended")
        self.engines.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


class VllmGenerator:
    def __init__(self, queue: Queue, parts: GeneratorParts, sampling: SamplingSettings, settings: VllmSettings) -> None:
        self._queue, self._parts, self._sampling, self._settings = queue, parts, sampling, settings
        self._probe = probe_of(parts)
        self._sent: Path | None = None
        self.max_mismatch = settings.mismatch
        """Nats a token above which the weights did not arrive."""

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        if self._settings.is_shared:
            release_memory()
        bodies = requests_of(prompts, seed, self._sampling, sorted(self._parts.stop_ids))
        return self._queue.submit(lambda: self._rollouts(prompts, bodies))

    def generate(self, prompts: Prompts, seed: int) -> Rollouts:
        return self.submit(prompts, seed).result()

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand over the weights as they are now; batches that are submitted from here on are sampled with them."""
        name = self._queue.next_name(version)
        folder = weights_folder(self._parts) / name
        if self._settings.sends_adapters:
            write_adapter(folder, self._parts.model, weights)
        else:
            write_weights(folder, weights_of(self._parts.model, weights))
        handover = Handover(
            folder=folder,
            version=version,
            probe=self._probe,
            scores=score(self._parts.model, self._probe),
            limit=self._settings.mismatch,
            adapter=f"{MODEL}-{name}" if self._settings.sends_adapters else None,
        )
        self._queue.submit(lambda: self._load(handover))

    def with_sampling(self, sampling: SamplingSettings) -> VllmGenerator:
        """The same servers and weights, sampling in another way."""
        return VllmGenerator(self._queue, self._parts, sampling, self._settings)

    def close(self) -> None:
        self._queue.close()
        remove_weights(weights_folder(self._parts))

    def _load(self, handover: Handover) -> None:
        self._queue.engines.load_weights(handover)
        self._queue.version = handover.version
        if self._sent is not None:  # until here: a server that dies gets the last ones
            remove_weights(self._sent)
        self._sent = handover.folder

    def _rollouts(self, prompts: Prompts, bodies: Sequence[Mapping[str, Any]]) -> Rollouts:
        answers = self._queue.engines.ask(bodies)
        rollouts = rollouts_of(prompts, answers, pad=self._parts.pad, version=self._queue.version)
        return to_device(rollouts, self._parts.model.device)


def weights_folder(parts: GeneratorParts) -> Path:
    return parts.folder / "vllm" / "weights"


def probe_of(parts: GeneratorParts) -> tuple[int, ...]:
    return probe_tokens(parts.probe, len(heads.lm_head(parts.model)))


def requests_of(
    prompts: Prompts, seed: int, sampling: SamplingSettings, stop_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The body of each row's request, but for the model that is asked. Everything that changes what is sampled is said,
    so that no default is."""
    keys = row_keys(seed, torch.tensor(prompts.group), torch.tensor(prompts.answer)).tolist()
    common: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # what ends an answer is in stop_token_ids
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "logprobs": 0,
    }
    return [
        {**common, "prompt": list(tokens), "seed": key % 2**63}
        for tokens, key in zip(prompts.tokens, keys, strict=True)
    ]


def rollouts_of(prompts: Prompts, answers: Sequence[Answer], *, pad: int, version: int) -> Rollouts:
    """Prompts and answers as one record, padded on the right."""
    rows = list(zip(prompts.tokens, answers, strict=True))
    width = max(len(prompt) + len(answer.tokens) for prompt, answer in rows)
    tokens_BT = torch.full((len(rows), width), pad)
    logp_BT = torch.zeros(len(rows), width)
    response_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    attention_BT = response_BT.clone()
    for row, (prompt, answer) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(answer.tokens)
        tokens_BT[row, :end] = torch.tensor([*prompt, *answer.tokens])
        logp_BT[row, start:end] = torch.tensor(answer.logprobs)
        attention_BT[row, :end] = True
        response_BT[row, start:end] = True
    return Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_BT,
        response_mask_BT=response_BT,
        behaviour_logp_BT=logp_BT,
        group_B=torch.tensor(prompts.group),
        finished_B=torch.tensor([answer.is_finished for answer in answers]),
        version=version,
    )


def make(settings: VllmSettings, parts: GeneratorParts) -> Generator:
    """The generator of a recipe: its servers are started, or asked whether they are there. Of several processes the
    first one speaks to them, and tells the others."""
    world = parts.world
    own = gpu_memory(parts.model.device) if settings.is_shared else None
    if world is None or world.size == 1:
        return open_vllm(settings, parts, [own])
    own_host = socket.gethostname()
    here = [memory for host, memory in world.gather((own_host, own)) if host == own_host]
    return first_process(
        world,
        lambda: open_vllm(settings, parts, here),
        device=parts.model.device,
        max_mismatch=settings.mismatch,
        before=release_memory if settings.is_shared else None,
    )


def open_vllm(settings: VllmSettings, parts: GeneratorParts, learning: Sequence[GPUMemory | None]) -> VllmGenerator:
    """`learning` are the processes of this machine, each on a GPU of its own where the policy is on one; for shared
    GPUs with the memory that they have there."""
    report = _silent if parts.report is None else parts.report
    trials = trials_of(settings, parts, report)
    if settings.python:
        servers = _started(settings, parts, report, learning)
    else:
        servers = [GivenServer(url) for url in settings.servers]
    queue = Queue(Engines(servers, settings, report, trials=trials))
    return VllmGenerator(queue, parts, parts.sampling, settings)


def trials_of(settings: VllmSettings, parts: GeneratorParts, report: Report) -> list[Handover]:
    """What a server gets before its first adapter, where it gets adapters; what they would not prove is told."""
    if not settings.sends_adapters:
        return []
    probe = probe_of(parts)
    trials = write_trials(weights_folder(parts) / "trials", parts.model, probe, mismatch=settings.mismatch)
    if hidden := [trial for trial in trials if not trial.can_be_seen(settings.mismatch)]:
        kinds = ", ".join(f"{trial.kind} ({trial.effect:.2g})" for trial in hidden)
        report(
            "warning",
            "vllm.trials",
            f"whether vLLM computes adapters of {kinds} cannot be seen: random ones change the scores of a text by so "
            f"many nats a token, and generator.mismatch allows {settings.mismatch:g}; set it lower",
        )
    return [
        Handover(
            folder=trial.folder,
            version=0,
            probe=probe,
            scores=trial.scores,
            limit=trial.limit(settings.mismatch),
            adapter=f"{MODEL}-trial-{trial.kind}",
            what=f"a trial adapter, of random numbers on every {trial.kind},",
        )
        for trial in trials
        if trial.can_be_seen(settings.mismatch)
    ]


def _silent(level: Any, code: str, message: str, **evidence: Any) -> None:
    del level, code, message, evidence


def _started(
    settings: VllmSettings, parts: GeneratorParts, report: Report, learning: Sequence[GPUMemory | None]
) -> Sequence[Server]:
    """All of them at once: a start takes a minute."""
    devices = devices_of(settings, len(learning) if parts.model.device.type == "cuda" or settings.is_shared else 0)
    options = _options(settings, parts, report, learning)
    logs = [parts.folder / "vllm" / f"server-{number}.log" for number in range(len(devices))]
    report("info", "vllm.start", f"starting {len(devices)} vLLM server(s); their logs are in {logs[0].parent}")
    servers: list[Server] = []
    try:
        for log, names in zip(logs, devices, strict=True):
            servers.append(StartedServer(server_spec(settings, parts, log, names, options)))
    except BaseException:
        for server in servers:
            server.close()
        raise
    return servers


def _options(
    settings: VllmSettings, parts: GeneratorParts, report: Report, learning: Sequence[GPUMemory | None]
) -> dict[str, str | int | float | bool]:
    """What servers must be able to do: take adapters, and sleep on GPUs of which they get a share."""
    options = lora_options(parts.model) if settings.sends_adapters else {}
    if settings.is_shared:
        gpus = [memory for memory in learning if memory is not None]
        memory = share_of(settings, gpus, weights=weight_bytes(parts.model))
        report("info", "vllm.memory", memory.words, share=memory.share)
        options |= {"enable-sleep-mode": True, "gpu-memory-utilization": memory.share}
    return options


def server_spec(
    settings: VllmSettings,
    parts: GeneratorParts,
    log: Path,
    devices: Sequence[str],
    options: Mapping[str, str | int | float | bool],
) -> ServerSpec:
    assert settings.python is not None
    window = window_of(parts.model.config)
    longest = max(parts.longest, 2 * len(parts.probe), 64) if parts.longest else None
    return ServerSpec(
        python=settings.python,
        model=base_of(parts.model, parts.source) if settings.sends_adapters else str(resolve(parts.source)),
        dtype=str(parts.model.dtype).removeprefix("torch."),
        max_tokens=min(longest, window) if longest and window else longest,
        logprobs_mode=logprobs_mode(parts.sampling),
        tensor_parallel=settings.tensor_parallel,
        devices=tuple(devices),
        options=options,
        extra=settings.extra,
        log=log,
        start_s=settings.start_s,
        timeout_s=settings.timeout_s,
    )


def devices_of(settings: VllmSettings, num_learning: int) -> list[tuple[str, ...]]:
    """The GPUs of each server, by their names in CUDA_VISIBLE_DEVICES: the last ones that this process can see, or, on
    shared ones, the first, which learn."""
    if not settings.gpus:
        return [()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if settings.is_shared:
        return shared_devices(settings, names, num_learning=num_learning)
    if problem := too_few_gpus(settings, len(names), num_learning=num_learning):
        raise ConfigError(problem)
    own, size = names[len(names) - settings.num_gpus :], settings.tensor_parallel
    return [tuple(own[at : at + size]) for at in range(0, len(own), size)]
