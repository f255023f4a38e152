"""Load a tokenizer exactly as its files describe it, and the few things that need transformers beyond loading.

Text is always tokenised as it is given: special tokens come from the chat template, never from the tokenizer, so that
none is doubled. Code that ships with a tokenizer is not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from kedge.core.errors import ModelError
from kedge.core.files import hash_json

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
BackendEncode = Callable[[list[str]], list[list[int]]]


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id."""
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in _FILES):
        raise ModelError(
            f"{folder}: no tokenizer here (none of {', '.join(_FILES)}); copy the tokenizer files of the model that "
            "this one was trained from"
        )
    try:
        if folder.is_dir() and not (folder / "tokenizer.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        else:
            # Not AutoTokenizer: for some model families it rebuilds the pre-tokenizer and ignores the one in
            # tokenizer.json. SmolLM2 loses its digit-splitting so, and other ids come out.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    except Exception as error:  # the tokenizers library raises plain `Exception` for a damaged file
        hint = "" if folder.is_dir() else " (no network, HF_HUB_OFFLINE set, or a wrong name?)"
        reason = " ".join(str(error).split())
        raise ModelError(f"the tokenizer of '{source}' cannot be loaded{hint}: {reason}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer of '{source}' cannot say where in a text its tokens are; it needs tokenizer.json"
        )
    return tokenizer


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokens_with_spans(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[Span]]:
    """Tokens, and for each the characters that it came from; several tokens may share one character."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [(start, end) for start, end in encoded["offset_mapping"]]


def backend_state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """How the tokenizer works, as its tokenizer.json says it; None for one that is not of the tokenizers library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else json.loads(backend.to_str())


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that make the same tokens of the same messages."""
    state = [backend_state(tokenizer), tokenizer.chat_template, tokenizer.special_tokens_map]
    return hash_json([*state, str(type(tokenizer)), transformers.__version__, tokenizers.__version__])


def backend_encoder(tokenizer: PreTrainedTokenizerBase) -> BackendEncode:
    """A function that tokenises many short texts at once, as `tokens_of` does one.

    It asks the tokenizers library itself: transformers takes longer to prepare a call than a word takes.
    """
    tokenizer("", add_special_tokens=False)  # switches off the cutting and padding that a tokenizer.json may ask for
    backend: Any = cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer

    def encode(texts: list[str]) -> list[list[int]]:
        return [row.ids for row in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def words_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[str, Span]]:
    """The words into which the tokenizer cuts a text before it looks for tokens, and where they are."""
    backend: Any = cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer
    return backend.pre_tokenizer.pre_tokenize_str(text)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of control tokens: those that stand for themselves, never for text."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What to fill rows up with. Any id will do, since masks come from lengths and never from this id."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(candidate, int):
            return candidate
    return 0


def render_template(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[dict[str, Any]] | None = None,
) -> tuple[str, list[Span] | None]:
    """The rendered text, and the characters that the template marks with `{% generation %}`; None if it has no marks.

    transformers can also turn the marks into a token mask, but it loses the last bytes of a character that takes
    several tokens, and with trimmed offsets it can mark everything up to the end of the text.
    """
    has_marks = _MARK.search(template) is not None
    variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
    rendered: Any = render_jinja_template(  # it returns two lists, whatever its annotation says
        conversations=[list(messages)],
        chat_template=template,
        tools=list(tools) if tools else None,
        return_assistant_tokens_mask=has_marks,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    texts, spans = rendered
    return texts[0], [(start, end) for start, end in spans[0]] if has_marks else None
