r"""One value of a row into messages: text, a message, a conversation, a transcript; and the prompt that two share.

Of a message role and text are kept, tool calls and what belongs to them, and whether it is trained (OpenAI's `weight`).
Parts that are not text are refused, not dropped. Transcripts
are those of HH-RLHF (`\n\nHuman: …\n\nAssistant: …`): space around a turn is layout and is dropped, and a turn that
quotes a marker at the start of a paragraph cannot be told from two turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.core.suggest import did_you_mean
from kedge.data.examples import Message, Messages, Role

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_CALL_ROLE = "function_call"  # LLaMA-Factory's turn that is nothing but a call
_DETAIL_KEYS = ("name", "tool_call_id", "reasoning_content", "tools")
_TRAINED_KEYS = ("weight", "loss", "train")
_TRANSCRIPT_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_TRANSCRIPT_OPENING = re.compile(r"\A\s*Human:")
_TRANSCRIPT_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


def shown(value: Any, limit: int = 60) -> str:
    """A value as it looks in a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and any(key in value for key in _ROLE_KEYS)


def is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_message(item) for item in cast(list[Any], value))


def is_text_or_messages(value: Any) -> bool:
    return isinstance(value, str) or is_message(value) or is_conversation(value)


def as_messages(value: Any, *, text_role: Role, field: str) -> Messages:
    """Text becomes one message of `text_role`; a mapping is one message; a list is a conversation.

    >>> as_messages("hi", text_role="user", field="prompt")
    (Message(role='user', content='hi'),)
    >>> as_messages([{"from": "gpt", "value": "hello"}], text_role="user", field="conversations")
    (Message(role='assistant', content='hello'),)
    """
    if isinstance(value, str):
        return (Message(text_role, value),)
    if is_message(value):
        return (_message(value, field),)
    if isinstance(value, list) and value:
        items = cast(list[Any], value)
        return tuple(_message(item, f"{field}[{index}]") for index, item in enumerate(items))
    raise DataError(f"field '{field}' is {shown(value)}; it must be text or a non-empty list of messages")


def _message(value: Any, field: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"'{field}' is {shown(value)}; it must be a message with 'role' and 'content'")
    message = cast(Mapping[str, Any], value)
    role_name = next((message[key] for key in _ROLE_KEYS if key in message), None)
    if role_name == _CALL_ROLE:
        return Message("assistant", "", detail={"tool_calls": _calls([_content(message, field)], field)})
    detail = {key: message[key] for key in _DETAIL_KEYS if message.get(key) is not None}
    raw_calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    if raw_calls:
        detail["tool_calls"] = _calls(raw_calls, field)
    role = _role(message, field)
    content = _content(message, field) if not raw_calls or _has_content(message) else ""
    return Message(role, content, is_trained=_is_trained(message, field), detail=detail or None)


def _has_content(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) is not None for key in _CONTENT_KEYS)


def _is_trained(message: Mapping[str, Any], field: str) -> bool:
    """OpenAI's `weight` (0 or 1), or `loss` or `train` as true or false."""
    key = next((key for key in _TRAINED_KEYS if message.get(key) is not None), None)
    if key is None:
        return True
    if message[key] not in (0, 1):  # True and False are 1 and 0
        raise DataError(f"'{field}.{key}' is {shown(message[key])}; a message is trained on (1) or not (0)")
    return bool(message[key])


def _calls(values: Any, field: str) -> list[dict[str, Any]]:
    """Calls as chat templates want them: `{"type": "function", "function": {"name", "arguments"}}`, no JSON in text."""
    if not isinstance(values, list):
        raise DataError(f"'{field}.tool_calls' is {shown(values)}; it must be a list of calls")
    return [_call(value, f"{field}.tool_calls[{index}]") for index, value in enumerate(cast(list[Any], values))]


