"""Rows of exams survive the file, and a broken line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.core.errors import ConfigError
from kedge.exams.rows import ItemRow, read_rows, write_rows

ROW = ItemRow(
    exam="mmlu", metric="letter", item="law-3", cluster="law-3", model="ppo", score=1.0, answer="ab", seed=0,
    groups={"subject": "law"},
)  # fmt: skip


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    assert list(read_rows(write_rows(tmp_path / "items.jsonl", [ROW, ROW]))) == [ROW, ROW]


@pytest.mark.parametrize("line", ["{", "[1]", '{"exam": "mmlu"}', '{"exam": "mmlu", "colour": 1}'])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    file = write_rows(tmp_path / "items.jsonl", [ROW])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"items\.jsonl:2: not a row of an exam"):
        list(read_rows(file))
