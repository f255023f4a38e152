"""Tokenizers as GGUF files hold them, and back: byte-level BPE with a named pre-tokenizer, and SentencePiece's BPE.

A GGUF file says nothing of how text is cut before the merges but a name, which its readers know by heart. So a
tokenizer is written only where its own parts are exactly those behind a name; any other would be cut differently there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kedge.core.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""What `tokenizer.ggml.token_type` says of a token. Control tokens stand for themselves, never for text."""
NO_MERGE = " "
"""Stands alone in the list of merges where there are none: readers ask for the list, and it may not be empty."""
SPACE = "▁"
"""What SentencePiece writes for a space."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut before the merges, under its name in GGUF files."""

    parts: tuple[Mapping[str, Any], ...]
    """As in tokenizer.json."""
    normalizer: str | None = None
    ignores_merges: bool = False
    """Whether a word that is a token is taken whole, however the merges would build it."""


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(parts=(_bytes(use_regex=True),)),
    "smollm": PreTokenizer(parts=(_DIGITS, _bytes(use_regex=True))),
    "qwen2": PreTokenizer(
        parts=(_split(_CONTRACTIONS + _WORDS + r"\p{N}|" + _REST), _bytes(use_regex=False)), normalizer="NFC"
    ),
    "llama-bpe": PreTokenizer(
        parts=(_split(_CONTRACTIONS + _WORDS + r"\p{N}{1,3}|" + _REST), _bytes(use_regex=False)), ignores_merges=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What `tokenizer.ggml.*` says."""

    model: Literal["gpt2", "llama"]
    """`gpt2` is byte-level BPE, `llama` SentencePiece's BPE, which has scores instead of merges."""
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...] = ()
    scores: tuple[float, ...] = ()
    special: Mapping[str, int]
    """The token of each part by its name there: bos, eos, padding, unknown, eot."""
    adds_bos: bool
    adds_eos: bool
    adds_space: bool = False


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, *, size: int, ends: Collection[int]) -> Vocabulary:
    """The tokenizer for a model of `size` tokens; `ends` are those that end an answer. Refused where GGUF has no words
    for how it cuts text."""
    state: dict[str, Any] = json.loads(cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer.to_str())
    model: dict[str, Any] = state["model"]
    if model["type"] != "BPE":
        raise _refused(f"its model is {model['type']}, and only BPE is written")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _refused(f"its BPE has {name} {model[name]!r}")
    added: list[dict[str, Any]] = state["added_tokens"]
    if wrong := [token["content"] for token in added if token["lstrip"] or token["rstrip"] or token["single_word"]]:
        raise _refused(f"its token {wrong[0]!r} swallows the spaces beside it")
    is_bytes = bool(model.get("byte_fallback"))
    tokens, types = _tokens(model["vocab"], added, size, unknown=model.get("unk_token"), has_byte_tokens=is_bytes)
    adds_bos, adds_eos = _adds(tokenizer)
    merges = tuple(_pair(merge) for merge in model["merges"])
    special = _special(tokenizer, ends)
    if is_bytes:
        return Vocabulary(
            model="llama",
            pre="default",
            tokens=tokens,
            types=types,
            scores=_scores(tokens, types, merges),
            special=special,
            adds_bos=adds_bos,
            adds_eos=adds_eos,
            adds_space=_adds_space(state),
        )
    return Vocabulary(
        model="gpt2",
        pre=_pre_name(state, merges),
        tokens=tokens,
        types=types,
        merges=merges,
        special=special,
        adds_bos=adds_bos,
        adds_eos=adds_eos,
    )


def backend_of(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that a GGUF file describes."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    backend = _sentencepiece(vocabulary, ids) if vocabulary.model == "llama" else _byte_level(vocabulary, ids)
    named = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    control = [token for token, kind in named if kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == USER_DEFINED])
    return backend


