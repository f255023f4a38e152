"""The container file: clean by hadolint, and made of what is there, at the versions that we test with."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "containers/Dockerfile"
HADOLINT = Path(sys.executable).parent / "hadolint"


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([HADOLINT, FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    careless = tmp_path / "Dockerfile"
    careless.write_text("FROM python\nRUN pip install kedge\n")
    done = subprocess.run([HADOLINT, careless], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3006" in done.stdout
    assert "DL3013" in done.stdout


def test_every_installation_is_held_to_the_constraints() -> None:
    installs = re.findall(r"pip install [^\n]*", FILE.read_text())
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in install for install in installs)


def test_what_is_copied_is_there_and_let_through() -> None:
    sources = {name for line in re.findall(r"^COPY (.+) \S+$", FILE.read_text(), re.MULTILINE) for name in line.split()}
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line != "*"}
    assert sources == allowed
    assert [name for name in sources if not (ROOT / name).exists()] == []


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=(\S+)", FILE.read_text())
    assert len(named) == 2
    assert {extra for names in named for extra in names.split(",")} <= set(extras)
