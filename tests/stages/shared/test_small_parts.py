"""Small parts that stages share: texts as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.shared.encoding import encode_demonstrations

WriteRows = Callable[..., str]


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(*rows: Any) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(file)

    return write


def test_a_conversation_of_exactly_the_longest_length_is_learnt_from(write_rows: WriteRows) -> None:
    source = write_rows({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "bc"})
    longest = len(encode_demonstrations(source, tiny_tokenizer(), max_length=1000).sequences[0].tokens)
    encoded = encode_demonstrations(source, tiny_tokenizer(), max_length=longest, samples=5)
    assert (len(encoded.sequences), encoded.num_too_long, len(encoded.prompts)) == (1, 1, 1)
    with pytest.raises(DataError, match="and 2 are longer"):
        encode_demonstrations(source, tiny_tokenizer(), max_length=longest - 1)


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_so_many_prompts_are_kept_for_samples(write_rows: WriteRows, samples: int) -> None:
    rows = [{"prompt": letter, "completion": "x"} for letter in "abc"]
    encoded = encode_demonstrations(write_rows(*rows), tiny_tokenizer(), max_length=100, samples=samples)
    texts = [str(tiny_tokenizer().decode(list(tokens))) for tokens in encoded.prompts]
    assert [text.removeprefix("<|im_start|>user\n")[0] for text in texts] == ["a", "b", "c"][:samples]