def _byte_level(vocabulary: Vocabulary, ids: dict[str, int]) -> Tokenizer:
    known = PRE_TOKENIZERS[vocabulary.pre]
    backend = Tokenizer(BPE(vocab=ids, merges=list(vocabulary.merges), ignore_merges=known.ignores_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([_part(part) for part in known.parts])
    if known.normalizer == "NFC":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _part(part: Mapping[str, Any]) -> Any:
    if part["type"] == "Split":
        return pre_tokenizers.Split(Regex(part["pattern"]["Regex"]), "isolated")
    if part["type"] == "Digits":
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part["use_regex"])


def _sentencepiece(vocabulary: Vocabulary, ids: dict[str, int]) -> Tokenizer:
    merges = merges_by_score(vocabulary.tokens, vocabulary.types, vocabulary.scores)
    unknown = next((token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN))
    backend = Tokenizer(BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    before = [normalizers.Prepend(SPACE)] if vocabulary.adds_space else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the token with the highest score: every way to make each, best
    first."""
    ids = {token: number for number, token in enumerate(tokens) if types[number] == NORMAL}
    ways = [
        (-scores[number], ids[token[:at]], ids[token[at:]], (token[:at], token[at:]))
        for token, number in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [pair for *_, pair in sorted(ways)]


def _scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]) -> tuple[float, ...]:
    """A score for each token so that the best join is the first merge; refused where merges are not of that form."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    scores = tuple(float(-rank.get(token, len(merges))) for token in tokens)
    derived = merges_by_score(tokens, types, scores)
    order = [rank[left + right] for left, right in merges]
    if set(derived) != set(merges) or order != sorted(order):
        raise _refused("its merges are not those of a SentencePiece model, whose tokens have one score each")
    return scores


def _tokens(
    vocabulary: Mapping[str, int],
    added: Iterable[Mapping[str, Any]],
    size: int,
    *,
    unknown: str | None,
    has_byte_tokens: bool,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tokens and their types by number; rows of the model beyond the tokenizer's get names that no text has."""
    tokens: dict[int, tuple[str, int]] = {}
    for token, number in vocabulary.items():
        is_byte = has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[number] = token, BYTE if is_byte else NORMAL
    for entry in added:
        kind = CONTROL if entry["special"] else USER_DEFINED
        tokens[entry["id"]] = entry["content"], UNKNOWN if entry["content"] == unknown else kind
    if unknown is not None and unknown in vocabulary:
        tokens[vocabulary[unknown]] = unknown, UNKNOWN
    if (largest := max(tokens, default=-1)) >= size:
        raise _refused(f"it has a token {largest}, and the model's embeddings have {size} rows")
    rows = [tokens.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]
    return tuple(token for token, _ in rows), tuple(kind for _, kind in rows)


def _adds(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the tokenizer puts its begin and its end token around plain text."""
    whole: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if whole[:1] != plain[:1] else []
    eos = [tokenizer.eos_token_id] if whole[-1:] != plain[-1:] else []
    if whole != [*bos, *plain, *eos]:
        raise _refused("it puts other tokens than its begin and end token around a text")
    return bool(bos), bool(eos)


def _special(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> dict[str, int]:
    named = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
        "eot": next((token for token in sorted(ends) if token != tokenizer.eos_token_id), None),
    }
    return {name: token for name, token in named.items() if isinstance(token, int)}


def _pre_name(state: Mapping[str, Any], merges: Sequence[tuple[str, str]]) -> str:
    parts, normalizer = _parts(state["pre_tokenizer"]), state["normalizer"]
    normal = normalizer and normalizer["type"]
    ignores_merges = bool(state["model"].get("ignore_merges"))
    if not merges and not ignores_merges and not normal and _is_bytes_alone(parts):
        return "gpt-2"  # without merges every byte is a token of its own, wherever text is cut
    for name, known in PRE_TOKENIZERS.items():
        is_same = parts == list(known.parts) and ignores_merges == known.ignores_merges
        if is_same and normal in (None, known.normalizer):
            return name
    kinds = " + ".join(part["type"] for part in parts) or "none"
    raise _refused(
        f"its pre-tokenizer ({kinds}{', ' + normal if normal else ''}{', ignore_merges' if ignores_merges else ''}) is "
        f"none of those that have a name in GGUF and are known here: {', '.join(PRE_TOKENIZERS)}"
    )


def _parts(pre_tokenizer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The pre-tokenizers of a sequence, without what only concerns offsets."""
    if pre_tokenizer is None:
        return []
    listed = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return [{name: value for name, value in part.items() if name != "trim_offsets"} for part in listed]


def _is_bytes_alone(parts: Sequence[Mapping[str, Any]]) -> bool:
    return len(parts) == 1 and parts[0]["type"] == "ByteLevel" and not parts[0]["add_prefix_space"]


def _adds_space(state: Mapping[str, Any]) -> bool:
    """Whether a space is put before every text between control tokens, as SentencePiece does."""
    normalizer, parts = state["normalizer"], _parts(state["pre_tokenizer"])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    listed = (normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]) if normalizer else []
    if not parts and listed in ([{"type": "Prepend", "prepend": SPACE}, replace], [replace]):
        return len(listed) == 2
    part = parts[0] if len(parts) == 1 and not listed else {"type": ""}
    is_whole = part["type"] == "Metaspace" and part["replacement"] == SPACE and not part.get("split", True)
    if is_whole and part["prepend_scheme"] in ("first", "never"):
        # `first` puts one before the first word of a whole text alone, never after the begin token of a conversation.
        return False
    raise _refused("it has byte tokens, and yet cuts text otherwise than SentencePiece does")


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _refused(reason: str) -> ModelError:
    return ModelError(
        f"the tokenizer cannot be written to a GGUF file: {reason}. What reads the file would make other tokens of the "
        "same text; export to hf or vllm instead"
    )
