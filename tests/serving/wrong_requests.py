"""Requests that a served language model must refuse, each with the status and the words of its refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from running import NAME, Served

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Case:
    name: str
    status: int
    words: str
    """Part of the message."""
    path: str = CHAT
    body: bytes | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    code: str | None = None
    param: str | None = None


def asking(path: str = CHAT, **fields: Any) -> bytes:
    base = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    request = {"model": NAME, "max_tokens": 4} | base | fields
    return json.dumps({name: value for name, value in request.items() if value is not ...}).encode()


def chat(name: str, words: str, *, status: int = 400, **fields: Any) -> Case:
    return Case(name, status, words, body=asking(**fields))


CASES = [
    Case("no token", 401, "Bearer TOKEN", headers={"Authorization": ""}, code="invalid_api_key"),
    Case("wrong token", 401, "Bearer TOKEN", headers={"Authorization": "Bearer nope"}, code="invalid_api_key"),
    Case("token of letters beyond ASCII", 401, "Bearer TOKEN", headers={"Authorization": "Bearer \xe4"}),
    Case("token as a password", 401, "Bearer TOKEN", headers={"Authorization": "Basic YTpi"}),
    Case("foreign host", 403, "this server answers to 127.0.0.1:", headers={"Host": "evil.example"}, code="wrong_host"),
    Case("host without its port", 403, "this server answers to", headers={"Host": "127.0.0.1"}),
    Case("host that only begins alike", 403, "answers to", headers={"Host": "127.0.0.1.evil.example"}),
    Case("unknown path", 404, "/v1/embeddings", path="/v1/embeddings", body=b"{}"),
    Case("unknown path, without a token", 401, "Bearer", path="/nothing", headers={"Authorization": ""}),
    Case("another method", 405, "GET /v1/completions", path=COMPLETE, method="GET"),
    Case("scores of a language model", 404, "/score", path="/score", body=b'{"answers": []}'),
    Case("another model listed", 404, "this server has 'tiny'", path="/v1/models/gpt-4", method="GET"),
    Case("too large", 413, "larger than", body=b" " * (2 << 20), code="request_too_large"),
    Case("not JSON", 400, "not JSON", body=b"{"),
    Case("nested without end", 400, "not JSON", body=b"[" * 100_000),
    Case("not UTF-8", 400, "not JSON", body=b'{"a": "\xff\xff"}'),
    Case("a list", 400, "a JSON object", body=b"[]"),
    Case("another model", 404, "'gpt-4' does not exist", body=asking(model="gpt-4"), code="model_not_found"),
    Case("unknown field", 400, "did you mean 'seed'?", body=asking(sead=3), code="unknown_parameter", param="sead"),
    Case("streaming", 400, "sent whole", body=asking(stream=True), code="unsupported_parameter", param="stream"),
    Case("tools", 400, "'tools' is not offered", body=asking(tools=[{}]), code="unsupported_parameter"),
    Case("no model", 400, "'model'", body=asking(model=...), param="model"),
    Case("no messages", 400, "'messages'", body=asking(messages=...), param="messages"),
    Case("text beside a number", 400, "'seed'", body=asking(seed="3"), code="invalid_value", param="seed"),
    Case("empty stop", 400, "'stop' holds an empty text", body=asking(stop=""), param="stop"),
    Case("no room", 400, "window of 1024", body=asking(max_tokens=1024), code="context_length_exceeded"),
    Case("alternatives without log-probs", 400, "goes with", body=asking(top_logprobs=2), param="top_logprobs"),
    chat("messages empty", "'messages'", messages=[]),
    chat("a message without a role", "'messages[0]' has no 'role'", messages=[{"content": "Hi"}]),
    chat("an unknown role", "known roles", messages=[{"role": "wizard", "content": "Hi"}]),
    chat("a picture", "only text parts", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    chat("temperature below 0", "'temperature'", temperature=-0.1),
    chat("top_p of 0", "'top_p'", top_p=0),
    chat("top_k of 0", "'top_k'", top_k=0),
    chat("n of 0", "'n'", n=0),
    chat("n of a million", "'n'", n=1_000_000),
    chat("yes for a number", "'n'", n=True),
    chat("no tokens", "'max_tokens'", max_tokens=0),
    chat("too many alternatives", "'top_logprobs'", logprobs=True, top_logprobs=21),
    Case("an empty prompt", 400, "nothing can follow", path=COMPLETE, body=asking(COMPLETE, prompt="")),
    Case("no prompt at all", 400, "no prompt", path=COMPLETE, body=asking(COMPLETE, prompt=[])),
    Case("a token that is none", 400, "among the 259", path=COMPLETE, body=asking(COMPLETE, prompt=[5, 999])),
    Case("texts and tokens mixed", 400, "'prompt", path=COMPLETE, body=asking(COMPLETE, prompt=["a", 5])),
    Case("nothing to answer", 400, "'max_tokens' is 0", path=COMPLETE, body=asking(COMPLETE, max_tokens=0)),
    Case("best of two", 400, "'best_of' is not offered", path=COMPLETE, body=asking(COMPLETE, best_of=2)),
]


def attempt(case: Case, server: Served) -> str | None:
    """None where the server refuses the request as it should, and still answers the next one."""
    body = case.body if case.body is not None or case.method == "GET" else asking(case.path)
    headers = [(name.encode(), value.encode("latin-1")) for name, value in case.headers.items()]
    reply = server.client.request(case.method, case.path, content=body, headers=headers)
    if reply.status_code != case.status:
        return f"status {reply.status_code}, expected {case.status}: {reply.text[:200]}"
    error = reply.json().get("error", {})
    if set(error) != {"message", "type", "param", "code"} or error["type"] != "invalid_request_error":
        return f"not an error in OpenAI's form: {reply.text[:200]}"
    if case.words not in error["message"]:
        return f"expected {case.words!r} in {error['message']!r}"
    if case.code not in (None, error["code"]) or case.param not in (None, error["param"]):
        return f"expected code {case.code} and param {case.param}: {error}"
    if server.client.get("/health").status_code != 200:
        return "the server does not answer any more"
    return None
