"""Records of what `kedge check` looks at besides models and files: the lines of its table, and single outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.core.findings import Finding
from kedge.data.examples import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One line of the table of what was checked."""

    what: str
    subject: str
    result: str
    used_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The prompts whose answers a source scores, as far as they are known before anything runs."""

    prompts: Sequence[Prompt] | None
    """None where another stage makes them."""
    total: int
    longest: int | None
    """Tokens of the longest prompt that is asked."""

    @property
    def fields(self) -> frozenset[str] | None:
        if self.prompts is None:
            return None
        solution = {"solution"} if any(prompt.answer is not None for prompt in self.prompts) else set[str]()
        return frozenset(solution.union(*(prompt.extra for prompt in self.prompts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was found of one source: the line of the table, and findings that do not name a stage yet."""

    what: str
    subject: str
    result: str
    findings: tuple[Finding, ...] = ()


def fatal(code: str, message: str, fix: str = "") -> Finding:
    return Finding(level="fatal", code=code, message=message, fix=fix)


def merged(rows: Sequence[Checked]) -> list[Checked]:
    """Lines that say the same of the same become one, used by all of their stages."""
    by_key: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        by_key.setdefault((row.what, row.subject, row.result), []).extend(row.used_by)
    return [
        Checked(what=what, subject=subject, result=result, used_by=tuple(dict.fromkeys(users)))
        for (what, subject, result), users in by_key.items()
    ]
