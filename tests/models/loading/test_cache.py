from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kedge.models.loading.cache import build_once, cache_root


def test_root_prefers_own_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("KEDGE_CACHE", "/own")
    assert cache_root() == Path("/own")
    monkeypatch.delenv("KEDGE_CACHE")
    assert cache_root() == Path("/xdg/kedge")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/home/someone/.cache/kedge")


def test_second_call_does_not_write_again(tmp_path: Path) -> None:
    calls: list[Path] = []

    def write(folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("1")

    place = tmp_path / "deep" / "model"
    assert build_once(place, write) == build_once(place, write) == place
    assert len(calls) == 1
    assert (place / "a").read_text() == "1"


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_loser_of_a_race_takes_the_winners_folder(tmp_path: Path) -> None:
    place = tmp_path / "model"

    def slow(folder: Path) -> None:
        build_once(place, lambda other: (other / "who").write_text("winner") and None)
        (folder / "who").write_text("loser")

    assert build_once(place, slow) == place
    assert (place / "who").read_text() == "winner"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


_BUILD = """
import sys, time
from pathlib import Path
from kedge.models.loading.cache import build_once

def write(folder):
    for part in ("a", "b"):
        (folder / part).write_text(sys.argv[2])
        time.sleep(0.2)

build_once(Path(sys.argv[1]), write)
"""


def test_two_processes_at_once_make_one_whole_folder(tmp_path: Path) -> None:
    place = tmp_path / "model"
    workers = [subprocess.Popen([sys.executable, "-c", _BUILD, str(place), name]) for name in ("one", "two")]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    assert (place / "a").read_text() == (place / "b").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
