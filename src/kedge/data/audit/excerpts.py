"""Offenders as a reader sees them: their text is read again from the file, only as far as the last one shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice

from kedge.data.audit.result import Offender
from kedge.data.audit.role_order import parts
from kedge.data.audit.scan import Scan, contents
from kedge.data.audit.single_file import Case
from kedge.data.examples import Example
from kedge.data.reading import read

_PART_CHARACTERS = 280
_CONTEXT_CHARACTERS = 60


def offenders(cases: Sequence[Case]) -> tuple[Offender, ...]:
    """The places of all cases, with what stands there."""
    scans = {id(place.scan): place.scan for case in cases for place in case.places}
    rows = defaultdict[int, set[int]](set)
    for case in cases:
        for place in case.places:
            rows[id(place.scan)].add(place.row)
    found = {key: _examples(scan, rows[key]) for key, scan in scans.items()}
    return tuple(
        Offender(
            code=case.finding.code,
            file=case.finding.evidence["file"],
            where=place.scan.where(place.row),
            also=place.also,
            text=excerpt(found[id(place.scan)][place.row], tuple(place.scan.tokens_seen[case.finding.code])),
        )
        for case in cases
        for place in case.places
    )


def _examples(scan: Scan, rows: set[int]) -> Mapping[int, Example]:
    reading = read(scan.source, max_broken=1.0)
    return {row: example for row, example in enumerate(islice(reading, max(rows) + 1)) if row in rows}


def excerpt(example: Example, focus: Sequence[str] = ()) -> str:
    """Each part on a line with its name, cut where it is long; `focus` strings are kept in view."""
    prompt, answers = parts(example)
    named = [("prompt", contents(prompt)), *((side, contents(answer)) for side, answer in answers)]
    return "\n".join(f"{name}: {cut(text, focus)}" for name, text in named)


def cut(text: str, focus: Sequence[str] = ()) -> str:
    """
    >>> cut("a" * 300 + "</s>", ["</s>"])[-8:]
    'aaaa</s>'
    """
    at = min((text.find(word) for word in focus if word in text), default=0)
    start = max(0, at - _CONTEXT_CHARACTERS) if at > _PART_CHARACTERS - _CONTEXT_CHARACTERS else 0
    shown = text[start : start + _PART_CHARACTERS]
    return ("…" if start else "") + shown + ("…" if start + len(shown) < len(text) else "")
