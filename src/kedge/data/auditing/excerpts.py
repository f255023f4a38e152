"""Excerpts of offending items: their text is read again from the file, only as far as the last one shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice

from kedge.data.auditing.result import Offender
from kedge.data.auditing.role_order import prompt_and_answers
from kedge.data.auditing.scan import Scan, contents
from kedge.data.auditing.single_file import LocatedFinding
from kedge.data.examples import Example
from kedge.data.reading import read

_PART_CHARACTERS = 280
_CONTEXT_CHARACTERS = 60


def offenders(findings: Sequence[LocatedFinding]) -> tuple[Offender, ...]:
    """The places of all findings, with an excerpt of the item there."""
    scans = {id(place.scan): place.scan for located in findings for place in located.places}
    rows = defaultdict[int, set[int]](set)
    for located in findings:
        for place in located.places:
            rows[id(place.scan)].add(place.row)
    examples = {key: _examples(scan, rows[key]) for key, scan in scans.items()}
    return tuple(
        Offender(
            code=located.finding.code,
            file=located.finding.evidence["file"],
            where=place.scan.where(place.row),
            also=place.also,
            text=excerpt(examples[id(place.scan)][place.row], tuple(place.scan.literals[located.finding.code])),
        )
        for located in findings
        for place in located.places
    )


def _examples(scan: Scan, rows: set[int]) -> Mapping[int, Example]:
    reading = read(scan.source, max_broken=1.0)
    return {row: example for row, example in enumerate(islice(reading, max(rows) + 1)) if row in rows}


def excerpt(example: Example, focus: Sequence[str] = ()) -> str:
    """Each part on a line with its name, cut where it is long; `focus` strings are kept in view."""
    prompt, answers = prompt_and_answers(example)
    named = [("prompt", contents(prompt)), *((side, contents(answer)) for side, answer in answers)]
    return "\n".join(f"{name}: {cut(text, focus)}" for name, text in named)


def cut(text: str, focus: Sequence[str] = ()) -> str:
    """A text cut to what fits an excerpt, around the first of the `focus` strings.

    >>> cut("a" * 300 + "</s>", ["</s>"])[-8:]
    'aaaa</s>'
    """
    at = min((text.find(word) for word in focus if word in text), default=0)
    start = max(0, at - _CONTEXT_CHARACTERS) if at > _PART_CHARACTERS - _CONTEXT_CHARACTERS else 0
    shown = text[start : start + _PART_CHARACTERS]
    return ("…" if start else "") + shown + ("…" if start + len(shown) < len(text) else "")
