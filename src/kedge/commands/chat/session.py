"""A chat: its history and settings, turns with one model or two, commands that begin with a slash, verdicts.

Two models answer the same conversation, so that their answers can be compared; it goes on with the better answer, or
with the left one where nobody said which that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from pydantic import ValidationError

from kedge.commands.chat.model import ChatModel, Reply
from kedge.commands.chat.verdicts import VerdictFile, conversation_row, pair_row, thumb_row
from kedge.core.errors import ConfigError
from kedge.core.files import refuse_overwriting
from kedge.core.seeds import seed_for
from kedge.core.suggest import did_you_mean
from kedge.data.examples import Message, Messages
from kedge.data.writing import WRITABLE, row_writer
from kedge.rollout.settings import SamplingSettings

Show = Callable[[int, str], None]
"""Is called with the number of a model and all of its answer so far; from a thread a model."""

_ONE = {"/good": "the answer was good", "/bad": "the answer was bad"}
_TWO = {"/left": "the left answer is better", "/right": "the right one is", "/tie": "neither is"}
_ALWAYS = {
    "/again": "another answer to the same question",
    "/reset": "begin anew; the system message stays",
    "/system TEXT": "set the system message, or without a text remove it, and begin anew",
    "/temperature X": "how freely answers are drawn; 0 always takes the likeliest token",
    "/save FILE": "write the conversation as a demonstration (.jsonl)",
    "/help": "this",
    "/quit": "end the chat; so does Ctrl-D",
}
GREEDY = 0.0


@dataclass(slots=True, kw_only=True)
class Turn:
    """A question and its answers, one a model."""

    prompt: Messages
    replies: Sequence[Reply]
    seed: int
    better: int | None = None
    is_judged: bool = False


@dataclass(slots=True, kw_only=True)
class Session:
    """`verdicts` is where thumbs or pairs are written."""

    models: Sequence[ChatModel]
    verdicts: VerdictFile
    sampling: SamplingSettings
    seed: int = 0
    system: str = ""
    turns: list[Turn] = field(default_factory=list[Turn])
    _asked: int = 0

    @property
    def history(self) -> Messages:
        """The conversation so far, with the answers that it goes on with."""
        if not self.turns:
            return (Message("system", self.system),) if self.system else ()
        last = self.turns[-1]
        return (*last.prompt, Message("assistant", last.replies[last.better or 0].text))

    def ask(self, text: str, show: Show, stop: Event) -> Turn:
        """A turn: every model answers, at the same time. `stop` ends answers where they are."""
        return self._answered((*self.history, Message("user", text)), show, stop)

    def again(self, show: Show, stop: Event) -> Turn:
        """The last question answered anew."""
        if not self.turns:
            raise ConfigError("/again: nothing was asked yet")
        turn = self._answered(self.turns[-1].prompt, show, stop)
        del self.turns[-2]
        return turn

    def _answered(self, prompt: Messages, show: Show, stop: Event) -> Turn:
        self._asked += 1
        seed = seed_for(self.seed, f"chat-{self._asked}")

        def reply(number: int) -> Reply:
            model = self.models[number]
            # Each draws for itself: the same model twice is a way to have two answers to compare.
            own = seed_for(seed, str(number))
            return model.reply(prompt, self.sampling, seed=own, show=lambda text: show(number, text), stop=stop)

        with ThreadPoolExecutor(len(self.models)) as pool:
            futures = [pool.submit(reply, number) for number in range(len(self.models))]
            while not all(future.done() for future in futures):
                try:
                    for future in futures:
                        future.exception()
                except KeyboardInterrupt:
                    stop.set()
        turn = Turn(prompt=prompt, replies=[future.result() for future in futures], seed=seed)
        self.turns.append(turn)
        return turn

    def command(self, line: str) -> str:
        """What a line that begins with a slash does, other than asking; returns what to tell."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name in (*_ONE, *_TWO):
            return self._judge(name)
        if name == "/reset":
            self.turns.clear()
            return "a new conversation"
        if name == "/system":
            self.system = argument
            self.turns.clear()
            return "a new conversation " + ("with this system message" if argument else "without a system message")
        if name == "/temperature":
            return self._set_temperature(argument)
        if name == "/save":
            return self._save(argument)
        if name == "/help":
            return self.help()
        raise ConfigError(f"{name}: no command of a chat{did_you_mean(name, self._names())}; /help lists them")

    def help(self) -> str:
        commands = {**(_ONE if len(self.models) == 1 else _TWO), **_ALWAYS}
        width = max(map(len, commands))
        return "\n".join(f"{name:<{width}}  {meaning}" for name, meaning in commands.items())

    def _names(self) -> list[str]:
        return [name.partition(" ")[0] for name in (*_ONE, *_TWO, *_ALWAYS)]

    def _judge(self, name: str) -> str:
        fitting = _ONE if len(self.models) == 1 else _TWO
        if name not in fitting:
            raise ConfigError(f"{name}: with {len(self.models)} model(s) verdicts are {', '.join(fitting)}")
        if not self.turns:
            raise ConfigError(f"{name}: nothing was answered yet")
        turn = self.turns[-1]
        if turn.is_judged:
            raise ConfigError(f"{name}: this answer has its verdict already; /again asks for another one")
        if any(reply.is_stopped for reply in turn.replies):
            raise ConfigError(
                f"{name}: the answer was stopped, and half an answer is not judged; /again asks once more"
            )
        texts = [reply.text for reply in turn.replies]
        if len(texts) == 2 and texts[0] == texts[1]:
            raise ConfigError(f"{name}: both answers are the same, which says nothing of either")
        if not all(text.strip() for text in texts):
            raise ConfigError(f"{name}: an answer is empty, and nothing can be learnt from that")
        turn.better = {"/left": 0, "/right": 1}.get(name)
        facts = self._facts(turn)
        if len(texts) == 1:
            row = thumb_row(turn.prompt, texts[0], is_good=name == "/good", facts=facts)
        else:
            row = pair_row(turn.prompt, (texts[0], texts[1]), better=turn.better, facts=facts)
        self.verdicts.add(row)
        turn.is_judged = True
        return f"written to {self.verdicts.path} ({self.verdicts.count} in this chat)"

    def _facts(self, turn: Turn) -> Mapping[str, Any]:
        """What is kept with a verdict: who answered, the chosen one first, and how."""
        names = [model.name for model in self.models]
        return {
            "source": "kedge chat",
            "models": names if turn.better != 1 else names[::-1],
            "temperature": self.sampling.temperature if self.sampling.top_k != 1 else GREEDY,
            "seed": turn.seed,
        }

    def _set_temperature(self, argument: str) -> str:
        self.sampling = with_temperature(self.sampling, argument)
        return f"temperature {argument}"

    def _save(self, argument: str) -> str:
        if not argument:
            raise ConfigError("/save FILE: give the name of a file that ends in .jsonl")
        if not self.turns:
            raise ConfigError("/save: nothing was said yet")
        path = Path(argument).expanduser()
        if not path.name.endswith(WRITABLE):
            raise ConfigError(f"/save {path}: the name must end in {', '.join(WRITABLE)}")
        refuse_overwriting([path], inputs=[self.verdicts.path])
        with row_writer(path) as write:
            write(conversation_row(self.history, {"models": [model.name for model in self.models]}))
        return f"the conversation is in {path}"


def with_temperature(sampling: SamplingSettings, text: str) -> SamplingSettings:
    """The settings at another temperature; 0 always takes the likeliest token."""
    try:
        value = float(text)
        changes = {"top_k": 1, "temperature": 1.0} if value == GREEDY else {"top_k": None, "temperature": value}
        return SamplingSettings.model_validate({**sampling.model_dump(), **changes})
    except (ValueError, ValidationError) as error:
        raise ConfigError(f"temperature: found {text!r}, expected a number from 0 up, such as 0.7") from error
