"""The folder of a run with rounds, as its page needs it. Nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import ConfigError, RunError
from kedge.runs.folder import runs_in, status_of
from kedge.runs.manifest import ROUNDS, Manifest, Status, read_manifest

DRIFT, BEST = "drift.json", "best.json"
_EMPTY: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round: `figures` is its `drift.json`, empty until the round is over."""

    folder: Path
    manifest: Manifest
    status: Status
    figures: Mapping[str, Any]

    @property
    def number(self) -> int:
        return self.manifest.round or 0

    @property
    def policy(self) -> Mapping[str, Any]:
        return self.figures.get("policy") or _EMPTY

    @property
    def reward(self) -> Mapping[str, Any]:
        return self.figures.get("reward") or _EMPTY

    @property
    def failed(self) -> list[str]:
        """The drift checks that failed, in words."""
        return [check["words"] for check in self.figures.get("checks", ()) if check["has_failed"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsRecord:
    """All rounds that have begun, in order."""

    folder: Path
    manifest: Manifest
    status: Status
    rounds: tuple[RoundRecord, ...]
    best: Mapping[str, Any]
    """What `best.json` says; empty until a round is over."""

    @property
    def count(self) -> int:
        """How many there shall be."""
        return int(self.manifest.settings["rounds"]["count"])


def rounds_below(folder: Path) -> list[Path]:
    """The folders of the rounds that have begun, in order; none of a run without rounds."""
    if read_manifest(folder).kind != ROUNDS:
        return []
    return sorted(runs_in(folder), key=lambda child: read_manifest(child).round or 0)


def refuse_rounds(folder: Path) -> None:
    """An error for the folder of several rounds, where one of them is meant."""
    if read_manifest(folder).kind == ROUNDS:
        listed = ", ".join(str(home) for home in rounds_below(folder)) or "none has begun yet"
        raise ConfigError(f"{folder} is a run of several rounds; name one of them: {listed}")


def read_rounds(folder: Path) -> RoundsRecord:
    """Everything that the page needs, from disk."""
    return RoundsRecord(
        folder=folder,
        manifest=read_manifest(folder),
        status=status_of(folder),
        rounds=tuple(
            RoundRecord(folder=home, manifest=read_manifest(home), status=status_of(home), figures=_json(home / DRIFT))
            for home in rounds_below(folder)
        ),
        best=_json(folder / BEST),
    )


def _json(file: Path) -> Mapping[str, Any]:
    try:
        return json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise RunError(f"{file} is not JSON ({error}). Remove it, and `kedge run --resume` writes it again.") from error
