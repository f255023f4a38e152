"""The exam that docs/exams.md shows is one."""

from __future__ import annotations

import re
from pathlib import Path

from kedge.exams.catalogue import BUILT_IN, open_exam
from kedge.exams.public.layouts import PUBLIC

PAGE = (Path(__file__).parents[2] / "docs/exams.md").read_text(encoding="utf-8")


def test_the_own_exam_of_the_page_can_be_taken(tmp_path: Path) -> None:
    (settings,) = re.findall(r"^```yaml\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    (items,) = re.findall(r"^```text\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "shop.yaml").write_text(settings)
    (tmp_path / "shop.jsonl").write_text(items)
    exam = open_exam(str(tmp_path / "shop.yaml"))
    assert (exam.name, list(exam.metrics)) == ("shop", ["correct"])
    assert [question.item for question in next(exam.take(0))] == ["o1", "o2"]


def test_every_exam_and_every_layout_is_on_the_page() -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert [name for name in BUILT_IN if f"`{name}`" not in rows] == []
    brought = PAGE[PAGE.index("## Bringing an exam") :]
    assert [name for name in PUBLIC if f"| `{name}` |" not in brought] == []
