"""Text as the audit compares it: normalised words, whitespace-blind keys, and strings that do not belong in messages.

Words are for fuzzy comparison only (near duplicates, n-grams): lower case, ASCII punctuation ignored. Identity of
pairs and items goes by `collapse_spaces`, which ignores nothing but white space.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

KNOWN_SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
    "<|endofprompt|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<</SYS>>",
)
"""Control tokens of the common chat templates. Written out inside a message they end or forge a turn."""

TRANSCRIPT_MARKERS = ("\n\nHuman:", "\n\nAssistant:", "### Instruction:", "### Response:", "\nUSER:", "\nASSISTANT:")
"""Turn markers of plain-text transcripts. Inside a message they mean that the conversation was not cut into turns."""

REPLACEMENT = "�"
"""What a decoder writes for bytes it could not read: the text was damaged before it came here."""

_WORD_BYTES = bytes.maketrans(
    (string.ascii_uppercase + string.punctuation).encode(),
    (string.ascii_lowercase + " " * len(string.punctuation)).encode(),
)


def words(text: str) -> list[bytes]:
    """Lower-case words without ASCII punctuation, as UTF-8.

    >>> words("The cat's “ÉTÉ”, 2+2!")
    [b'the', b'cat', b's', b'\\xe2\\x80\\x9c\\xc3\\xa9t\\xc3\\xa9\\xe2\\x80\\x9d', b'2', b'2']
    """
    # Bytes below 128 never occur inside a multi-byte character, so the table is safe on UTF-8 and ten times faster
    # than str.translate once a text holds one curly quote. A lone surrogate must not stop an audit: it is kept as is.
    folded = text if text.isascii() else text.casefold()
    return folded.encode("utf-8", "surrogatepass").translate(_WORD_BYTES).split()


def collapse_spaces(text: str) -> tuple[str, int]:
    """The text with every run of white space as one space, and its number of words.

    >>> collapse_spaces(" a  b\\nc ")
    ('a b c', 3)
    """
    parts = text.split()
    return " ".join(parts), len(parts)


def text_key(text: str) -> int:
    """64-bit hash of a text; the same on every machine."""
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class LiteralFinder:
    """Which of some literal strings occur in a text. Texts without their first characters cost almost nothing."""

    def __init__(self, literals: Sequence[str]) -> None:
        longest_first = sorted({literal for literal in literals if literal}, key=len, reverse=True)
        self._initials = tuple(sorted({literal[0] for literal in longest_first}))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> set[str]:
        """
        >>> sorted(LiteralFinder(["</s>", "[INST]"])("a </s> b </s> [inst]"))
        ['</s>']
        """
        if self._pattern is None or not any(initial in text for initial in self._initials):
            return set()
        return set(self._pattern.findall(text))
