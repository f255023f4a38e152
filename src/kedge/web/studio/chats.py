"""A chat with one model of the project or two, side by side: kept in the project, so that a closed tab loses nothing.

Each model is a process of `kedge serve`, a job like a run, that goes on when the server ends and is found again.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import append_line, atomic_open, hash_bytes, write_json
from kedge.core.quoting import one_line, quoted
from kedge.data.examples import Message
from kedge.web.chat_models import ChatModel
from kedge.web.studio.context import Studio
from kedge.web.studio.drafts import Outdated
from kedge.web.studio.jobs import Job
from kedge.web.studio.services import BadAnswer, Question

LONGEST: Final = 20_000
"""Characters of a message."""
THUMBS, PAIRS = "data/chat-thumbs.jsonl", "data/chat-pairs.jsonl"
_ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+/v1) serves ")
_LAST_LINES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    text: str
    answers: tuple[str, ...]
    """One of each model."""
    sent: tuple[str, ...] = ()
    """Where answers of this turn have gone, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    models: tuple[str, ...]
    id: str = ""
    """Tells it from the one that another tab began since: answers are known by their place alone."""
    turns: tuple[Turn, ...] = ()

    def messages(self, side: int, turn: int | None = None) -> list[Message]:
        """What a model was told and said before a turn; each goes on with its own answers."""
        before = self.turns[:turn]
        return [
            message
            for past in before
            for message in (Message("user", past.text), Message("assistant", past.answers[side]))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An answer as a page names it: the chat that it shows, the turn, and whose answer."""

    chat: str
    turn: int
    side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A line of data that says what somebody thinks of answers; `words` say so below the turn."""

    file: str
    row: Mapping[str, Any]
    words: str

    @property
    def line(self) -> str:
        return json.dumps(self.row, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model of the chat: how to reach it, or why that is not possible (yet)."""

    name: str
    model: ChatModel | None
    state: Literal["ready", "loading", "failed"]
    trouble: str = ""


@dataclass(slots=True)
class ChatRoom:
    studio: Studio
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def chat(self) -> Chat | None:
        try:
            values: Any = json.loads(self._file.read_bytes())
            turns = [
                Turn(text=turn["text"], answers=tuple(turn["answers"]), sent=tuple(turn["sent"]))
                for turn in values["turns"]
            ]
            return Chat(models=tuple(values["models"]), id=str(values.get("id", "")), turns=tuple(turns))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def open(self, names: Sequence[str]) -> Chat:
        """A new chat with these models, which are loaded; models of the one before are let go."""
        chosen = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
        if not 1 <= len(chosen) <= 2:
            raise DataError("choose one model, or two different ones")
        for name in chosen:
            if problem := self.problem_of(name):
                raise DataError(problem)
        with self._lock:
            for job in self.studio.jobs.running("serve"):
                if job.subject not in chosen:
                    self.studio.jobs.end_now(job.id)
            chat = Chat(models=chosen, id=secrets.token_hex(8))
            self._write(chat)
            for name in chosen:
                self._load(name)
        return chat

    def close(self) -> None:
        """End the chat, and the processes of its models."""
        with self._lock:
            for job in self.studio.jobs.running("serve"):
                self.studio.jobs.end_now(job.id)
            self._file.unlink(missing_ok=True)

    def problem_of(self, name: str) -> str | None:
        """Why there is no model of that name to talk with; None where there may be one."""
        aliases = [alias for alias, _ in self.studio.services.models()]
        if name in aliases:
            return None
        if problem := self.studio.project.escape_of(name):
            return problem
        if name.startswith("-"):
            return f"{quoted(name)} is no name of a model"
        if not (self.studio.project.folder / name).is_dir() and "/" not in name:
            return f"{quoted(name)} is no built-in model, no folder of the project, and no hub id OWNER/NAME"
        return None

    def servings(self, chat: Chat) -> list[Serving]:
        """How far each model of the chat is; one whose process is gone is loaded again when it is asked."""
        return [self._serving(name) for name in chat.models]

    def say(self, text: str, *, chat_id: str, turns: int) -> Chat:
        """Ask all models, at the same time, as the next turn of the chat that the page shows."""
        words = text.strip()
        if not words or len(words) > LONGEST:
            raise DataError(f"write something, at most {LONGEST:,} characters")
        chat = self._shown(chat_id, turns)
        ready = [serving.model for serving in self.servings(chat)]
        models = [model for model in ready if model is not None]
        if len(models) < len(chat.models):
            raise DataError("the models are not loaded yet; wait a moment")
        asked = [(model, (*chat.messages(side), Message("user", words))) for side, model in enumerate(models)]
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            answers = tuple(pool.map(lambda pair: pair[0].answer(pair[1]), asked))
        with self._lock:
            chat = self._shown(chat_id, turns)  # another tab may have gone on while the models answered
            chat = replace(chat, turns=(*chat.turns, Turn(text=words, answers=answers)))
            self._write(chat)
        return chat

    def thumb(self, place: Place, *, is_good: bool) -> Chat:
        """An answer as data: liked or not. A changed mind takes the place of the verdict before."""
        chat, prompt, answer = self._answer(place)
        _refuse_empty(answer)
        verdicts = {
            label: Verdict(
                file=THUMBS,
                row={"prompt": prompt, "completion": answer, "label": label, "model": chat.models[place.side]},
                words=f"{'liked' if label else 'disliked'} {chat.models[place.side]} → {THUMBS}",
            )
            for label in (True, False)
        }
        return self._judged(place, verdicts[is_good], instead_of=verdicts[not is_good])

    def prefer(self, place: Place) -> Chat:
        """Two answers as data: one is better. Both models must have been told the same before."""
        chat, prompt, chosen = self._answer(place)
        other = replace(place, side=1 - place.side)
        if len(chat.models) < 2 or prompt != self._answer(other)[1]:
            raise DataError("the models were told different things before this turn, so these are no pair")
        rejected = self._answer(other)[2]
        if rejected == chosen:
            raise DataError("both answers are the same; there is nothing to prefer")
        _refuse_empty(chosen, rejected)
        better, worse = (
            Verdict(
                file=PAIRS,
                row={"prompt": prompt, "chosen": ours, "rejected": theirs},
                words=f"{chat.models[side]} is better → {PAIRS}",
            )
            for ours, theirs, side in ((chosen, rejected, place.side), (rejected, chosen, other.side))
        )
        return self._judged(place, better, instead_of=worse)

    def badcase(self, place: Place, *, why: str, check: Any, value: str) -> Chat:
        """An answer that no model may give again."""
        chat, prompt, answer = self._answer(place)
        bad = BadAnswer(prompt=prompt, answer=answer, model=chat.models[place.side], why=why, check=check, value=value)
        self.studio.project.inside("badcases")
        case = self.studio.services.add_badcase(bad)
        return self._sent(place, f"badcase {case}, which every gate replays")

    def ask(self, place: Place) -> Chat:
        """People are asked which answer is better; where the two are no pair, whether this one is good."""
        chat, prompt, answer = self._answer(place)
        turn, side = chat.turns[place.turn], place.side
        others = [other for other in range(len(chat.models)) if other != side]
        pair = [
            other
            for other in others
            if prompt == self._answer(replace(place, side=other))[1] and answer != turn.answers[other]
        ]
        answers = {chat.models[number]: turn.answers[number] for number in (side, *pair)}
        self.studio.project.inside("labels.db")
        project = self.studio.services.ask_people(Question(prompt=prompt, answers=answers))
        what = "which answer is better" if pair else f"whether the answer of {chat.models[side]} is good"
        return self._sent(place, f"people are asked {what}: project {project} of labels.db")

    def _answer(self, place: Place) -> tuple[Chat, list[dict[str, str]], str]:
        chat, turn, side = self._shown(place.chat), place.turn, place.side
        if not (0 <= turn < len(chat.turns) and 0 <= side < len(chat.models)):
            raise DataError("there is no such answer in this chat; load the page again")
        messages = [*chat.messages(side, turn), Message("user", chat.turns[turn].text)]
        prompt = [{"role": message.role, "content": message.content} for message in messages]
        return chat, prompt, chat.turns[turn].answers[side]

    def _judged(self, place: Place, verdict: Verdict, *, instead_of: Verdict) -> Chat:
        """Write a verdict once, and take back the one that says the opposite."""
        with self._lock:
            sent = self._shown(place.chat).turns[place.turn].sent
            if verdict.words not in sent:
                file = self.studio.project.inside(verdict.file)
                if instead_of.words in sent:
                    _take_back(file, instead_of.line)
                append_line(file, verdict.line)
            return self._sent(place, verdict.words, instead_of=instead_of.words)

    def _sent(self, place: Place, words: str, *, instead_of: str = "") -> Chat:
        """Remember with a turn where answers of it have gone."""
        with self._lock:
            chat = self._shown(place.chat)
            before = chat.turns[place.turn]
            if words in before.sent:
                return chat
            sent = (*(past for past in before.sent if past != instead_of), words)
            turns = list(chat.turns)
            turns[place.turn] = replace(before, sent=sent)
            chat = replace(chat, turns=tuple(turns))
            self._write(chat)
            return chat

    def _shown(self, identity: str, turns: int | None = None) -> Chat:
        """The chat that a page shows; refused where another tab has begun a new one, or gone on with it."""
        chat = self._there()
        if chat.id != identity or turns not in (None, len(chat.turns)):
            raise Outdated("the chat has gone on in another tab, and nothing was kept of this; load the page again")
        return chat

    def _there(self) -> Chat:
        chat = self.chat()
        if chat is None:
            raise DataError("there is no chat; choose models first")
        return chat

    def _serving(self, name: str) -> Serving:
        job = next((job for job in self.studio.jobs.all("serve") if job.subject == name), None)
        if job is None or (not job.is_alive and job.code in (None, 0, -15)):
            return Serving(name=name, model=None, state="failed", trouble="it is not loaded; open the chat again")
        written, _ = self.studio.jobs.log(job)
        if not job.is_alive:
            lines = [line for line in written.splitlines() if line.strip()][-_LAST_LINES:]
            return Serving(name=name, model=None, state="failed", trouble=one_line(" ".join(lines), 600))
        address = _ADDRESS.search(written)
        if address is None:
            return Serving(name=name, model=None, state="loading")
        key = self._token_file(name).read_text(encoding="utf-8").strip()
        return Serving(name=name, model=ChatModel(name=name, url=address[1], key=key, max_tokens=None), state="ready")

    def _load(self, name: str) -> Job | None:
        if any(job.subject == name for job in self.studio.jobs.running("serve")):
            return None
        token = self._token_file(name)
        command = self.studio.services.serve_command(name, token)
        try:
            # Models that were let go may take a moment to end.
            return self.studio.jobs.start("serve", command, subject=name, name=name, at_once=4)
        except ConfigError as error:
            raise DataError(f"{error}") from error

    def _token_file(self, name: str) -> Path:
        return self.studio.jobs.folder / f"{hash_bytes(name.encode())}.token"

    @property
    def _file(self) -> Path:
        return self.studio.project.state / "chat.json"

    def _write(self, chat: Chat) -> None:
        turns = [{"text": turn.text, "answers": list(turn.answers), "sent": list(turn.sent)} for turn in chat.turns]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"id": chat.id, "models": list(chat.models), "turns": turns})


def _refuse_empty(*answers: str) -> None:
    if not all(answer.strip() for answer in answers):
        raise DataError("an answer is empty, and nothing can be learnt from that")


def _take_back(file: Path, line: str) -> None:
    """Leave out the newest line that reads so; all others stay as they are."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    if line in lines:
        del lines[len(lines) - 1 - lines[::-1].index(line)]
        with atomic_open(file) as target:
            target.write("\n".join(lines).encode(errors="surrogateescape"))
