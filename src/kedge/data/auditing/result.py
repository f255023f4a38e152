"""The result of an audit as frozen records that turn into JSON. They are made in `single_file` and `cross_file`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kedge.core.findings import Finding, Level, has_fatal
from kedge.data.examples import Kind

Part = Literal["train", "heldout", "evaluation"]
Unit = Literal["characters", "words", "tokens"]

_ORDER: dict[Level, int] = {"fatal": 0, "warning": 1, "info": 2, "ok": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long one side is. Percentiles are lengths that occur (no interpolation)."""

    side: str
    unit: Unit
    count: int
    mean: float
    p5: int
    p50: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Lengths of one side in characters: `counts[i]` of them lie in [edges[i], edges[i + 1])."""

    side: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongerWins:
    """How often the longer answer (in characters) is the preferred one; ties stand apart."""

    wins: int
    losses: int
    ties: int
    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Clusters of texts whose Jaccard similarity is at or above the threshold; exact copies count once."""

    texts: int
    clustered: int
    clusters: int
    largest: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAudit:
    file: str
    part: Part
    kind: Kind | None
    format: str
    note: str
    """What is worth knowing of a foreign layout: which judgement counts, what is not read."""
    items: int
    without: int
    """Rows that hold no example: ties, say."""
    broken: int
    prompts: int
    largest_prompt_group: int
    lengths: tuple[Lengths, ...]
    histograms: tuple[Histogram, ...]
    longer_wins: LongerWins | None
    near_prompts: Near
    near_conversations: Near | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender:
    """One example for the finding with the same `code` and `file`; `also` is the place it clashes with."""

    code: str
    file: str
    where: str
    also: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    files: tuple[FileAudit, ...]
    findings: tuple[Finding, ...]
    offenders: tuple[Offender, ...]
    settings: Mapping[str, Any]

    @property
    def is_fatal(self) -> bool:
        return has_fatal(self.findings)

    def with_findings(self, more: Iterable[Finding]) -> Audit:
        """The same audit with the findings of other checks (a tokenizer's preflight, say)."""
        return replace(self, findings=worst_first([*self.findings, *more]))

    def offenders_of(self, finding: Finding) -> tuple[Offender, ...]:
        file = finding.evidence.get("file", "")
        return tuple(item for item in self.offenders if item.code == finding.code and item.file == file)

    def shortened(self, text: str) -> str:
        """A message or place without the folder that all files have in common: it is shown once, at the top."""
        return text.replace(self.folder + os.sep, "") if self.folder else text

    @property
    def folder(self) -> str:
        """The folder that all files lie in, or nothing."""
        folders = [os.path.dirname(file.file) for file in self.files]
        # A mix of absolute and relative names has no common path, and "/" would be cut out of every text.
        if len({os.path.isabs(folder) for folder in folders}) > 1 or not all(folders):
            return ""
        common = os.path.commonpath(folders)
        return "" if common == os.sep else common

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Fatal ones first; among equals in the order of the checks."""
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.level]))
