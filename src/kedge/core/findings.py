"""A finding: one thing that a check noticed, in words, with its evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kedge.core.errors import ConfigError
from kedge.core.quoting import escaped

Level = Literal["ok", "info", "warning", "fatal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`code` is stable and machine-readable (`pairs.identical`); `message` is one plain sentence with numbers."""

    level: Level
    code: str
    message: str
    where: str = ""
    fix: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("message", "where", "fix"):  # which quote names and texts of others
            object.__setattr__(self, name, escaped(getattr(self, name)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def refuse_fatal(findings: Iterable[Finding], what: str) -> None:
    """An error with all that is fatal, each with its place and what to do about it."""
    lines = [
        f"  {finding.where}: {finding.message}" + (f"; {finding.fix}" if finding.fix else "")
        for finding in findings
        if finding.level == "fatal"
    ]
    if lines:
        raise ConfigError("\n".join([f"{what}:", *lines]))


def has_fatal(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "fatal" for finding in findings)
