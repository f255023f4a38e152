"""`/chat`: a served model, or two whose names are hidden, answers; the person judges, the labels go to the store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Literal

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from kedge.core.errors import ConfigError, DataError
from kedge.core.urls import check_url, is_loopback
from kedge.data.examples import Message, Messages
from kedge.label.projects import Project
from kedge.label.questions import Decision
from kedge.label.team.chats import (
    Chat,
    add_turn,
    check_message,
    end_chat,
    judge_turn,
    new_chat,
    open_chat,
    votes_by_model,
)
from kedge.label.team.members import step_of
from kedge.web.desk import STEPS
from kedge.web.pages import Site, fragment, page, project_for, visitor_of

_ANSWER_S = 120.0
_MOST_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """A model behind `kedge serve`, or any server that speaks OpenAI's chat completions."""

    name: str
    url: str
    key: str | None = field(default=None, repr=False)

    def answer(self, messages: Messages) -> str:
        body = {
            "model": self.name,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": _MOST_TOKENS,
        }
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
    ChatModel(name='policy', url='http://127.0.0.1:8000/v1')
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


class Said(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    text: str
    new: bool = False


class Vote(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    step: Literal["-3", "-2", "-1", "0", "1", "2", "3", "both_bad"]
    reason: Annotated[str, Field(max_length=2000)] = ""


class Thumbed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""
    thumb: Literal["1", "-1"]
    reason: Annotated[str, Field(max_length=2000)] = ""
    edit: Annotated[str, Field(max_length=200_000)] = ""


class Ending(BaseModel):
    model_config = ConfigDict(extra="forbid")
    project: str = ""


def add_chat(app: FastAPI, site: Site, models: Sequence[ChatModel]) -> None:
    store = site.store
    asking = ThreadPoolExecutor(max_workers=16, thread_name_prefix="kedge-chat")

    def shown(request: Request, project: Project) -> Response:
        return JSONResponse({"html": talk(site, project, open_chat(store, project, visitor_of(request).person))})

    @app.get("/chat")
    def chat_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        person, project = visitor_of(request).person, project_for(site, request)
        if step_of(store, project, person) in ("quiz", "failed", "paused"):
            return RedirectResponse(f"/start?project={project.name}", status_code=303)
        html = talk(site, project, open_chat(store, project, person))
        return page(site, request, "chat.html.j2", "chat", project, talk=html)

    @app.post("/chat/say")
    def say(request: Request, body: Said) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request, body.project)
        chat = open_chat(store, project, person)
        if body.new or chat is None or chat.ended:
            chat = new_chat(store, project, person, _drawn(site, project, models))
        text = check_message(chat, body.text)
        asked = (*chat.messages, Message("user", text))
        chosen = [model for model in models if model.name in chat.models]
        answers = list(asking.map(lambda model: model.answer(asked), chosen))
        add_turn(store, chat, text, [(model.name, answer) for model, answer in zip(chosen, answers, strict=True)])
        return shown(request, project)

    @app.post("/chat/vote")
    def vote(request: Request, body: Vote) -> Response:  # pyright: ignore[reportUnusedFunction]
        reason = body.reason.strip() or None
        if body.step == "both_bad":
            return judged(request, body.project, Decision(verdict="both_bad", reason=reason))
        return judged(request, body.project, Decision(verdict="step", outcome=int(body.step), reason=reason))

    @app.post("/chat/thumb")
    def thumb(request: Request, body: Thumbed) -> Response:  # pyright: ignore[reportUnusedFunction]
        reason, edit = body.reason.strip() or None, body.edit.strip() or None
        return judged(
            request, body.project, Decision(verdict="thumb", outcome=int(body.thumb), reason=reason, edit=edit)
        )

    def judged(request: Request, name: str, decision: Decision) -> Response:
        person, project = visitor_of(request).person, project_for(site, request, name)
        chat = open_chat(store, project, person)
        if chat is None or (decision.verdict == "thumb") != (len(chat.waiting) == 1):
            raise DataError("there is nothing to judge")
        judge_turn(store, project, person, chat, decision)
        return shown(request, project)

    @app.post("/chat/end")
    def end(request: Request, body: Ending) -> Response:  # pyright: ignore[reportUnusedFunction]
        person, project = visitor_of(request).person, project_for(site, request, body.project)
        chat = open_chat(store, project, person)
        if chat is None:
            raise DataError("there is no chat")
        end_chat(store, chat)
        return shown(request, project)


def _drawn(site: Site, project: Project, models: Sequence[ChatModel]) -> list[str]:
    """Two models where the project compares pairs and there are two, else one; which ones is drawn."""
    names = [model.name for model in models]
    site.store.randomness.shuffle(names)
    if len(names) > 1 and "pair" in project.questions:
        return names[:2]
    if "thumb" not in project.questions:
        raise DataError(f"project '{project.name}' asks no thumbs, and there are not two models to compare")
    return names[:1]


def talk(site: Site, project: Project, chat: Chat | None) -> str:
    """The conversation as a part of the page, with the votes that the project accepts; the names of models only once it
    has ended."""
    names = votes_by_model(site.store, chat) if chat is not None and chat.ended else []
    asks, can_edit = project.questions.get("pair") or {}, "edit" in project.questions
    return fragment("talk.html.j2", chat=chat, names=names, steps=STEPS, asks=asks, can_edit=can_edit)
