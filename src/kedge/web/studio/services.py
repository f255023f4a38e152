"""What commands lend to the studio: the pages know neither models nor stages nor the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kedge.core.findings import Finding
from kedge.recipe.schema import Recipe

Report = Mapping[str, Any]
"""What `kedge check --json` says of a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """A heading and its lines, as the panel beside the form shows them."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """The audit of one file of data."""

    file: str
    kind: str
    rows: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the doctor says of a stage."""

    stage: str
    is_healthy: bool
    verdict: str
    diff: tuple[str, ...]
    """The change of the recipe that it proposes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadAnswer:
    """An answer of a chat that no model may give again."""

    prompt: Sequence[Mapping[str, str]]
    answer: str
    model: str
    why: str
    check: Literal["contains", "lacks", "number", "regex", "refusal"]
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Answers of a chat that people are asked about: which of two is better, or whether one is good."""

    prompt: Sequence[Mapping[str, str]]
    answers: Mapping[str, str]
    """By the models that gave them; who labels never sees which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    templates: Callable[[], Mapping[str, str]]
    """Name and summary."""
    models: Callable[[], Sequence[tuple[str, str]]]
    """Alias and summary of the built-in models."""
    check: Callable[[Path, bool], Report]
    """What `kedge check` finds in a recipe; the flag says whether servers of rewards and judges are asked too."""
    plan: Callable[[Recipe, Report], Sequence[PlanPart]]
    audit: Callable[[Path], FileReport]
    doctor: Callable[[Path], Sequence[Verdict]]
    report: Callable[[Path], str]
    """The page of a run."""
    compare: Callable[[Sequence[Path]], str]
    """The page of several runs."""
    run_command: Callable[[str, bool], Sequence[str]]
    """The command that runs a recipe, or goes on with it."""
    serve_command: Callable[[str, Path], Sequence[str]]
    """The command that serves a model, with the file of its token."""
    add_badcase: Callable[[BadAnswer], str]
    """Keeps a badcase and gives its id."""
    ask_people: Callable[[Question], str]
    """Puts a question to people, and gives the name of the project of labels that it is in."""
