"""The protocol of a vLLM server: every status is read, every call has a deadline, errors are in the server's own words.

Left out: everything but completions of token ids, the weight API with files, adapters, sleep, and health. Log-probs are
in nats.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import httpx2

from kedge.core.errors import GeneratorError, SyncError
from kedge.core.urls import failure_reason, is_loopback, redacted

MODEL: Final = "kedge"
"""The name that servers know the policy by."""
AT_ONCE: Final = 512
"""Answers asked for at once, of all servers together; vLLM queues what it has no room for."""
HEALTH_S: Final = 10.0
_WORDS: Final = 2000
"""Characters of a server's reply that an error quotes."""


class ServerLost(Exception):
    """There was no reply: the server is gone, or hangs. The message says why."""


class ServerHangs(ServerLost):
    """There was no reply in time: the server may be there still, with all of its memory."""


class ServerFailed(ServerLost):
    """The reply was that the server failed (5xx): its engine may have died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row to answer: the body of its request, and who is asked."""

    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: Sequence[int]
    """With the token that ended it."""
    logprobs: Sequence[float]
    is_finished: bool
    """Whether it ended by itself."""


class Api:
    """One server, asked a thing at a time."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s

    def is_healthy(self) -> bool:
        try:
            self.get("/health", timeout_s=HEALTH_S)
        except (ServerLost, GeneratorError):
            return False
        return True

    def version(self) -> str:
        return str(_field(self.get("/version"), "version", self.url))

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return self._call("GET", path, None, None, timeout_s)

    def post(self, path: str, body: Any = None, *, query: Mapping[str, str] | None = None) -> Any:
        return self._call("POST", path, body, query, None)

    # Weights

    @contextmanager
    def paused(self) -> Generator[None]:
        """Nothing is answered inside of the block. A server that fails there must not be asked again."""
        self.post("/pause", query={"mode": "wait"})
        yield
        self.post("/resume")

    @contextmanager
    def waking(self) -> Generator[None]:
        """A server that sleeps: inside of the block it has room for weights, behind it for keys and values too, and
        answers."""
        self._wake("weights")
        yield
        self._wake("kv_cache")
        if _field(self.get("/is_sleeping"), "is_sleeping", self.url) is not False:
            raise SyncError(f"{redacted(self.url)}: it was told to wake up, and sleeps still")

    def _wake(self, tag: str) -> None:
        try:
            self.post("/wake_up", query={"tags": tag})
        except GeneratorError as error:
            raise SyncError(
                f"vLLM does not wake up ({tag}): {error}. It wakes beside what learns: where memory is short, set a "
                "smaller generator.memory_share"
            ) from error

    def sleep(self, level: int) -> None:
        """Give up keys and values, and the weights: at level 1 they wait in the host's memory, at level 2 they are
        gone."""
        self.post("/sleep", query={"level": str(level), "mode": "abort"})
        if _field(self.get("/is_sleeping"), "is_sleeping", self.url) is not True:
            raise GeneratorError(f"{redacted(self.url)}: it was told to sleep, and is awake still")

    def load_weights(self, folder: str, version: int) -> None:
        """Load the safetensors files of a folder that the server sees too, and take over their version; keys and values
        of the old weights are forgotten. A server that fails here has lost its weights: it must not be asked again."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        if _field(self.post("/reset_prefix_cache"), "success", self.url) is not True:
            raise SyncError(f"{redacted(self.url)}: it could not forget the keys and values of the old weights")
        self.post("/update_weight_version", {"new_version": str(version)})

    def refuse_other_version(self, version: int) -> None:
        arrived = _field(self.get("/weight_info"), "weight_version", self.url)
        if arrived != str(version):
            raise SyncError(f"{redacted(self.url)}: it has weights of version {arrived!r}, sent was {version}")

    def load_adapter(self, name: str, folder: str) -> None:
        """Load the adapter of a folder that the server sees too, and answer with it where `name` is asked for."""
        self._reply("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, "load_inplace": True})
        models = _field(self.get("/v1/models"), "data", self.url)
        places = {str(_field(model, "id", self.url)): str(_field(model, "root", self.url)) for model in models}
        if places.get(name) != folder:
            raise SyncError(f"{redacted(self.url)}: the adapter {name!r} of {folder} is not among its models: {places}")

    def unload_adapter(self, name: str) -> None:
        self._reply("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    # Answers

    def score(self, tokens: Sequence[int], *, model: str = MODEL) -> list[float]:
        """The log-prob of each token but the first, under the server's weights at temperature 1."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choice = _choice(self.post("/v1/completions", body), self.url)
        entries = _field(choice, "prompt_logprobs", self.url)
        try:
            return [float(entry[str(token)]["logprob"]) for token, entry in zip(tokens[1:], entries[1:], strict=True)]
        except (TypeError, KeyError, ValueError) as error:
            raise GeneratorError(f"{redacted(self.url)}: unusable log-probs of a prompt: {error!r}") from error

    def _call(self, method: str, path: str, body: Any, query: Mapping[str, str] | None, limit_s: float | None) -> Any:
        return _content(self._reply(method, path, body, query, limit_s), self.url + path)

    def _reply(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None = None, limit_s: float | None = None
    ) -> bytes:
        timeout_s = limit_s or self._timeout_s
        try:
            with httpx2.Client(timeout=timeout_s, **_connection([self.url])) as http:
                reply = http.request(method, self.url + path, json=body, params=query)
        except (OSError, httpx2.HTTPError) as error:
            kind = ServerHangs if isinstance(error, TimeoutError | httpx2.TimeoutException) else ServerLost
            raise kind(f"{redacted(self.url)}{path}: {_reason(error, timeout_s)}") from error
        return _accepted(reply.status_code, reply.content, self.url + path)


async def ask_all(questions: Sequence[Question], *, timeout_s: float) -> list[Answer | ServerLost]:
    """The answer to each question, in their order, or why its server gave none."""
    free = asyncio.Semaphore(AT_ONCE)
    limits = httpx2.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    connection = _connection([question.url for question in questions])
    async with httpx2.AsyncClient(timeout=None, limits=limits, **connection) as http:

        async def ask(question: Question) -> Answer | ServerLost:
            async with free:
                try:
                    return await _ask(http, question, timeout_s)
                except ServerLost as lost:
                    return lost

        return list(await asyncio.gather(*map(ask, questions)))


def _connection(urls: Sequence[str]) -> dict[str, Any]:
    """What is meant for this machine goes through no proxy; certificates are read where they are needed."""
    return {
        "trust_env": not all(map(is_loopback, urls)),
        "verify": any(url.startswith("https:") for url in urls),
    }


async def _ask(http: httpx2.AsyncClient, question: Question, timeout_s: float) -> Answer:
    url = f"{question.url}/v1/completions"
    try:
        async with asyncio.timeout(timeout_s):
            reply = await http.post(url, json=question.body)
    except (OSError, TimeoutError, httpx2.HTTPError) as error:
        raise ServerLost(f"{redacted(url)}: {_reason(error, timeout_s)}") from error
    if reply.status_code >= 500:
        raise ServerFailed(_refusal(reply.status_code, reply.content, url))
    return _answer(_content(_accepted(reply.status_code, reply.content, url), url), url)


def _answer(content: Any, url: str) -> Answer:
    choice = _choice(content, url)
    reason = _field(choice, "finish_reason", url)
    tokens, logprobs = _field(choice, "token_ids", url), _field(choice, "logprobs", url)
    values: Any = cast("dict[str, Any]", logprobs).get("token_logprobs") if isinstance(logprobs, dict) else []
    if not _are(tokens, int) or not tokens or not _are(values, float | int) or len(values) != len(tokens):
        raise GeneratorError(
            f"{redacted(url)}: an answer has no token ids, or not a log-prob for each: expected vLLM 0.32 or newer "
            f"with `return_token_ids`; found tokens {str(tokens)[:80]}, log-probs {str(values)[:80]}"
        )
    if not all(map(math.isfinite, values)):
        raise GeneratorError(f"{redacted(url)}: a log-prob is not finite: {str(values)[:200]}")
    if reason not in ("stop", "length"):
        raise ServerFailed(f"{redacted(url)}: an answer was ended by the server ({reason})")
    return Answer(tokens=tokens, logprobs=[float(value) for value in values], is_finished=reason == "stop")


def _are(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in cast("list[Any]", values))


def _choice(content: Any, url: str) -> Any:
    choices = _field(content, "choices", url)
    return cast("list[Any]", choices)[0] if isinstance(choices, list) and choices else _field({}, "choices", url)


def _field(content: Any, name: str, url: str) -> Any:
    if not isinstance(content, dict) or name not in content:
        raise GeneratorError(f"{redacted(url)}: a reply without {name!r}: {str(content)[:200]}; is this vLLM 0.32?")
    return cast("dict[str, Any]", content)[name]


def _accepted(status: int, content: bytes, url: str) -> bytes:
    if status >= 300:
        raise GeneratorError(_refusal(status, content, url))
    return content


def _content(content: bytes, url: str) -> Any:
    if not content.strip():
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        raise GeneratorError(f"{redacted(url)}: a reply that is not JSON: {content[:200]!r}") from error


def _refusal(status: int, content: bytes, url: str) -> str:
    hint = ""
    if status == 404 and "lora_adapter" in url:
        hint = (
            "; is it started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and is the run folder at "
            "the same path there?"
        )
    elif status == 404 and "/v1/" not in url:
        hint = "; is it started with VLLM_SERVER_DEV_MODE=1?"
    return f"{redacted(url)}: HTTP {status}: {_words(content)}{hint}"


def _words(content: bytes) -> str:
    """What a server says about an error.

    >>> _words(b'{"error": {"message": "no room"}}'), _words(b'{"detail": "Not Found"}'), _words(b"gone")
    ('no room', 'Not Found', 'gone')
    """
    text = content.decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return redacted(text[:_WORDS]) or "no words"
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and name in value:
            value = cast("dict[str, Any]", value)[name]
    return redacted(str(value)[:_WORDS])


def _reason(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError | httpx2.TimeoutException):
        return f"no whole reply within {timeout_s:g} s"
    return failure_reason(error)
