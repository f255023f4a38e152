"""From messages to tokens, with a mask on the assistant's: every assistant turn, with its end-of-turn token.

The mask comes from the template's own `{% generation %}` marks, or else from rendering every prefix of the
conversation and checking that each is a prefix of the whole. The whole text is tokenised once, never in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError
from rich.text import Text

from kedge.core.chatml import CHATML
from kedge.core.errors import DataError, ModelError
from kedge.core.files import hash_json
from kedge.core.suggest import did_you_mean
from kedge.data.encoding.pieces import Mask, TextTokenizer, TokenisedText, Tokens
from kedge.data.examples import Message, Messages
from kedge.data.tokenizer import Span, render_template, special_ids, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (  # the role ends in a new line, not in a space: a space would melt into the first word of the answer
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ':\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "plain": PLAIN}
_EXCERPT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """`assistant_mask[t]` is True where token t is the assistant's: what is trained."""

    tokens: list[int]
    assistant_mask: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedArrays:
    """The same as arrays, as they are written to a table."""

    tokens: Tokens
    assistant_mask: Mask


def apply_template(tokenizer: PreTrainedTokenizerBase, name_or_path: str) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` that speaks a built-in template (`chatml`, `plain`) or the Jinja file at a path."""
    path = Path(name_or_path)
    if name_or_path not in TEMPLATES and not path.is_file():
        raise ModelError(
            f"chat_template: '{name_or_path}' is neither a built-in template{did_you_mean(name_or_path, TEMPLATES)} "
            f"({', '.join(TEMPLATES)}) nor a file"
        )
    template = TEMPLATES.get(name_or_path) or path.read_text(encoding="utf-8")
    if name_or_path == "chatml" and not {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        raise ModelError(
            "chat_template: chatml needs <|im_start|> and <|im_end|> as tokens of their own, and this tokenizer cuts "
            "them into pieces; use chat_template: plain, which ends a turn with the tokenizer's own end token"
        )
    if name_or_path == "plain" and tokenizer.eos_token is None:
        raise ModelError("chat_template: plain ends a turn with the end-of-text token, and this tokenizer has none")
    changed = deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ModelError(
            "this tokenizer has no chat template, so messages cannot be turned into text; set chat_template: chatml "
            "(or plain, or the path of a Jinja file) to the one that the model was trained with"
        )
    return tokenizer.get_chat_template()


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for two tokenizers that render the same text: what stages compare. Padding is never rendered."""
    named = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return hash_json([template_of(tokenizer), named])


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, add_generation_prompt: bool) -> str:
    return _render_marked(tokenizer, messages, add_generation_prompt=add_generation_prompt)[0]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Tokens up to where the answer starts, generation prompt included."""
    return tokens_of(tokenizer, render(tokenizer, messages, add_generation_prompt=True))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    trained_from: int = 0,
    tokenise: TextTokenizer | None = None,
) -> Encoded:
    """Tokens of a whole conversation, masked on its assistant turns; those before `trained_from`, and those that are
    not `is_trained`, are only context. Plain text is trained as a whole, with an end token.

    Raises where the template drops or changes a message, since training would then be on another text. `tokenise` is
    for many conversations in a row: it knows what the tokenizer said of earlier ones.
    """
    tokenise = TextTokenizer(tokenizer) if tokenise is None else tokenise
    (encoded,) = encode_conversations(tokenise, [(messages, trained_from)])
    return Encoded(tokens=encoded.tokens.tolist(), assistant_mask=encoded.assistant_mask.tolist())


def encode_conversations(
    tokenise: TextTokenizer, conversations: Sequence[tuple[Messages, int]]
) -> Iterator[EncodedArrays]:
    """Many conversations, each with the message that it is `trained_from`, as `encode_conversation` encodes one.

    An error comes in the place of the conversation that has it.
    """
    rendered: list[tuple[str, list[Span] | None]] = []
    problem: Exception | None = None
    for messages, _ in conversations:
        try:
            text, marks = _render_marked(tokenise.tokenizer, messages, add_generation_prompt=False)
            _check_contents(text, messages)
        except Exception as error:  # what is wrong with a conversation before it comes first
            problem = error
            break
        rendered.append((text, marks))
    texts = tokenise.many([text for text, _ in rendered])
    for (messages, trained_from), (text, marks), tokenised in zip(conversations, rendered, texts, strict=False):
        trained = _trained_spans(tokenise, messages, trained_from, text, marks, tokenised)
        # A token that starts before the turn is partly the prompt's, and the prompt is not trained.
        yield EncodedArrays(tokens=tokenised.tokens, assistant_mask=tokenised.mask(trained))
    if problem is not None:
        raise problem


def _trained_spans(
    tokenise: TextTokenizer,
    messages: Messages,
    trained_from: int,
    text: str,
    marks: list[Span] | None,
    tokenised: TokenisedText,
) -> list[Span]:
    if messages[0].role == "text":
        return [(0, len(text))]
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    learnt = [turn for turn in turns if turn >= trained_from and messages[turn].is_trained]
    if marks is not None:
        return _marks_of(marks, turns, learnt)
    stops = tokenised.places(tokenise.is_control)
    scaffold = _scaffold(tokenise, messages, text)
    return [_turn_span(tokenise.tokenizer, messages, turn, text, stops, scaffold) for turn in learnt]


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's end token, and the one that the template writes after a turn."""
    probe = encode_conversation(tokenizer, (Message("user", "Hi"), Message("assistant", "Yo")))
    trained = [token for token, on in zip(probe.tokens, probe.assistant_mask, strict=True) if on]
    ends = {token for token in trained[-1:] if token in special_ids(tokenizer)}
    eos = tokenizer.eos_token_id
    return frozenset(ends | {eos} if isinstance(eos, int) else ends)


def show_masks(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, *, in_colour: bool = True) -> Text:
    """The text with its trained tokens highlighted, or where there are no colours in ⟦brackets⟧. Runs are decoded
    whole, so that no character is cut."""
    shown = Text()
    pairs = zip(encoded.assistant_mask, encoded.tokens, strict=True)
    for is_trained, run in groupby(pairs, key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        bracketed = f"⟦{text}⟧" if is_trained and not in_colour else str(text)
        shown.append(bracketed, style="bold green" if is_trained else "dim")
    return shown


def _render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, add_generation_prompt: bool
) -> tuple[str, list[Span] | None]:
    if not messages:
        raise DataError("a conversation without messages cannot be rendered")
    if messages[0].role == "text":
        return _document(tokenizer, messages[0].content), None
    detail = {**(messages[0].detail or {})}
    tools = detail.pop("tools", None)
    details = [detail, *(message.detail or {} for message in messages[1:])]
    plain = [
        {"role": message.role, "content": message.content, **more}
        for message, more in zip(messages, details, strict=True)
    ]
    try:
        return render_template(
            tokenizer, template_of(tokenizer), plain, tools=tools, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message.role for message in messages)
        raise ModelError(f"the chat template cannot render a conversation with the roles {roles}: {error}") from error


def _document(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Plain text as a model reads it before any chat: between the tokenizer's own first and last token."""
    starts = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return f"{tokenizer.bos_token if starts else ''}{text}{tokenizer.eos_token or ''}"


def _check_calls(text: str, messages: Messages) -> None:
    """Every tool that is offered or called must be in the text: a template that knows none leaves them out."""
    offered = [(tool.get("function", tool), "the tool") for tool in (messages[0].detail or {}).get("tools", ())]
    called = [
        (call["function"], f"the call in message {number} of")
        for number, message in enumerate(messages, start=1)
        for call in (message.detail or {}).get("tool_calls", ())
    ]
    for function, what in (*offered, *called):
        if str(function.get("name")) not in text:
            raise ModelError(
                f"the chat template leaves out {what} {_shorten(str(function.get('name')))}: it does not know tools; "
                "use a model or a template that does (chat_template: the path of a Jinja file)"
            )


def _check_contents(text: str, messages: Messages) -> None:
    """Every message must be in the text, in order; spaces around it may be trimmed. Tools may be written as JSON."""
    _check_calls(text, messages)
    at = 0
    for number, message in enumerate(messages, start=1):
        content = message.content.strip()
        start = text.find(content, at)
        if start >= 0:
            at = start + len(content)
        elif message.role != "tool":
            raise ModelError(
                f"the chat template drops or changes message {number} ({message.role}: {_shorten(content)}), so the "
                "model would be trained on another text; use a template that keeps contents as they are "
                "(chat_template: chatml)"
            )


def _marks_of(marks: list[Span], turns: list[int], learnt: list[int]) -> list[Span]:
    """The marks of the turns `learnt`; where that is all of them, all marks of the template."""
    if learnt == turns:
        return marks
    if len(marks) != len(turns):
        raise ModelError(
            f"the chat template marks {len(marks)} of {len(turns)} assistant turns with {{% generation %}}, so it is "
            "unclear which mark belongs to which answer; mark every turn, or use chat_template: chatml"
        )
    return [mark for mark, turn in zip(marks, turns, strict=True) if turn in learnt]


@dataclass(frozen=True, slots=True)
class _Scaffold:
    """What a template writes around the messages of a conversation with these roles, whatever they say.

    `opened` and `closed` have, by turn of the assistant, how much of it is written when the turn opens and when it has
    ended: rendering every prefix of every conversation would take most of the time of encoding it.
    """

    parts: tuple[str, ...]
    opened: Mapping[int, int]
    closed: Mapping[int, int]

    def is_around(self, messages: Messages, text: str) -> bool:
        """Whether a rendered conversation is its messages inside of this, to the letter."""
        contents = (*(message.content for message in messages), "")
        return "".join(chain.from_iterable(zip(self.parts, contents, strict=True))) == text


def _scaffold(tokenise: TextTokenizer, messages: Messages, text: str) -> _Scaffold | None:
    """The scaffold that stands around these messages; None where there is none, or only this conversation is encoded.

    It is found by rendering marks instead of contents, and remembered by the roles.
    """
    if not tokenise.is_for_many or any(message.detail for message in messages):
        return None
    roles = tuple(message.role for message in messages)
    known = cast("dict[tuple[str, ...], _Scaffold | None]", tokenise.memory)
    if roles not in known:
        known[roles] = _found_scaffold(tokenise.tokenizer, messages)
    scaffold = known[roles]
    return scaffold if scaffold is not None and scaffold.is_around(messages, text) else None


def _found_scaffold(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> _Scaffold | None:
    marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
    marked = tuple(Message(message.role, mark) for message, mark in zip(messages, marks, strict=True))
    turns = [turn for turn, message in enumerate(messages) if message.role == "assistant" and turn]
    text = render(tokenizer, marked, add_generation_prompt=False)
    before = {turn: render(tokenizer, marked[:turn], add_generation_prompt=True) for turn in turns}
    through = {turn: render(tokenizer, marked[: turn + 1], add_generation_prompt=False) for turn in turns}
    parts = tuple(re.split("\ue000\\d+\ue001", text))
    is_whole = "".join(chain.from_iterable(zip(parts, (*marks, ""), strict=False))) == text
    if len(parts) != len(marks) + 1 or not is_whole:
        return None
    if not all(text.startswith(prefix) for prefix in (*before.values(), *through.values())):
        return None
    return _Scaffold(
        parts=parts,
        opened={turn: len(before[turn]) - len("".join(marks[:turn])) for turn in turns},
        closed={turn: len(through[turn]) - len("".join(marks[: turn + 1])) for turn in turns},
    )


def _turn_span(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    turn: int,
    text: str,
    stops: Sequence[Span],
    scaffold: _Scaffold | None,
) -> Span:
    """Where assistant message `turn` is in `text`: from the end of its prompt to the end of its end-of-turn token.

    What a template writes after that token (a new line, mostly) is never sampled, so it is not trained either.
    """
    if turn == 0:
        raise DataError(
            "the conversation starts with the assistant, and without {% generation %} marks in the chat template it "
            "cannot be told which of its tokens to train; put a user or system message first"
        )
    opened, closed = _bounds(tokenizer, messages, turn, text, scaffold)
    content = messages[turn].content.strip()
    start = text.find(content, opened, closed)
    if start < 0:
        raise ModelError(
            f"the chat template writes message {turn + 1} outside its turn ({_shorten(content)}), so it cannot be told "
            "which tokens to train; use chat_template: chatml"
        )
    ends = (end for stop, end in stops if stop >= start + len(content) and end <= closed)
    return opened, next(ends, closed)


def _bounds(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, turn: int, text: str, scaffold: _Scaffold | None
) -> Span:
    """Where in `text` the answer of a turn begins, and where what the template writes for the turn ends."""
    if scaffold is not None:
        earlier = sum(len(message.content) for message in messages[:turn])
        return scaffold.opened[turn] + earlier, scaffold.closed[turn] + earlier + len(messages[turn].content)
    before = render(tokenizer, messages[:turn], add_generation_prompt=True)
    is_last = turn + 1 == len(messages)
    through = text if is_last else render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
    for part, name in ((before, f"the opening of message {turn + 1}"), (through, f"message {turn + 1}")):
        if not text.startswith(part):
            raise ModelError(_why_no_prefix(text, part, name))
    return len(before), len(through)


def _why_no_prefix(text: str, part: str, name: str) -> str:
    shared = next((at for at, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), min(len(text), len(part)))
    return (
        f"the chat template writes the same messages differently once more follow: up to {name} it gives "
        f"{_shorten(part[shared:])} where the whole conversation has {_shorten(text[shared:])}; the tokens to train "
        "cannot be told from it. Use a template with {% generation %} marks, or chat_template: chatml"
    )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")
