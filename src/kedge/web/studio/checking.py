"""Where the findings of `kedge check` belong in a form: at the field that they are about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.core.yaml.source import KeyPath
from kedge.web.studio.drafts import Problems, find_part, put, put_text
from kedge.web.studio.fields import Form
from kedge.web.studio.services import Report

Finding = Mapping[str, Any]
_TOP_FIELDS = {"device": ("device",), "disk": (), "placement": ("placement",)}
"""Of findings about the machine, by the first part of their code."""


@dataclass(slots=True, kw_only=True)
class PlacedReport:
    """Fatal findings and warnings, each at its field; a recipe with fatal ones is not started."""

    fatal: Problems = field(default_factory=Problems)
    warnings: Problems = field(default_factory=Problems)


def placed(report: Report, form: Form) -> PlacedReport:
    """The findings of a report at the fields of a form."""
    result = PlacedReport()
    if error := str(report.get("error") or ""):
        lines = [line.strip() for line in error.splitlines()[1:] if line.strip()] or [error]
        for line in lines:
            put_text(result.fatal, form, line)
        return result
    shown: set[tuple[str, str]] = set()
    for path, finding in _with_places(report, form):
        key = str(finding["code"]), str(finding["message"])
        if finding["level"] not in ("fatal", "warning") or key in shown:
            continue
        shown.add(key)
        words = str(finding["message"]) + (f" ({finding['fix']})" if finding.get("fix") else "")
        put(result.fatal if finding["level"] == "fatal" else result.warnings, form, path, words)
    return result


def _with_places(report: Report, form: Form) -> Iterator[tuple[KeyPath, Finding]]:
    for model in cast("Sequence[Mapping[str, Any]]", report.get("models", ())):
        for finding in model["findings"]:
            yield _field_with(form, str(model["name"]), "model") or ("model",), finding
    for name, stage in cast("Mapping[str, Mapping[str, Any]]", report.get("stages", {})).items():
        for finding in stage["findings"]:
            yield _in_stage(form, name, finding), finding
    for finding in cast("Sequence[Finding]", report.get("findings", ())):
        where = str(finding.get("where", ""))
        by_code = _TOP_FIELDS.get(str(finding["code"]).partition(".")[0])
        yield _file_field(form, where, str(finding["message"])) or by_code or (), finding


def _in_stage(form: Form, name: str, finding: Finding) -> KeyPath:
    """The field that `where` names, or whose file it names; else the stage."""
    where = str(finding.get("where", ""))
    inner: KeyPath = ("stages", name, *where.removeprefix(f"{name}.").split("."))
    if find_part(form, inner) is not None:
        return inner
    named = _file_field(form, where, str(finding["message"]), within=("stages", name))
    return named or _mentioned(form, name, finding) or ("stages", name)


def _mentioned(form: Form, name: str, finding: Finding) -> KeyPath | None:
    """The setting that the proposed change speaks of: "allow shorter answers (max_new_tokens)"."""
    text = f"{finding.get('fix', '')} {finding['message']}"
    words = {word.strip("`'\"(),.;:") for word in text.split()}
    own = [part.path for part in form.fields() if part.path[:2] == ("stages", name)]
    return next((path for path in own if path[-1] in words and "_" in str(path[-1])), None)


def _file_field(form: Form, where: str, message: str, within: KeyPath = ()) -> KeyPath | None:
    """The field whose file a finding is about: by its place, else by its words; the longest name counts."""
    named = [
        (part.value, part.path)
        for part in form.fields()
        if part.suggestions == "data" and part.value and part.path[: len(within)] == within
    ]
    for text in (where, message):
        matches = [(value, path) for value, path in named for file in _files_in(value) if file in text]
        if matches:
            return max(matches, key=lambda match: len(match[0]))[1]
    return None


def _files_in(value: str) -> list[str]:
    """The files that a field names: one, or several in a list.

    >>> _files_in('["data/a.jsonl", "b.jsonl"]'), _files_in("data/a.jsonl")
    (['data/a.jsonl', 'b.jsonl'], ['data/a.jsonl'])
    """
    names = [name.strip("[]{}\"' ") for name in value.split(",")]
    return [name for name in names if "." in name]


def _field_with(form: Form, value: str, suggestions: str) -> KeyPath | None:
    return next((part.path for part in form.fields() if part.suggestions == suggestions and part.value == value), None)
