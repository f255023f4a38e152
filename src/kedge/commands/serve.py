"""What `kedge serve` does: a model behind HTTP until it is interrupted, which finishes what is being answered."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.commands.listening import listen
from kedge.commands.sample import find_model
from kedge.core.errors import ConfigError, PluginError
from kedge.core.urls import is_loopback
from kedge.models.loading.load import DTypeName
from kedge.models.settings import AutoSize
from kedge.stages.rl.judge import is_reward_model, load_judge, template_findings
from kedge.stages.shared.device import checked_device

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kedge.serving.app import Door
    from kedge.stages.shared.context import Say

_SHORTEST_TOKEN = 16
_SCORES_AT_ONCE = 1024
_CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
_SCORE_BODY: dict[str, Any] = {"answers": [{"prompt": [{"role": "user", "content": "Hello"}], "answer": "Hi!"}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served, and how."""

    model: str
    name: str | None = None
    """What callers name; the model as it was given, when absent."""
    rows: AutoSize = "auto"
    queue: int = 1024
    """Answers that may wait; more are refused until some are done."""
    objective: str | None = None
    chat_template: str | None = None
    device: str = "auto"
    dtype: DTypeName = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A model in memory: what its worker computes, how many rows at once, and its application."""

    compute: Callable[[Any, Sequence[Any]], Sequence[Any]]
    rows: int
    make_app: Callable[[Door], FastAPI]
    scores: bool
    """Whether it is a reward model."""


def serve(serving: Serving, *, host: str, port: int, token_file: Path | None, say: Say) -> None:
    """Until SIGTERM or Ctrl-C, after which nothing new is taken and what is being answered is finished."""
    try:
        import uvicorn

        from kedge.report.live.connections import PatientProtocol
        from kedge.serving.app import Door
        from kedge.serving.jobs import Worker
    except ImportError as error:
        raise PluginError(f"kedge serve needs {error.name!r}: pip install 'kedge[web]'") from error
    with closing(listen(host, port)) as listening:
        address = f"{_bracketed(host)}:{listening.getsockname()[1]}"
        service = open_service(serving, say)
        token = token_from(token_file)
        name = serving.name or serving.model
        worker = Worker(service.compute, rows_at_once=service.rows, most_waiting=serving.queue)
        app = service.make_app(Door(name=name, token=token, hosts=allowed_hosts(address), worker=worker))
        for line in introduction(service, address, name, token=token, token_file=token_file):
            say(line)
        # After SIGTERM the server ends by itself; the signal, which it then passes on, must not end it a second time.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            config = uvicorn.Config(app, http=PatientProtocol, log_level="warning", access_log=False)
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            signal.signal(signal.SIGTERM, before)
            worker.close()


def open_service(serving: Serving, say: Say) -> Service:
    """The model loaded: a language model, or a reward model where the folder holds one."""
    device = checked_device(serving.device)
    if is_reward_place(serving.model):
        from kedge.serving.score_app import score_app, scoring

        judge = load_judge(serving.model, device=device)
        for finding in template_findings(judge):
            say(f"{finding.message} ({finding.fix})")
        compute = scoring(judge, serving.objective)
        return Service(compute=compute, rows=_SCORES_AT_ONCE, make_app=score_app, scores=True)
    if serving.objective is not None:
        raise ConfigError(f"--objective {serving.objective}: {serving.model} is a language model, which has none")
    from kedge.serving.text_app import text_app
    from kedge.serving.text_model import TextModel

    model = TextModel(
        find_model(serving.model),
        device=device,
        dtype=serving.dtype,
        chat_template=serving.chat_template,
        rows=serving.rows,
    )
    return Service(compute=model.compute, rows=model.rows, make_app=partial(text_app, model), scores=False)


def is_reward_place(model: str) -> bool:
    """Whether a reward model is meant: the folder of one, or of the stage that made it."""
    return any(is_reward_model(folder) for folder in (Path(model), Path(model) / "model"))


def introduction(service: Service, address: str, name: str, *, token: str, token_file: Path | None) -> Iterator[str]:
    """Where the server is, a request to try, and how a recipe names it. A token in a file is not shown."""
    bearer = token if token_file is None else f"$(cat {shlex.quote(str(token_file))})"
    path, body = ("/score", _SCORE_BODY) if service.scores else ("/v1/chat/completions", _CHAT_BODY | {"model": name})
    yield f"http://{address}{'/score' if service.scores else '/v1'} serves {name}"
    data = shlex.quote(json.dumps(body))
    yield f'curl http://{address}{path} -H "Authorization: Bearer {bearer}" -d {data}'
    source = f"{{kind: http, url: 'http://{address}/score', key_variable: KEDGE_TOKEN}}"
    judge = f"{{kind: judge, url: 'http://{address}/v1', model: '{name}', key_variable: KEDGE_TOKEN}}"
    yield f"In a recipe, with the token in KEDGE_TOKEN: {source if service.scores else judge}"
    if allowed_hosts(address) is None:
        yield "Other machines can reach it, and the token goes over the network unencrypted: put TLS before it."
    yield "Ctrl-C ends it, once what is being answered is finished."


def token_from(file: Path | None) -> str:
    """A new token, or the one in a file; a file that is not there is made, for its owner alone."""
    if file is None:
        return secrets.token_urlsafe(24)
    if file.exists():
        token = file.read_text(encoding="utf-8").strip()
        if len(token) < _SHORTEST_TOKEN or not token.isascii() or any(letter.isspace() for letter in token):
            raise ConfigError(
                f"--token-file {file}: expected one token of {_SHORTEST_TOKEN} ASCII characters or more "
                "without spaces, found something else; remove the file, and a new token is written there"
            )
        return token
    token = secrets.token_urlsafe(24)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(token + "\n")
    return token


def allowed_hosts(address: str) -> tuple[str, ...] | None:
    """Host headers that are answered; None, any, where other machines may come by names that are not known here.

    >>> allowed_hosts("127.0.0.1:80"), allowed_hosts("0.0.0.0:80")
    (('127.0.0.1:80', 'localhost:80', '[::1]:80'), None)
    """
    if not is_loopback(f"http://{address}"):
        return None
    port = address.rpartition(":")[2]
    return tuple(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
