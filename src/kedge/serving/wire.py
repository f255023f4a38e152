"""OpenAI's wire format: what requests may hold, and how choices, log-probabilities, usage and errors are written.

Fields that this server does not offer are refused unless they ask for nothing. Left out: streaming, tools, penalties.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kedge.core.suggest import did_you_mean

MOST_CHOICES = 128
MOST_TOP = 20
"""The most alternatives of a token whose log-probabilities are given, as in OpenAI's API."""
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "stream": (None, False),
    "stream_options": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
}
"""Fields of OpenAI's API that are not offered, with the values that ask for nothing."""
_INSTEAD = {"stream": "; an answer is sent whole, once it is complete"}


class ApiError(Exception):
    """A refusal in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Sampled(_Request):
    model: str
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    user: str | None = None
    """A label of the caller's; it changes nothing."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(_Sampled):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)


class CompletionRequest(_Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    echo: bool = False


class AnswerToScore(_Request):
    prompt: list[dict[str, Any]]
    answer: str
    is_finished: bool = True
    solution: str | None = None
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])


class ScoreRequest(_Request):
    answers: list[AnswerToScore]


RequestT = TypeVar("RequestT", bound=_Request)


def read_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """The request, or an ApiError that names the field."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, found {_shown(value)}")
    fields = _without_neutral(cast("dict[str, Any]", value), kind)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _without_neutral(fields: dict[str, Any], kind: type[_Request]) -> dict[str, Any]:
    """The fields without those of OpenAI's API that are not offered, which must ask for nothing."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in kind.model_fields or name not in _ASKS_FOR_NOTHING:
            kept[name] = value
        elif not any(value == nothing for nothing in _ASKS_FOR_NOTHING[name]):
            message = f"'{name}' is not offered by this server{_INSTEAD.get(name, '')}; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return kept


def _refusal(error: ValidationError, kind: type[_Request]) -> ApiError:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = AnswerToScore.model_fields if len(first["loc"]) > 1 else kind.model_fields
        hint = did_you_mean(param.rpartition(".")[2], known)
        return ApiError(400, f"'{param}' is not a field of this request{hint}", param=param, code="unknown_parameter")
    found = "" if first["type"] == "missing" else f", found {_shown(first['input'])}"
    return ApiError(400, f"'{param}': {first['msg']}{found}", param=param, code="invalid_value")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability among all tokens (None: nothing precedes it), and the likeliest ones there."""

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer as it is sent."""

    text: str
    is_finished: bool
    tokens: tuple[TokenLogprob, ...] | None = None
    """Where log-probabilities were asked for."""
    offsets: tuple[int, ...] = ()
    """Where in the text each token begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def models_reply(name: str, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_reply(name, created)]}


def model_reply(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "kedge"}


def chat_reply(choices: Sequence[Choice], usage: Usage, about: Mapping[str, Any]) -> dict[str, Any]:
    written = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice),
            "finish_reason": _finish_reason(choice),
        }
        for index, choice in enumerate(choices)
    ]
    return _reply("chatcmpl", "chat.completion", written, usage, about)


def completion_reply(choices: Sequence[Choice], usage: Usage, about: Mapping[str, Any]) -> dict[str, Any]:
    written = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": _completion_logprobs(choice),
            "finish_reason": _finish_reason(choice),
        }
        for index, choice in enumerate(choices)
    ]
    return _reply("cmpl", "text_completion", written, usage, about)


def _reply(
    prefix: str, kind: str, choices: list[dict[str, Any]], usage: Usage, about: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        **about,
        "choices": choices,
        "usage": usage.as_json(),
    }


def _finish_reason(choice: Choice) -> str:
    return "stop" if choice.is_finished else "length"


def _chat_logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    content = [
        {
            **_token(token.text, token.logprob or 0.0),
            "top_logprobs": [_token(text, logprob) for text, logprob in token.top],
        }
        for token in choice.tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    """A part of a character has no text of its own, so its bytes are not known from it."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _completion_logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    return {
        "tokens": [token.text for token in choice.tokens],
        "token_logprobs": [token.logprob for token in choice.tokens],
        # Of tokens with the same text the likeliest stands.
        "top_logprobs": [None if token.logprob is None else dict(reversed(token.top)) for token in choice.tokens],
        "text_offset": list(choice.offsets),
    }
