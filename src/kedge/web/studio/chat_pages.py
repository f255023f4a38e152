"""`/chat`: talk with models of the project; answers become data, badcases, or questions to people."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from kedge.web.studio.chats import Chat, ChatRoom, Place
from kedge.web.studio.context import Studio
from kedge.web.studio.pages import fragment, page

Words = Annotated[str, Field(max_length=40_000)]
Identity = Annotated[str, Field(max_length=100)]
Needed = Annotated[str, Field(min_length=1, max_length=2000)]


class Models(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: Words
    second: Words = ""


class Said(BaseModel):
    """`chat` and `turns` say what the page shows."""

    model_config = ConfigDict(extra="forbid")
    text: Words
    chat: Identity
    turns: int


class OfAnswer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    chat: Identity
    turn: int
    side: int

    @property
    def place(self) -> Place:
        return Place(chat=self.chat, turn=self.turn, side=self.side)


class Thumb(OfAnswer):
    is_good: bool


class Case(OfAnswer):
    why: Needed
    check: Literal["contains", "lacks", "number", "regex", "refusal"]
    value: Needed


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


def add_chat(app: FastAPI, studio: Studio) -> None:
    room = ChatRoom(studio)

    def shown(chat: Chat | None, say: str = "") -> Response:
        return JSONResponse({"html": _talk(room, chat), "say": say, "is_loading": _is_loading(room, chat)})

    @app.get("/chat")
    def chat_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        chat = room.chat()
        names = [*(alias for alias, _ in studio.services.models()), *studio.project.model_folders()]
        own = studio.project.model_folders()
        chosen = [*(chat.models if chat else own[:2]), "", ""][:2]
        return page(request, "chat_page.html.j2", "chat", names=names, chosen=chosen, chat=chat, talk=_talk(room, chat))

    @app.get("/chat/state")
    def state() -> Response:  # pyright: ignore[reportUnusedFunction]
        return shown(room.chat())

    @app.post("/chat/open")
    def open_chat(body: Models) -> Response:  # pyright: ignore[reportUnusedFunction]
        return shown(room.open([body.first, body.second]))

    @app.post("/chat/close")
    def close(body: Nothing) -> Response:  # pyright: ignore[reportUnusedFunction]
        del body
        room.close()
        return shown(None)

    @app.post("/chat/say")
    def say(body: Said) -> Response:  # pyright: ignore[reportUnusedFunction]
        return shown(room.say(body.text, chat_id=body.chat, turns=body.turns))

    @app.post("/chat/thumb")
    def thumb(body: Thumb) -> Response:  # pyright: ignore[reportUnusedFunction]
        return shown(room.thumb(body.place, is_good=body.is_good))

    @app.post("/chat/prefer")
    def prefer(body: OfAnswer) -> Response:  # pyright: ignore[reportUnusedFunction]
        return shown(room.prefer(body.place))

    @app.post("/chat/badcase")
    def badcase(body: Case) -> Response:  # pyright: ignore[reportUnusedFunction]
        chat = room.badcase(body.place, why=body.why, check=body.check, value=body.value)
        return shown(chat, "kept as a badcase")

    @app.post("/chat/ask")
    def ask(body: OfAnswer) -> Response:  # pyright: ignore[reportUnusedFunction]
        return shown(room.ask(body.place))


def _talk(room: ChatRoom, chat: Chat | None) -> str:
    servings = [] if chat is None else room.servings(chat)
    return fragment("chat_talk.html.j2", chat=chat, servings=servings)


def _is_loading(room: ChatRoom, chat: Chat | None) -> bool:
    return chat is not None and any(serving.state == "loading" for serving in room.servings(chat))
