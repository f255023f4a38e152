"""Checks of a tokenizer and its chat template before training: are answers and their end tokens really trained?

They encode a short conversation of their own and need no data (`preflight_examples` checks real examples); they return
findings and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kedge.core.errors import KedgeError
from kedge.core.findings import Finding
from kedge.data.examples import Message, Messages
from kedge.data.template import Encoded, encode_conversation, encode_prompt, render, template_of
from kedge.data.tokenizer import special_ids, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASK = Message("user", "Name 3 fruits, é?")
_ANSWER = Message("assistant", "Apple 12, pear, fig 907.")
_TALK: Messages = (_ASK, _ANSWER, Message("user", "And 1 nut."), Message("assistant", "Almond."))
_SYSTEM = "Kedge asks which words are the template's own."
_ROUND_TRIP = ("Plain words.", "In 1984, 12 + 7 = 19.", "naïve café, 数学, 🙂", "two  spaces\n\n\ttab")
_USE_CHATML = "set chat_template: chatml, or give the path of a corrected template"


def preflight(
    tokenizer: PreTrainedTokenizerBase, *, config_vocab_size: int | None = None, window: int | None = None
) -> list[Finding]:
    """Findings about the tokenizer, then the template. `config_vocab_size` is the number of rows of the embedding."""
    findings = [*_padding(tokenizer), *_sizes(tokenizer, config_vocab_size, window), *_round_trip(tokenizer)]
    try:
        encoded = encode_conversation(tokenizer, _TALK)
        prompt = encode_prompt(tokenizer, _TALK[:1])
    except KedgeError as error:
        return [*findings, Finding(level="fatal", code="template.unusable", message=str(error), fix=_USE_CHATML)]
    return [
        *findings,
        *_mask(tokenizer, encoded),
        *_stop(tokenizer, encoded),
        *_prompt_is_prefix(tokenizer, encoded, prompt),
        *_doubled_bos(tokenizer, encoded),
        *_additions(tokenizer),
        *_changed_contents(tokenizer),
    ]


def _padding(tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    if tokenizer.pad_token_id is None:
        yield Finding(
            level="info",
            code="tokenizer.no_pad",
            message="The tokenizer has no pad token; rows are filled with another id, which is never read: masks come "
            "from lengths.",
        )
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding(
            level="info",
            code="tokenizer.pad_is_eos",
            message=f"Pad and end token are both {tokenizer.eos_token!r}. Code that masks by pad id would never train "
            "the end token, and the model would never stop; Kedge masks by length, so the end token is trained.",
        )


def _sizes(tokenizer: PreTrainedTokenizerBase, config_vocab_size: int | None, window: int | None) -> Iterator[Finding]:
    highest = max(tokenizer.get_vocab().values())
    if config_vocab_size is not None and highest >= config_vocab_size:
        beyond = sorted(token for token, index in tokenizer.get_vocab().items() if index >= config_vocab_size)
        yield Finding(
            level="fatal",
            code="tokenizer.beyond_embedding",
            message=f"{len(beyond)} token(s) have ids up to {highest}, but the model has {config_vocab_size} "
            f"embeddings; first {beyond[0]!r}.",
            fix="use the tokenizer that belongs to the model, or enlarge the model's embedding",
            evidence={"tokens": beyond[:10]},
        )
    if window is not None and tokenizer.model_max_length < window:
        yield Finding(
            level="warning",
            code="tokenizer.window",
            message=f"The tokenizer is meant for {tokenizer.model_max_length} tokens, and the window is {window}.",
            fix=f"set a window of at most {tokenizer.model_max_length}",
        )


def _round_trip(tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    for text in _ROUND_TRIP:
        back = str(tokenizer.decode(tokens_of(tokenizer, text), skip_special_tokens=False))
        if back.strip() != text:
            yield Finding(
                level="warning",
                code="tokenizer.round_trip",
                message=f"Text does not survive the tokenizer: {text!r} comes back as {back!r}.",
                fix="check that tokenizer.json is the model's own",
                evidence={"text": text, "back": back},
            )
            return


def _mask(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> Iterator[Finding]:
    trained = _decode(
        tokenizer, [token for token, on in zip(encoded.tokens, encoded.assistant_mask, strict=True) if on]
    )
    answers = [message.content for message in _TALK if message.role == "assistant"]
    untrained = [answer for answer in answers if answer not in trained]
    if not any(encoded.assistant_mask):
        yield Finding(
            level="fatal",
            code="template.zero_mask",
            message="The template marks no token as the assistant's: training would run and learn nothing.",
            fix=_USE_CHATML,
        )
    elif untrained:
        yield Finding(
            level="warning",
            code="template.partial_mask",
            message=f"The template marks {len(answers) - len(untrained)} of {len(answers)} answers in full as the "
            f"assistant's; not trained: {untrained[0]!r}.",
            fix=_USE_CHATML,
        )


def _stop(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> Iterator[Finding]:
    if not any(encoded.assistant_mask):
        return
    last = max(index for index, on in enumerate(encoded.assistant_mask) if on)
    stop = encoded.tokens[last]
    follows = encoded.tokens[last + 1 : last + 2]
    control = special_ids(tokenizer)
    if stop not in control:
        is_left_out = bool(follows) and follows[0] in control
        yield Finding(
            level="fatal",
            code="template.stop_not_trained" if is_left_out else "template.no_stop",
            message=f"An answer is trained up to {_decode(tokenizer, [stop])!r}, and "
            + (f"its end token {_decode(tokenizer, follows)!r} is left out" if is_left_out else "no end token follows")
            + ": the model would never learn to stop.",
            fix=_USE_CHATML,
        )
    elif tokenizer.eos_token_id is None:
        yield Finding(
            level="warning",
            code="tokenizer.no_eos",
            message=f"The tokenizer names no end token; the template ends a turn with {_decode(tokenizer, [stop])!r}.",
            fix="name that token as eos_token in tokenizer_config.json",
        )
    elif stop != tokenizer.eos_token_id:
        yield Finding(
            level="warning",
            code="template.stop_differs",
            message=f"The template ends a turn with {_decode(tokenizer, [stop])!r}, but the tokenizer's end token is "
            f"{tokenizer.eos_token!r}; a sampler that knows only the latter runs on past the answer.",
            fix="name the template's token as eos_token in tokenizer_config.json",
            evidence={"stop": stop, "eos": tokenizer.eos_token_id},
        )


def _prompt_is_prefix(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, prompt: list[int]) -> Iterator[Finding]:
    text, opening = (
        render(tokenizer, _TALK, add_generation_prompt=False),
        render(tokenizer, _TALK[:1], add_generation_prompt=True),
    )
    if not text.startswith(opening):
        yield Finding(
            level="fatal",
            code="template.prompt_not_prefix",
            message=f"The prompt that opens an answer ends in {opening[-30:]!r}, which the whole conversation does not "
            "contain there: the model would be asked in another format than it was trained in.",
            fix=_USE_CHATML,
        )
    elif encoded.tokens[: len(prompt)] != prompt:
        yield Finding(
            level="warning",
            code="template.prompt_tokens_differ",
            message="The last token of the prompt melts into the first of the answer, so prompts are tokenised "
            "differently in training and in sampling.",
            fix="end the template's generation prompt with a new line or a control token",
        )


def _doubled_bos(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    text = render(tokenizer, _TALK, add_generation_prompt=False)
    if encoded.tokens[:2] == [bos, bos]:
        yield Finding(
            level="fatal",
            code="template.doubled_bos",
            message=f"The template writes the start token {tokenizer.bos_token!r} twice.",
            fix="remove one from the template",
        )
    elif list(tokenizer(text)["input_ids"][:2]) == [bos, bos]:
        yield Finding(
            level="info",
            code="tokenizer.adds_bos",
            message=f"Template and tokenizer each write {tokenizer.bos_token!r}. Kedge tokenises rendered text as it "
            "is, so it is there once; tools that tokenise the text again will double it.",
        )


def _additions(tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """What the template writes that is in no message."""
    if default := _default_system(tokenizer):
        yield Finding(
            level="info",
            code="template.default_system",
            message=f"Without a system message the template adds its own: {default!r}.",
            fix="add a system message to every conversation if this is not wanted",
            evidence={"system": default},
        )
    if "strftime_now" in template_of(tokenizer):
        yield Finding(
            level="warning",
            code="template.date",
            message="The template writes today's date into the text, so the same data gives other tokens tomorrow.",
            fix="replace strftime_now in the template by a fixed date",
        )


def _default_system(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The system message that the template writes by itself when none is given."""
    try:
        with_system = render(tokenizer, (Message("system", _SYSTEM), _ASK), add_generation_prompt=False)
    except KedgeError:
        return None
    without = render(tokenizer, (_ASK,), add_generation_prompt=False)
    head, system, tail = with_system.partition(_SYSTEM)
    is_wrapped = bool(system) and without.startswith(head) and without.endswith(tail)
    return without[len(head) : len(without) - len(tail)] or None if is_wrapped else None


def _changed_contents(tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    spaced: Messages = (_ASK, Message("assistant", "  Fig.\n "))
    if spaced[1].content not in render(tokenizer, spaced, add_generation_prompt=False):
        yield Finding(
            level="info",
            code="template.trims",
            message="The template trims spaces around a message; answers are trained without them.",
        )
    thought = "<think>2 + 2</think>"
    talk: Messages = (_ASK, Message("assistant", f"{thought}Four."), *_TALK[2:])
    if thought not in render(tokenizer, talk, add_generation_prompt=False):
        yield Finding(
            level="warning",
            code="template.drops_thoughts",
            message="The template drops <think> blocks from earlier answers; conversations that have them are refused.",
            fix="keep only the last answer's thoughts in the data, or use a template that keeps all",
        )


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False))
