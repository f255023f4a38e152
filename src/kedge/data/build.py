"""From the fields of one row to one example, once the format of its file is known (`kedge.data.formats`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.data.examples import Demonstration, Message, Messages, Origin, Pair, Prompt, Ranking, Thumb
from kedge.data.foreign.labels import finite, label_of
from kedge.data.messages import (
    ROLES,
    as_messages,
    is_conversation,
    is_transcript,
    shown,
    split_common_prompt,
    transcript_prompt,
    transcript_turns,
    with_tools,
    without_prompt,
)

# Read where they are present, whatever the format.
OPTIONAL = frozenset(
    {"system", "system_prompt", "history", "tools", "input", "context", "margin", "certainty", "answer", "extra"}
)
MOST_ANSWERS = 256
"""In one row: every two answers of it may become a pair."""
_RENDERED = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<content>.*?)<\|im_end\|>", re.S),
    re.compile(
        r"### ?(?P<role>Human|User|Assistant|System): ?(?P<content>.*?)(?=\n?### ?(?:Human|User|Assistant|System):|\Z)",
        re.S,
    ),
)
"""Conversations that were written out as text: ChatML, and `### Human: … ### Assistant: …`."""


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
    return _with_context(messages, fields)


def _with_context(messages: Messages, fields: Fields) -> Messages:
    """The messages after the earlier turns in `history`, the text of `system` or `system_prompt`, and the `tools`."""
    messages = (*_history(fields), *messages)
    if messages[0].role not in ("system", "developer"):
        system = fields.optional_text("system") or fields.optional_text("system_prompt")
        messages = (Message("system", system), *messages) if system else messages
    tools = fields.optional("tools")
    return messages if tools is None else with_tools(messages, tools)


def _history(fields: Fields) -> Messages:
    """Earlier turns (LLaMA-Factory's Alpaca): a list of [question, answer], or messages."""
    value = fields.optional("history")
    if not value:
        return ()
    if is_conversation(value):
        return as_messages(value, text_role="user", field="history")
    pairs: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(turn, list | tuple) and [type(text) for text in turn] == [str, str] for turn in pairs):
        raise DataError(f"field 'history' is {shown(value)}; it must be a list of [question, answer], or of messages")
    return tuple(Message(role, text) for turn in pairs for role, text in zip(("user", "assistant"), turn, strict=True))


def _answer_or_conversation(value: Any, fields: Fields, field: str) -> Messages:
    """The messages of an answer as the row gives it: bare, or a whole conversation that starts with the prompt."""
    if isinstance(value, str) and is_transcript(fields["prompt"]):
        return transcript_turns(value) if is_transcript(value) else (Message("assistant", value.strip()),)
    return as_messages(value, text_role="assistant", field=field)


def _answer(fields: Fields, part: str, prompt: Messages) -> Messages:
    name = fields.name(part)
    return without_prompt(prompt, _answer_or_conversation(fields[part], fields, name), field=name)


def _margin(fields: Fields) -> float | None:
    value = fields.optional("margin")
    return None if value is None else float(finite(value, "margin"))


def _certainty(fields: Fields) -> float | None:
    value = fields.optional("certainty")
    if value is not None and not 0 <= finite(value, "certainty") <= 1:
        raise DataError(
            f"'certainty' is {shown(value)}; it is the probability that 'chosen' is the better answer, from 0 to 1"
        )
    return None if value is None else float(value)


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
        certainty=_certainty(fields),
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
        prompt=_with_context(prompt, fields),
        chosen=chosen,
        rejected=rejected,
        margin=_margin(fields),
        certainty=_certainty(fields),
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
    if len(fields["answers"]) > MOST_ANSWERS:
        raise DataError(f"'{name}' has {len(fields['answers']):,} answers; one row may have {MOST_ANSWERS}")
    named = ((f"{name}[{index}]", value) for index, value in enumerate(fields["answers"]))
    answers = tuple(
        without_prompt(prompt, _answer_or_conversation(value, fields, field), field=field) for field, value in named
    )
    part = "rank" if fields.has("rank") else "scores"
    numbers = [finite(value, f"{fields.name(part)}[{index}]") for index, value in enumerate(fields[part])]
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
    is_good = label_of(fields["label"])
    assert is_good is not None  # the format's need of a label
    return Thumb(prompt=prompt, answer=answer, is_good=is_good, origin=fields.origin, extra=fields.extra())


def _dialogue(fields: Fields) -> Messages:
    messages = as_messages(fields["messages"], text_role="user", field=fields.name("messages"))
    if len(messages) < 2:
        raise DataError(f"'{fields.name('messages')}' holds one message; there must be a prompt before the answer")
    return _with_context(messages, fields)


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


def document(fields: Fields) -> Demonstration:
    """A `text` (TRL): a conversation where it was written out as one, else plain text, learnt as a whole."""
    text = fields["text"]
    messages = transcript_turns(text) if is_transcript(text) else _written_out(text)
    messages = messages or (Message("text", text),)
    if messages[-1].role not in ("assistant", "text"):
        raise DataError(f"'text' is a conversation that ends with a {messages[-1].role} message, not the assistant's")
    return Demonstration(messages=messages, origin=fields.origin, extra=fields.extra())


def _written_out(text: str) -> Messages:
    """The turns of a text that consists of turns and nothing else; none where it is anything else."""
    for pattern in _RENDERED:
        turns = list(pattern.finditer(text))
        is_known = all(turn["role"].lower() in ROLES for turn in turns)
        if len(turns) > 1 and is_known and not pattern.sub("", text).strip():
            return tuple(Message(ROLES[turn["role"].lower()], turn["content"].strip()) for turn in turns)
    return ()


def prompt(fields: Fields) -> Prompt:
    if fields.has("messages"):
        messages = _with_context(
            as_messages(fields["messages"], text_role="user", field=fields.name("messages")), fields
        )
    else:
        messages = prompt_messages(fields)
    answer = fields.optional("answer")
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise DataError(f"field 'answer' is {shown(answer)}; a checkable answer must be text or a number")
    text = None if answer is None else str(answer)
    return Prompt(prompt=messages, answer=text, origin=fields.origin, extra=fields.extra())
