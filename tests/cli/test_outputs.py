"""Nothing that a command writes replaces what it reads, under whatever name, and nothing else without --force."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kedge = Callable[..., Any]
Link = Callable[[Path, Path], None]

ROWS = "".join(json.dumps({"prompt": f"Q{n}", "chosen": "a", "rejected": "b"}) + "\n" for n in range(20))

COMMANDS: dict[str, tuple[str, ...]] = {
    "data check": ("data", "check", "in/a.jsonl", "--html", "OUT"),
    "data check heldout": ("data", "check", "other.jsonl", "--heldout", "in/a.jsonl", "--html", "OUT"),
    "data convert": ("data", "convert", "in/a.jsonl", "--to", "OUT"),
    "data convert a folder": ("data", "convert", "in", "--to", "OUT"),
    "report": ("report", "in", "--out", "OUT"),
    "compare": ("compare", "in", "in", "--out", "OUT"),
    "score": ("score", "nowhere", "in/a.jsonl", "--to", "OUT"),
    "score report": ("score", "nowhere", "in/a.jsonl", "--to", "scores.jsonl", "--report", "OUT"),
    "sample": ("sample", "nowhere", "--prompts", "in/a.jsonl", "--to", "OUT"),
}


def _files(folder: Path) -> Path:
    (folder / "in").mkdir()
    (folder / "other.jsonl").write_text(ROWS.replace("Q", "R"))
    source = folder / "in/a.jsonl"
    source.write_text(ROWS)
    return source


LINKS: dict[str, Link | None] = {
    "itself": None,
    "symlink": lambda source, name: name.symlink_to(source),
    "hard link": lambda source, name: os.link(source, name),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("link", LINKS)
def test_input_is_never_overwritten(command: str, link: str, kedge: Kedge, tmp_path: Path) -> None:
    source = _files(tmp_path)
    target = "in/../in/a.jsonl"
    if make := LINKS[link]:
        target = "link.jsonl"
        make(source, tmp_path / target)
    arguments = [target if word == "OUT" else word for word in COMMANDS[command]]
    for force in ([], ["--force"]):
        done = kedge(*arguments, *force)
        assert done.code == 2
        assert "this is what is read" in done.err
        assert source.read_text() == ROWS


@pytest.mark.parametrize("command", COMMANDS)
def test_other_files_are_kept_without_force(command: str, kedge: Kedge, tmp_path: Path) -> None:
    _files(tmp_path)
    kept = tmp_path / "kept.jsonl"
    kept.write_text("mine")
    arguments = ["kept.jsonl" if word == "OUT" else word for word in COMMANDS[command]]
    done = kedge(*arguments)
    assert done.code == 2
    assert "--force overwrites it" in done.err
    assert kept.read_text() == "mine"


def test_force_overwrites_another_file(kedge: Kedge, tmp_path: Path) -> None:
    _files(tmp_path)
    (tmp_path / "kept.jsonl").write_text("mine")
    assert kedge("data", "convert", "in/a.jsonl", "--to", "kept.jsonl", "--force").code == 0
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 20


def test_split_keeps_files_and_inputs(kedge: Kedge, tmp_path: Path) -> None:
    source = _files(tmp_path)
    assert kedge("data", "split", "in/a.jsonl", "--to", "out").code == 0
    before = (tmp_path / "out/a.train.jsonl").read_text()
    again = kedge("data", "split", "in/a.jsonl", "--to", "out", "--seed", "5")
    assert (again.code, (tmp_path / "out/a.train.jsonl").read_text()) == (2, before)
    assert kedge("data", "split", "in/a.jsonl", "--to", "out", "--seed", "5", "--force").code == 0
    os.link(source, tmp_path / "in/b.train.jsonl")
    (tmp_path / "in/b.jsonl").write_text(ROWS)
    done = kedge("data", "split", "in/a.jsonl", "in/b.jsonl", "--to", "in", "--force")
    assert (done.code, source.read_text()) == (2, ROWS)


def test_partial_files_of_killed_writers_are_swept(kedge: Kedge, tmp_path: Path) -> None:
    _files(tmp_path)
    dead = tmp_path / ".out.jsonl.999999999.partial"
    alive = tmp_path / f".out.jsonl.{os.getpid()}.partial"
    others = tmp_path / ".else.jsonl.999999999.partial"
    for file in (dead, others):
        file.write_text("half")
    alive.write_text("half")
    assert kedge("data", "convert", "in/a.jsonl", "--to", "out.jsonl").code == 0
    assert (dead.exists(), others.exists()) == (False, True)


def test_tables_of_an_audit_fit_80_columns(kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-rather-long-name-of-a-file-with-pairs-in-it.train.jsonl"
    rows = [{"prompt": f"Question {n} " * 5, "chosen": "a" * (1500 + n), "rejected": "b" * n} for n in range(40)]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = kedge("data", "check", name)
    assert f"{name}: pairs, read as pairs (prompt, chosen, rejected)" in " ".join(done.out.split())
    short = [line for line in done.out.splitlines() if line.startswith("a-rather-")]
    table_rows = [line for line in short if "…" in line.split()[0]]
    assert len(table_rows) == 4  # one of counts, three of lengths
    assert all(len(line.rstrip()) <= 80 for line in done.out.splitlines())
    assert "1,500.0" not in done.out
    assert "1,519.5" in done.out
