"""`run.json`: the settings of a run, its code and inputs, and how it ended.

It is whole or absent, like every file of a run. Versions come from package metadata, so nothing is imported for them.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

import kedge
from kedge.core.errors import RunError
from kedge.core.files import hash_json, run_errors, write_json
from kedge.runs.journal import dump_exact, encode_exact, load_exact, now

MANIFEST_NAME = "run.json"
SCHEMA = 1
ROUNDS = "rounds"
"""The kind of a run of several rounds, each of which is a pipeline in a folder of its own."""
Status = Literal["running", "done", "failed", "stopped", "waiting", "interrupted"]

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "datasets",
    "pyarrow",
    "pydantic",
    "ray",
    "vllm",
    "triton",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """An input or output of a run. `path` is absolute, or relative to the folder of the run that names it."""

    name: str
    kind: str
    path: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    kedge: str
    python: str
    platform: str
    packages: Mapping[str, str]
    git_commit: str | None
    device: str
    threads: int | None = None
    """Of torch on the CPU. None for a whole pipeline, and where an older version wrote the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One run. Times are ISO 8601 in UTC; `status` is the last one that was written (see `Run.status`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema: int = SCHEMA
    name: str
    stage: str
    kind: str
    status: Status = "running"
    created: str
    finished: str | None = None
    seed: int
    recipe_hash: str
    settings: Mapping[str, Any]
    environment: Environment
    inputs: tuple[Artefact, ...] = field(default=())
    outputs: tuple[Artefact, ...] = field(default=())
    round: int | None = None
    """Which round of a recipe with `rounds` this is; this and what follows are not written for any other run."""
    previous: str | None = None
    """The hash of the manifest of the round before."""
    as_of: Mapping[str, int] | None = None
    """By stage `label` of the round, the last judgment that its export has."""


_OF_ROUNDS = ("round", "previous", "as_of")


def new_manifest(
    *,
    name: str,
    kind: str,
    seed: int,
    settings: Mapping[str, Any],
    stage: str = "",
    recipe_hash: str = "",
    device: str = "",
    threads: int | None = None,
    inputs: Iterable[Artefact] = (),
    round: int | None = None,
    previous: str | None = None,
) -> Manifest:
    """The manifest of a run that begins now, on this machine. `recipe_hash` is that of the settings unless given."""
    plain = load_exact(dump_exact(settings))
    return Manifest(
        name=name,
        stage=stage,
        kind=kind,
        created=now(),
        seed=seed,
        recipe_hash=recipe_hash or hash_json(encode_exact(plain)),
        settings=plain,
        environment=environment(device=device, threads=threads),
        inputs=tuple(inputs),
        round=round,
        previous=previous,
    )


def environment(*, device: str, threads: int | None = None) -> Environment:
    return Environment(
        kedge=kedge.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: installed for name in _PACKAGES if (installed := _version(name))},
        git_commit=_git_commit(),
        device=device,
        threads=threads,
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with run_errors("write", folder / MANIFEST_NAME):
        fields = asdict(manifest)
        written = {name: value for name, value in fields.items() if value is not None or name not in _OF_ROUNDS}
        write_json(folder / MANIFEST_NAME, encode_exact(written))


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        content = load_exact(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(f"{folder} is not a run: it has no {MANIFEST_NAME}. Name a folder below runs/.") from error
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}). Restore it from a copy, or start a new run.") from error
    schema = cast(dict[str, Any], content).get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise RunError(
            f"{path} has schema {schema!r}; Kedge {kedge.__version__} reads schema {SCHEMA}. "
            "Open it with the version of Kedge that wrote it."
        )
    try:
        return _adapter().validate_python(content)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise RunError(f"{path} is not a manifest: {problems}.") from error


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the working directory, where there is one: a note for people, never a reason to fail."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip() if git.returncode == 0 else None
