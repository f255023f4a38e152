"""Models behind HTTP that pages talk with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx2

from kedge.core.errors import ConfigError, DataError
from kedge.core.urls import check_url, is_loopback
from kedge.data.examples import Messages

_ANSWER_S = 120.0
_MOST_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """A model behind `kedge serve`, or any server that speaks OpenAI's chat completions."""

    name: str
    url: str
    key: str | None = field(default=None, repr=False)
    max_tokens: int | None = _MOST_TOKENS
    """Of an answer; None is what the server gives."""

    def answer(self, messages: Messages) -> str:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            reply = httpx2.post(f"{self.url}/chat/completions", json=body, headers=headers, timeout=_ANSWER_S)
            reply.raise_for_status()
            text = reply.json()["choices"][0]["message"]["content"]
        except (OSError, httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            # Which of the models it was stays hidden.
            raise DataError("a model does not answer now; try again in a moment") from error
        if not isinstance(text, str):
            raise DataError("a model does not answer now; try again in a moment")
        return text


def parse_chat_model(words: str, key: str | None) -> ChatModel:
    """`NAME=URL`, where the key goes over TLS or stays on this machine.

    >>> parse_chat_model("policy=http://127.0.0.1:8000/v1/", None)
    ChatModel(name='policy', url='http://127.0.0.1:8000/v1', max_tokens=1024)
    """
    name, separator, url = words.partition("=")
    if not separator or not name:
        raise ConfigError(f"--chat {words}: write NAME=URL, such as policy=http://127.0.0.1:8000/v1")
    try:
        check_url(url)
    except ValueError as error:
        raise ConfigError(f"--chat {name}: {error}") from error
    if not url.startswith("https://") and not is_loopback(url):
        raise ConfigError(f"--chat {name}: {url} would send texts and the key unencrypted; use https://")
    return ChatModel(name=name, url=url.rstrip("/"), key=key)
