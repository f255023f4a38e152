"""Argilla's records: `fields`, `responses.QUESTION[].value/user_id/status`; older ones with a list of responses.

Ours go out with the questions `preference` (−3 to 3, or both_bad), `ranking`, `thumb`, `edit`, `reason`, and one rating
from 1 to 7 an axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from kedge.data.decode import Row
from kedge.data.messages import as_messages
from kedge.label.exchange.records import Foreign, LabelledItem, PersonLabel, Unsaid, plain, read_rows, refuse
from kedge.label.export import Labelled
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.questions import Decision

TOOL = "argilla"
PROMPTS = ("prompt", "instruction", "question", "input", "context")
_STEPS = {str(step): step for step in range(-3, 4)}
_SIDES = {"first": -1, "left": -1, "a": -1, "1": -1, "second": 1, "right": 1, "b": 1, "2": 1, "tie": 0, "equal": 0}
_THUMBS = {"good": 1, "bad": -1, "yes": 1, "no": -1, "up": 1, "down": -1}
_MIDDLE = 4
"""Of a rating from 1 to 7."""
CANNOT = ("seconds", "idle seconds", "propensity", "round", "models of answers", "flags", "guideline version")
"""What these records have no place for."""


def is_argilla(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("fields"), Mapping) and "responses" in fields


def read_argilla(rows: Iterator[Row]) -> Foreign:
    """Records with the labels of each person; what is not understood is counted."""
    return read_rows(rows, TOOL, _item)


def _item(row: Row, record: Mapping[str, Any], unsaid: Unsaid) -> LabelledItem:
    fields = cast("Mapping[str, Any]", record["fields"])
    name = next((name for name in PROMPTS if name in fields), None)
    if name is None:
        raise refuse(row.origin, "fields", list(fields), f"one of them is the prompt: {', '.join(PROMPTS)}")
    names = [other for other, value in fields.items() if other != name and value is not None]
    answers = [as_messages(fields[other], text_role="assistant", field=other) for other in names]
    for question in cast("Mapping[str, Any]", record.get("suggestions") or {}):
        unsaid.add(f"suggestion for '{question}': not a person's")
    labels = [
        PersonLabel(person=person, decision=decision)
        for person, values in _responses(row, record, unsaid).items()
        if (decision := _decision(row, names, values, unsaid)) is not None
    ]
    metadata = cast("Mapping[str, Any]", record.get("metadata") or {})
    draft = Draft(
        prompt=as_messages(fields[name], text_role="user", field=name),
        answers=tuple(DraftAnswer(text=answer) for answer in answers),
        is_heldout=bool(metadata.get("heldout", False)),
        origin=str(row.origin),
    )
    return LabelledItem(draft=draft, labels=tuple(labels))


def _responses(row: Row, record: Mapping[str, Any], unsaid: Unsaid) -> dict[str, dict[str, Any]]:
    """By person, the value of each question; drafts and discarded responses are counted."""
    found: dict[str, dict[str, Any]] = {}

    def take(person: Any, question: str, value: Any, status: Any) -> None:
        if person is None:
            raise refuse(row.origin, f"responses.{question}.user_id", None, "every label has a person")
        if status not in (None, "submitted"):
            unsaid.add(f"response that is {status}")
        else:
            found.setdefault(str(person), {})[question] = value

    responses: Any = record.get("responses") or {}
    if isinstance(responses, Mapping):
        for question, given in cast("Mapping[str, Sequence[Mapping[str, Any]]]", responses).items():
            for response in given:
                take(response.get("user_id"), question, response.get("value"), response.get("status"))
        return found
    for response in cast("Sequence[Mapping[str, Any]]", responses):
        for question, value in cast("Mapping[str, Any]", response.get("values") or {}).items():
            inner: Any = value
            value = inner.get("value") if isinstance(inner, Mapping) else inner
            take(response.get("user_id"), question, value, response.get("status"))
    return found


def _decision(row: Row, names: Sequence[str], values: Mapping[str, Any], unsaid: Unsaid) -> Decision | None:
    """What one person said of an item; None where nothing of it is understood."""
    said: dict[str, Any] = {}
    axes: dict[str, int] = {}
    for question, value in values.items():
        if question == "reason" and isinstance(value, str):
            said["reason"] = value
        elif question == "edit" and isinstance(value, str):
            said["edit"] = value
        elif isinstance(value, list):
            said |= _ranking(row, question, names, cast("Sequence[Any]", value))
        elif isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 7 and len(names) == 2:
            axes[question] = value - _MIDDLE
        elif (verdict := _verdict(str(value), names)) is not None:
            said |= verdict
        else:
            unsaid.add(f"question '{question}'")
    if "verdict" not in said and not names and "edit" in said:
        said["verdict"] = "written"
    if "verdict" not in said:
        for part in (*said, *axes):
            unsaid.add(f"'{part}' without a verdict")
        return None
    return Decision(**said, axes=axes or None if said["verdict"] == "step" else None)


def _verdict(value: str, names: Sequence[str]) -> dict[str, Any] | None:
    word = value.strip().casefold()
    if len(names) == 1:
        return {"verdict": "thumb", "outcome": _THUMBS[word]} if word in _THUMBS else None
    if len(names) != 2:
        return None
    if word in ("both_bad", "both bad"):
        return {"verdict": "both_bad"}
    steps = {names[0].casefold(): -1, names[1].casefold(): 1}
    step = _STEPS.get(word, steps.get(word, _SIDES.get(word) if word not in _STEPS else None))
    return None if step is None else {"verdict": "step", "outcome": step}


def _ranking(row: Row, question: str, names: Sequence[str], value: Sequence[Any]) -> dict[str, Any]:
    """`[{value: NAME, rank: 1}, …]`, with the names of the fields."""
    entries = [cast("Mapping[str, Any]", entry) for entry in value if isinstance(entry, Mapping) and "value" in entry]
    ranks = {str(entry["value"]): entry.get("rank") for entry in entries}
    if set(ranks) != set(names) or not all(isinstance(rank, int) for rank in ranks.values()):
        raise refuse(row.origin, f"responses.{question}", value, f"a ranking has a rank for each of {', '.join(names)}")
    places = [cast(int, ranks[name]) for name in names]
    if len(names) == 2:
        return {"verdict": "step", "outcome": (places[0] > places[1]) - (places[0] < places[1])}
    # Ranks may have gaps; places count the better ones.
    return {"verdict": "ranking", "ranking": tuple(1 + sum(other < own for other in places) for own in places)}


def argilla_record(labelled: Labelled, labels: Sequence[PersonLabel]) -> dict[str, Any]:
    """A record of ours."""
    names = [f"answer_{place}" for place in range(1, len(labelled.answers) + 1)]
    responses: dict[str, list[dict[str, Any]]] = {}

    def say(question: str, person: str, value: Any) -> None:
        responses.setdefault(question, []).append({"value": value, "user_id": person, "status": "submitted"})

    for label in labels:
        decision = label.decision
        match decision.verdict:
            case "step":
                say("preference", label.person, str(decision.outcome))
            case "both_bad":
                say("preference", label.person, "both_bad")
            case "thumb":
                say("thumb", label.person, "good" if (decision.outcome or 0) > 0 else "bad")
            case "ranking":
                ranks = decision.ranking or ()
                ranked = [{"value": name, "rank": rank} for name, rank in zip(names, ranks, strict=True)]
                say("ranking", label.person, ranked)
            case _:
                pass
        for axis, step in sorted((decision.axes or {}).items()):
            say(axis, label.person, step + _MIDDLE)
        for question, text in (("edit", decision.edit), ("reason", decision.reason)):
            if text is not None:
                say(question, label.person, text)
    texts = {name: plain(answer) for name, answer in zip(names, labelled.answers, strict=True)}
    return {
        "id": labelled.item.key,
        "fields": {"prompt": plain(labelled.prompt), **texts},
        "metadata": {"heldout": labelled.item.is_heldout},
        "suggestions": {},
        "responses": responses,
    }
