"""Checks of real examples before training: do they fit the window, and does each train something?

Complements `preflight`, which needs no data. A finding has the share of examples and the place of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kedge.core.errors import KedgeError
from kedge.core.findings import Finding, Level
from kedge.core.stage import TooLong
from kedge.data.examples import Example, Messages, answers_of, prompt_of
from kedge.data.template import Encoded, encode_conversation, encode_prompt, render
from kedge.data.tokenizer import special_ids, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOSTLY = 0.5
"""A fault in more than this share of the examples is a fault of the whole, and fatal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedExample:
    """Facts about one example in tokens: its lengths (the longest answer counts) and its faults."""

    where: str
    error: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    trains_nothing: bool = False
    lacks_stop: bool = False
    has_doubled_bos: bool = False
    has_control_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    code: str
    is_hit: Callable[[_EncodedExample, int], bool]
    says: str
    fix: str


_CHECKS = (
    _Check(
        code="examples.unusable",
        is_hit=lambda example, _: bool(example.error),
        says="cannot be turned into tokens",
        fix="correct the data, or the chat template",
    ),
    _Check(
        code="examples.nothing_to_train",
        is_hit=lambda example, _: example.trains_nothing,
        says="have no token to train",
        fix="check that their answers are assistant messages, and that the template marks them",
    ),
    _Check(
        code="examples.prompt_too_long",
        is_hit=lambda example, window: example.prompt_tokens >= window,
        says="have a prompt that alone fills the window of {window} tokens",
        fix="raise the window, or leave out or shorten these prompts",
    ),
    _Check(
        code="examples.truncated",
        is_hit=lambda example, window: example.prompt_tokens < window < example.tokens,
        says="are longer than the window of {window} tokens",
        fix="raise the window, or say what becomes of them (too_long: drop, cut or refuse)",
    ),
    _Check(
        code="examples.no_stop",
        is_hit=lambda example, _: example.lacks_stop,
        says="train no end token after the answer, so that the model would not learn to stop",
        fix="use a template that ends a turn with a control token (chat_template: chatml)",
    ),
    _Check(
        code="examples.doubled_bos",
        is_hit=lambda example, _: example.has_doubled_bos,
        says="start with the start token twice",
        fix="take the start token out of the texts, or out of the template",
    ),
    _Check(
        code="examples.control_text",
        is_hit=lambda example, _: example.has_control_text,
        says="hold the text of a control token, which turns into that token and can end a turn early",
        fix="take the names of control tokens out of the texts",
    ),
)


def preflight_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    window: int,
    limit: int = 256,
    too_long: TooLong | None = None,
) -> list[Finding]:
    """Findings over at most `limit` examples, taken evenly from the whole. `window` counts tokens, and `too_long` says
    what becomes of longer examples."""
    step = max(1, -(-len(examples) // limit))
    encoded = [_encode(tokenizer, example) for example in examples[::step]]
    findings = [finding for check in _CHECKS if (finding := _finding(check, encoded, window)) is not None]
    return [_with_consequence(finding, too_long) for finding in findings]


def measure(tokenizer: PreTrainedTokenizerBase) -> Callable[[Messages], int]:
    """A function that counts the tokens of a conversation, or of a prompt with the generation prompt behind it."""

    def count(messages: Messages) -> int:
        is_prompt = messages[-1].role != "assistant"
        return len(tokens_of(tokenizer, render(tokenizer, messages, add_generation_prompt=is_prompt)))

    return count


def _with_consequence(finding: Finding, too_long: TooLong | None) -> Finding:
    """What becomes of long examples; where one stops the stage, it stops the check."""
    if too_long is None or finding.code not in ("examples.truncated", "examples.prompt_too_long"):
        return finding
    ending = {
        "refuse": "the stage would not start (too_long: refuse)",
        "drop": "left out (too_long: drop)",
        "cut": "they lose their beginning (too_long: cut)",
    }[too_long]
    levels: dict[TooLong, Level] = {"refuse": "fatal", "drop": finding.level, "cut": "warning"}
    return replace(finding, message=f"{finding.message}: {ending}", level=levels[too_long])


def _finding(check: _Check, examples: Sequence[_EncodedExample], window: int) -> Finding | None:
    hits = [example for example in examples if check.is_hit(example, window)]
    if not hits:
        return None
    share = len(hits) / len(examples)
    reason = f": {hits[0].error}" if hits[0].error else ""
    return Finding(
        level="fatal" if share > _MOSTLY else "warning",
        code=check.code,
        message=f"{len(hits)} of {len(examples)} examples looked at {check.says.format(window=window)}{reason}",
        where=hits[0].where,
        fix=check.fix,
        evidence={"share": share, "longest": max(example.tokens for example in hits)},
    )


def _encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> _EncodedExample:
    prompt, answers, where = prompt_of(example), answers_of(example), str(example.origin)
    try:
        encoded = [encode_conversation(tokenizer, (*prompt, *answer), trained_from=len(prompt)) for answer in answers]
        opening = encode_prompt(tokenizer, prompt) if prompt else []
    except KedgeError as error:
        return _EncodedExample(where=where, error=str(error))
    control = special_ids(tokenizer)
    texts = [message.content for messages in (prompt, *answers) for message in messages]
    starts = [row.tokens[:2] for row in encoded] or [opening[:2]]
    return _EncodedExample(
        where=where,
        prompt_tokens=len(opening),
        tokens=max((len(row.tokens) for row in encoded), default=len(opening)),
        trains_nothing=any(not any(row.assistant_mask) for row in encoded),
        lacks_stop=any(_last_trained(row) not in control for row in encoded if any(row.assistant_mask)),
        has_doubled_bos=[tokenizer.bos_token_id] * 2 in starts,
        has_control_text=any(control.intersection(tokens_of(tokenizer, text)) for text in texts),
    )


def _last_trained(encoded: Encoded) -> int:
    return next(token for token, on in zip(encoded.tokens[::-1], encoded.assistant_mask[::-1], strict=True) if on)
