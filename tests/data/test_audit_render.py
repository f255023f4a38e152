"""The audit in a terminal: complete, and as plain text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from kedge.core.findings import Finding
from kedge.data.auditing import Audit, audit, render_terminal

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)> [bold]not markup[/bold]"


@pytest.fixture
def result(tmp_path: Path) -> Audit:
    rows = [{"prompt": f"prompt {n} {'a' * n}", "chosen": f"answer {'b' * n}", "rejected": "no"} for n in range(20)]
    rows.append({"prompt": EVIL, "chosen": EVIL, "rejected": EVIL + " "})
    path = tmp_path / "a <b> & c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken <i>\n")
    return audit([path], max_broken=0.2)


def test_terminal_shows_findings_as_plain_text(result: Audit) -> None:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(render_terminal(result))
    text = capture.get()
    assert "fatal   1 of 21 pairs (4.76 %) have the same text on both sides." in text
    assert "a <b> & c.jsonl:21" in text
    assert "rejected" in text
    # the identical pair is a tie although white space makes one side longer: 20 of 20, low end 20 / (20 + 3.8415)
    assert re.search(r"100\.0 % \(83\.9–100\.0\)", text)


def test_folder_is_said_once(tmp_path: Path) -> None:
    files = [tmp_path / "one" / "a.jsonl", tmp_path / "two" / "b.jsonl"]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"prompt": "x"}\n')
    result = audit(files)
    assert result.folder == str(tmp_path)
    assert result.shortened(f"see {files[0]}:3") == "see one/a.jsonl:3"


def test_findings_of_others_join_in_order(result: Audit) -> None:
    more = Finding(level="fatal", code="tokenizer.eos", message="No <eos> in the targets.")
    joined = result.with_findings([more])
    assert [finding.code for finding in joined.findings[:2]] == ["pairs.identical", "tokenizer.eos"]
