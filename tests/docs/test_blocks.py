"""What README and docs tell people to type works: blocks run where they can, and commands are parsed everywhere.

A comment right above a fenced block says what is done with it: `<!-- slow -->` runs it among the slow tests, and
`<!-- not run: WHY -->` only parses it; a block without one runs every time. The blocks of a page share a folder, and
Python that is not named as a file (`# name.py`) goes on where the last such block ended.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from kedge.cli.main import app, main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)\n```$", re.DOTALL | re.MULTILINE
)
TYPED = re.compile(r"^(?: {4,}|# +)?(?:\$ )?(kedge [^\n]*)$|`(kedge [^`\n]*)`", re.MULTILINE)
"""Commands on a line of their own, in a recipe's comment, and in running text."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    mark: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page.name, text[: found.start("text")].count("\n"), found["language"], found["mark"] or "", found["text"])
        for found in FENCE.finditer(text)
    ]


def commands_of(text: str) -> Iterator[tuple[str, bool]]:
    """Every `kedge …` of a text, and whether it stands in running text; what is cut with … is not meant to be typed."""
    for on_line, inline in TYPED.findall(text.replace("\\\n", " ")):
        found, *_ = re.split(r" {3,}", (on_line or inline).strip())  # after three spaces begins what it does
        if "…" not in found:
            yield found, bool(inline)


@cache
def command_line() -> Any:
    """The parser of `kedge`, which takes a while to make."""
    return get_command(app)


def parse(command: str, *, is_named: bool = False) -> None:
    """As the command line would, but for running it. In running text a command may be named without its arguments."""
    words = shlex.split(re.sub(r"\b[A-Z]{2,}\b", "1", command), comments=True)[1:]  # SEED stands for a number
    parser, name = command_line(), "kedge"
    while isinstance(parser, TyperGroup) and words and not words[0].startswith("-"):
        if words[0] not in parser.commands:
            words.insert(0, getattr(parser, "default_command", words[0]))
        name = words.pop(0)
        parser = parser.commands[name]
    try:
        if words or not isinstance(parser, TyperGroup):
            parser.make_context(name, words)
    except typer.Exit:  # --help and --version
        pass
    except Exception as error:
        if not (is_named and type(error).__name__ == "MissingParameter"):
            raise


BLOCKS = {page: found for page in PAGES if (found := blocks_of(page))}
TEXTS = (*PAGES, *RECIPES)


def test_the_patterns_find_blocks_with_their_marks_and_commands() -> None:
    found = FENCE.search("text\n<!-- not run: long -->\n```bash\na\nb\n```\nmore")
    assert found is not None
    assert (found["mark"], found["language"], found["text"]) == ("not run: long", "bash", "a\nb")
    text = "    $ kedge a  # why\nand `kedge b --c`, `kedge d …`\n#   kedge e    what it does\nkedge f"
    assert list(commands_of(text)) == [
        ("kedge a  # why", False),
        ("kedge b --c", True),
        ("kedge e", False),
        ("kedge f", False),
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("kedge nothing", "nothing"),
        ("kedge run x.yaml --nothing", "No such option: --nothing"),
        ("kedge data nothing", "nothing"),
        ("kedge report", "Missing parameter"),
        ("kedge demo --seed one", "valid integer"),
    ],
)
def test_what_is_not_there_does_not_parse(command: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse(command)


@pytest.mark.parametrize("page", TEXTS, ids=[str(page.relative_to(ROOT)) for page in TEXTS])
def test_every_command_of_a_page_is_one(page: Path) -> None:
    for command, is_named in commands_of(page.read_text(encoding="utf-8")):
        try:
            parse(command, is_named=is_named)
        except Exception as error:
            pytest.fail(f"{command}: {error!r}")


@pytest.mark.parametrize("page", BLOCKS, ids=[str(page.relative_to(ROOT)) for page in BLOCKS])
def test_every_block_can_be_run_or_says_why_not(page: Path) -> None:
    for block in BLOCKS[page]:
        assert block.mark in ("", "slow") or re.fullmatch(r"not run: .{5,}", block.mark), block
        assert block.language in ("bash", "python", "yaml", "text"), block
        if block.language == "python":
            ast.parse(block.text)
        if block.language == "bash":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
            targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert set(re.findall(r"^make (\S+)", block.text, re.MULTILINE)) <= targets
            files = re.findall(r"^python (\S+\.py)", block.text, re.MULTILINE)
            assert [file for file in files if "/" in file and not (ROOT / file).is_file()] == []


def run_block(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `folder`, as typed by a person; a script is saved under the name that it begins with."""
    if block.language == "python":
        named = re.match(r"# (\w+\.py)", block.text)
        file = folder / (named[1] if named else "block.py")
        file.write_text(block.text, encoding="utf-8")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, file.name], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stderr[-2000:]}"
        return
    monkeypatch.chdir(folder)
    for line in block.text.splitlines():
        command = shlex.split(line, comments=True)
        assert command[0] == "kedge", f"{block.page}:{block.line}: only `kedge` can be run here, found {line!r}"
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, f"{block.page}:{block.line}: {line}"


def runnable(page: Path, *marks: str) -> list[Block]:
    """The blocks to run; Python that goes on from one block to the next is one script, at the place of its last."""
    blocks = [block for block in BLOCKS[page] if block.mark in marks and block.language in ("bash", "python")]
    joined: list[Block] = []
    for block in blocks:
        if joined and _goes_on(joined[-1]) and _goes_on(block):
            block = replace(block, text=f"{joined.pop().text}\n\n\n{block.text}")
        joined.append(block)
    return joined


def _goes_on(block: Block) -> bool:
    return block.language == "python" and re.match(r"# \w+\.py", block.text) is None


QUICK = [page for page in BLOCKS if runnable(page, "")]
SLOW = [page for page in BLOCKS if runnable(page, "slow")]


@pytest.mark.parametrize("page", QUICK, ids=[page.name for page in QUICK])
def test_the_quick_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in runnable(page, ""):
        run_block(block, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SLOW, ids=[page.name for page in SLOW])
def test_all_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in runnable(page, "", "slow"):
        run_block(block, tmp_path, monkeypatch)
