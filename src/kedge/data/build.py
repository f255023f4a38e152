"""From the fields of one row to one example, once the format of its file is known (`kedge.data.formats`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.data.examples import Demonstration, Message, Messages, Origin, Pair, Prompt, Ranking, Thumb
from kedge.data.messages import (
    as_messages,
    is_transcript,
    shown,
    split_common_prompt,
    transcript_prompt,
    transcript_turns,
    without_prompt,
)

LABELS: Mapping[Any, bool] = {True: True, False: False, "up": True, "down": False}  # 1 == True and 0 == False


# Read where they are present, whatever the format.
OPTIONAL = frozenset({"system", "input", "context", "margin", "answer", "extra"})


class Fields:
    """The fields of a row, by the part they play. It notes which were read, so that the rest goes into `extra`."""

    def __init__(self, fields: Mapping[str, Any], columns: Mapping[str, str], origin: Origin) -> None:
        self._fields = fields
        self._columns = columns
        self._read = set(columns.values())
        self.origin = origin

    def has(self, part: str) -> bool:
        return part in self._columns

    def name(self, part: str) -> str:
        return self._columns[part]

    def __getitem__(self, part: str) -> Any:
        return self._fields[self._columns[part]]

    def optional(self, name: str) -> Any:
        """The value of a field that is read under one name only; None where it is absent."""
        value = self._fields.get(name)
        if value is not None and name not in self._columns.values():
            self._read.add(name)
            return value
        return None

    def optional_text(self, name: str) -> str:
        """The text of a field that is not blank, else ""; any other value stays in `extra`."""
        value = self._fields.get(name)
        return self.optional(name) or "" if isinstance(value, str) and value.strip() else ""

    def extra(self) -> dict[str, Any]:
        """The fields that were not read. An `extra` that a conversion wrote is unpacked, unless it has a name twice."""
        rest = {name: value for name, value in self._fields.items() if name not in self._read}
        nested = rest.get("extra")
        if isinstance(nested, dict) and nested:
            unpacked = cast(dict[str, Any], nested)
            outer = {name: value for name, value in rest.items() if name != "extra"}
            if not outer.keys() & unpacked.keys():
                return outer | unpacked
        return rest


def prompt_messages(fields: Fields) -> Messages:
    """The prompt with its `system` text; an `instruction` with its `input` (Alpaca) or `context` (Dolly)."""
    value = fields["prompt"]
    if is_transcript(value):
        messages = transcript_prompt(value)
    else:
        if fields.name("prompt") == "instruction" and isinstance(value, str):
            context = fields.optional_text("input") or fields.optional_text("context")
            value = f"{value}\n\n{context}" if context else value
        messages = as_messages(value, text_role="user", field=fields.name("prompt"))
    return _with_system(messages, fields)


def _with_system(messages: Messages, fields: Fields) -> Messages:
    if messages[0].role == "system":
        return messages
    system = fields.optional_text("system")
    return (Message("system", system), *messages) if system else messages


def _answer_or_conversation(value: Any, fields: Fields, field: str) -> Messages:
    """The messages of an answer as the row gives it: bare, or a whole conversation that starts with the prompt."""
    if isinstance(value, str) and is_transcript(fields["prompt"]):
        return transcript_turns(value) if is_transcript(value) else (Message("assistant", value.strip()),)
    return as_messages(value, text_role="assistant", field=field)


def _answer(fields: Fields, part: str, prompt: Messages) -> Messages:
    name = fields.name(part)
    return without_prompt(prompt, _answer_or_conversation(fields[part], fields, name), field=name)


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"'{field}' is {shown(value)}; it must be a finite number")
    return value


def _margin(fields: Fields) -> float | None:
    value = fields.optional("margin")
    return None if value is None else float(_number(value, "margin"))


def pair(fields: Fields) -> Pair:
    prompt = prompt_messages(fields)
    chosen, rejected = (
        _answer_or_conversation(fields[part], fields, fields.name(part)) for part in ("chosen", "rejected")
    )
    if prompt[0].role != "system" and chosen[0].role == "system" and chosen[0] == rejected[0]:
        prompt = (chosen[0], *prompt)  # the system message stands only in the whole conversations
    return Pair(
        prompt=prompt,
        chosen=without_prompt(prompt, chosen, field="chosen"),
        rejected=without_prompt(prompt, rejected, field="rejected"),
        margin=_margin(fields),
        origin=fields.origin,
        extra=fields.extra(),
    )


def _conversation(fields: Fields, part: str) -> Messages:
    value = fields[part]
    if is_transcript(value):
        return transcript_turns(value)
    return as_messages(value, text_role="assistant", field=fields.name(part))


def conversation_pair(fields: Fields) -> Pair:
    """A pair of two whole conversations: the prompt is what they have in common."""
    prompt, chosen, rejected = split_common_prompt(_conversation(fields, "chosen"), _conversation(fields, "rejected"))
    return Pair(
        prompt=_with_system(prompt, fields),
        chosen=chosen,
        rejected=rejected,
        margin=_margin(fields),
        origin=fields.origin,
        extra=fields.extra(),
    )


def dense_ranks(numbers: list[float]) -> tuple[int, ...]:
    """Places from 1 without gaps, the smallest number first, equal numbers together.

    >>> dense_ranks([3, 1, 1, 7])
    (2, 1, 1, 3)
    """
    places = {number: place for place, number in enumerate(sorted(set(numbers)), start=1)}
    return tuple(places[number] for number in numbers)


def ranking(fields: Fields) -> Ranking:
    prompt = prompt_messages(fields)
    name = fields.name("answers")
    named = ((f"{name}[{index}]", value) for index, value in enumerate(fields["answers"]))
    answers = tuple(
        without_prompt(prompt, _answer_or_conversation(value, fields, field), field=field) for field, value in named
    )
    part = "rank" if fields.has("rank") else "scores"
    numbers = [_number(value, f"{fields.name(part)}[{index}]") for index, value in enumerate(fields[part])]
    if len(answers) < 2 or len(answers) != len(numbers):
        raise DataError(
            f"'{name}' has {len(answers)} answers and '{fields.name(part)}' {len(numbers)} numbers; "
            "there must be at least two answers, and a number for each"
        )
    if part == "rank" and min(numbers) < 1:
        raise DataError(f"'{fields.name(part)}' has the place {shown(min(numbers))}; places count from 1, the best")
    rank = dense_ranks(numbers if part == "rank" else [-number for number in numbers])
    return Ranking(prompt=prompt, answers=answers, rank=rank, origin=fields.origin, extra=fields.extra())


def thumb(fields: Fields) -> Thumb:
    if fields.has("messages"):
        messages = _dialogue(fields)
        prompt, answer = messages[:-1], messages[-1:]
    else:
        prompt = prompt_messages(fields)
        answer = _answer(fields, "completion", prompt)
    is_good = LABELS[fields["label"]]
    return Thumb(prompt=prompt, answer=answer, is_good=is_good, origin=fields.origin, extra=fields.extra())


def _dialogue(fields: Fields) -> Messages:
    messages = as_messages(fields["messages"], text_role="user", field=fields.name("messages"))
    if len(messages) < 2:
        raise DataError(f"'{fields.name('messages')}' holds one message; there must be a prompt before the answer")
    return _with_system(messages, fields)


def demonstration(fields: Fields) -> Demonstration:
    if fields.has("messages"):
        messages = _dialogue(fields)
    else:
        prompt = prompt_messages(fields)
        messages = prompt + _answer(fields, "completion", prompt)
        if messages[-1].role != "assistant":
            raise DataError(
                f"'{fields.name('completion')}' ends with a {messages[-1].role} message, not the assistant's"
            )
    return Demonstration(messages=messages, origin=fields.origin, extra=fields.extra())


def prompt(fields: Fields) -> Prompt:
    if fields.has("messages"):
        messages = _with_system(
            as_messages(fields["messages"], text_role="user", field=fields.name("messages")), fields
        )
    else:
        messages = prompt_messages(fields)
    answer = fields.optional("answer")
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise DataError(f"field 'answer' is {shown(answer)}; a checkable answer must be text or a number")
    text = None if answer is None else str(answer)
    return Prompt(prompt=messages, answer=text, origin=fields.origin, extra=fields.extra())