def _call(value: Any, field: str) -> dict[str, Any]:
    call = _from_json(value)
    function = _from_json(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"'{field}' is {shown(value)}; a call has a function with a name and arguments")
    arguments = _from_json(function.get("arguments", {}))
    rest = {key: item for key, item in cast(dict[str, Any], call).items() if key == "id"}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _from_json(value: Any) -> Any:
    """JSON in text as what it stands for; other values, and text that is no object or list, as they are."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict | list) else value


def with_tools(messages: Messages, tools: Any) -> Messages:
    """The conversation with the tools that its template is to show, as a list or as JSON in text."""
    tools = _from_json(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast(list[Any], tools)):
        raise DataError(f"field 'tools' is {shown(tools)}; it must be a list of tools (JSON schemas)")
    if not tools:
        return messages
    first = messages[0]
    return (replace(first, detail={**(first.detail or {}), "tools": tools}), *messages[1:])


def _role(message: Mapping[str, Any], field: str) -> Role:
    for key in _ROLE_KEYS:
        if key in message:
            name = message[key]
            role = ROLES.get(name.lower()) if isinstance(name, str) else None
            if role is None:
                hint = did_you_mean(name, ROLES) if isinstance(name, str) else ""
                raise DataError(f"'{field}.{key}' is {shown(name)}{hint}; known roles: {', '.join(ROLES)}")
            return role
    raise DataError(f"'{field}' has no 'role' (found: {', '.join(message) or 'nothing'})")


def _content(message: Mapping[str, Any], field: str) -> str:
    for key in _CONTENT_KEYS:
        if key in message:
            content = message[key]
            if isinstance(content, str):
                return content
            if isinstance(content, list):
                parts = cast(list[Any], content)
                return "".join(_part(part, f"{field}.{key}[{index}]") for index, part in enumerate(parts))
            raise DataError(f"'{field}.{key}' is {shown(content)}; it must be text or a list of text parts")
    raise DataError(f"'{field}' has no 'content' (found: {', '.join(map(str, message))})")


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        mapping = cast(Mapping[str, Any], part)
        if mapping.get("type", "text") == "text" and isinstance(mapping.get("text"), str):
            return mapping["text"]
        raise DataError(f"'{field}' is a part of type {shown(mapping.get('type'))}; only text parts can be read")
    raise DataError(f"'{field}' is {shown(part)}; it must be a text part")


def is_transcript(value: object) -> bool:
    return isinstance(value, str) and _TRANSCRIPT_OPENING.match(value) is not None and "\n\nAssistant:" in value


def transcript_turns(text: str) -> Messages:
    r"""
    >>> [message.role for message in transcript_turns("\n\nHuman: Hello\n\nAssistant: Hi!")]
    ['user', 'assistant']
    """
    marks = list(_TRANSCRIPT_MARKER.finditer(text))
    if not marks or marks[0].start() > 0:
        raise DataError("a transcript must start with 'Human:' or 'Assistant:'")
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return tuple(
        Message(_TRANSCRIPT_ROLES[mark[1]], text[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    )


def transcript_prompt(text: str) -> Messages:
    """The turns of a transcript that is a prompt: it may end with the bare `Assistant:` that asks for an answer."""
    turns = transcript_turns(text)
    return turns[:-1] if len(turns) > 1 and turns[-1] == Message("assistant", "") else turns


def same_turns(left: Sequence[Message], right: Sequence[Message]) -> bool:
    """Whether the messages are the same, role by role and text by text; space around a message does not count."""
    return len(left) == len(right) and all(
        a.role == b.role and a.content.strip() == b.content.strip() for a, b in zip(left, right, strict=True)
    )


def split_common_prompt(chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """Two whole conversations into their common prompt and the two answers.

    The answers start with the first message that differs, which must be the assistant's. Where one conversation
    begins the other, or both are the same, they start with the last message they share: an answer is never empty.
    """
    shorter = min(len(chosen), len(rejected))
    shared = 0
    while shared < shorter and same_turns(chosen[shared : shared + 1], rejected[shared : shared + 1]):
        shared += 1
    shared = min(shared, shorter - 1)
    for name, conversation in (("chosen", chosen), ("rejected", rejected)):
        if conversation[shared].role != "assistant":
            raise DataError(
                f"the conversations part at message {shared + 1}, where '{name}' has a {conversation[shared].role} "
                "message; they must share the whole prompt and part at an assistant message"
            )
    if shared == 0:
        raise DataError("'chosen' and 'rejected' share no prompt: they differ from the first message on")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def without_prompt(prompt: Messages, conversation: Messages, *, field: str) -> Messages:
    """The answer in `conversation`, which either is the answer or starts with the whole prompt."""
    bare = prompt[1:] if prompt[0].role in ("system", "developer") else prompt
    for start in (prompt, bare):
        is_opening = len(start) > 1 or (len(start) == 1 and start[0].role != "assistant")
        if is_opening and len(conversation) > len(start) and same_turns(conversation[: len(start)], start):
            conversation = conversation[len(start) :]
            break
    if conversation[0].role != "assistant":
        raise DataError(f"'{field}' starts with a {conversation[0].role} message, which is not the prompt's")
    return conversation
