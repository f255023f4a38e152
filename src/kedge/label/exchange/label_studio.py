"""Label Studio's tasks: `data`, `annotations[].result[]` of type pairwise, rating, choices, ranker, textarea.

Ours go out with `pairwise` and its `strength` (a rating from 1 to 3), `choices` for ties, both-bad and thumbs, `ranker`
for orders, a rating from 1 to 7 an axis, and `textarea` for `edit` and `reason`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from kedge.data.decode import Row
from kedge.data.examples import Messages
from kedge.data.messages import as_messages
from kedge.label.exchange.argilla import PROMPTS
from kedge.label.exchange.records import Foreign, LabelledItem, PersonLabel, Unsaid, plain, read_rows, refuse
from kedge.label.export import Labelled
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.questions import Decision

TOOL = "label-studio"
_SIDES = {"left": -1, "right": 1}
_CHOICES: Mapping[str, dict[str, Any]] = {
    "tie": {"verdict": "step", "outcome": 0},
    "both bad": {"verdict": "both_bad"},
    "good": {"verdict": "thumb", "outcome": 1},
    "bad": {"verdict": "thumb", "outcome": -1},
}
_MIDDLE = 4
CANNOT = (
    "ties in rankings", "idle seconds", "propensity", "round", "models of answers", "flags", "guideline version",
)  # fmt: skip
"""What these tasks have no place for."""


def is_label_studio(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("data"), Mapping) and "annotations" in fields


def read_label_studio(rows: Iterator[Row]) -> Foreign:
    """Tasks with the annotations of each person; what is not understood is counted."""
    return read_rows(rows, TOOL, _item)


def _item(row: Row, task: Mapping[str, Any], unsaid: Unsaid) -> LabelledItem:
    data = cast("Mapping[str, Any]", task["data"])
    name = next((name for name in PROMPTS if name in data), None)
    if name is None:
        raise refuse(row.origin, "data", list(data), f"one of its fields is the prompt: {', '.join(PROMPTS)}")
    listed: Any = data.get("answers")
    texts: Sequence[Any] = (
        cast("Sequence[Any]", listed)
        if isinstance(listed, list)
        else [value for other, value in data.items() if other not in (name, "heldout") and isinstance(value, str)]
    )
    if task.get("predictions"):
        unsaid.add("prediction: not a person's")
    draft = Draft(
        prompt=as_messages(data[name], text_role="user", field=name),
        answers=tuple(DraftAnswer(text=_answer(text)) for text in texts),
        is_heldout=bool(data.get("heldout", False)),
        origin=str(row.origin),
    )
    labels: list[PersonLabel] = []
    for annotation in cast("Sequence[Mapping[str, Any]]", task["annotations"]):
        decision = _decision(row, annotation, len(texts), unsaid)
        if decision is not None:
            labels.append(PersonLabel(person=_who(row, annotation), decision=decision))
    return LabelledItem(draft=draft, labels=tuple(labels))


def _answer(text: Any) -> Messages:
    value: Any = cast("Mapping[str, Any]", text).get("body") if isinstance(text, Mapping) else text
    return as_messages(value, text_role="assistant", field="answers")


def _who(row: Row, annotation: Mapping[str, Any]) -> str:
    """By number where there is one: addresses do not come in."""
    who: Any = annotation.get("completed_by")
    if isinstance(who, Mapping):
        who = cast("Mapping[str, Any]", who).get("id")
    if who is None:
        raise refuse(row.origin, "annotations.completed_by", who, "every label has a person")
    return str(who)


def _decision(row: Row, annotation: Mapping[str, Any], answers: int, unsaid: Unsaid) -> Decision | None:
    if annotation.get("was_cancelled"):
        unsaid.add("annotation that was cancelled")
        return None
    said: dict[str, Any] = {}
    axes: dict[str, int] = {}
    strength = 1
    for result in cast("Sequence[Mapping[str, Any]]", annotation.get("result") or ()):
        name, value = str(result.get("from_name", "")), cast("Mapping[str, Any]", result.get("value") or {})
        match result.get("type"):
            case "pairwise":
                said |= {"verdict": "step", "outcome": _SIDES[_side(row, value)]}
            case "rating" if name == "strength" and value.get("rating") in (1, 2, 3):
                strength = int(value["rating"])
            case "rating" if answers == 2 and value.get("rating") in range(1, 8):
                axes[name] = int(value["rating"]) - _MIDDLE
            case "choices" if (chosen := _chosen(value, answers)) is not None:
                said |= chosen
            case "ranker":
                said |= _ranking(row, value, answers)
            case "textarea" if name in ("edit", "reason"):
                said[name] = "\n".join(map(str, cast("Sequence[Any]", value.get("text") or ())))
            case kind:
                unsaid.add(f"result '{name}' of type {kind}")
    if said.get("verdict") == "step":
        said["outcome"] *= strength
    if "verdict" not in said and answers == 0 and "edit" in said:
        said["verdict"] = "written"
    if "verdict" not in said:
        unsaid.add("annotation without a verdict")
        return None
    seconds = annotation.get("lead_time")
    return Decision(
        **said,
        axes=axes or None if said["verdict"] == "step" else None,
        seconds=float(seconds) if isinstance(seconds, int | float) and seconds >= 0 else 0.0,
    )


def _side(row: Row, value: Mapping[str, Any]) -> str:
    side = value.get("selected")
    if side not in _SIDES:
        raise refuse(row.origin, "result.value.selected", side, "a pairwise result selects left or right")
    return str(side)


def _chosen(value: Mapping[str, Any], answers: int) -> dict[str, Any] | None:
    choices = cast("Sequence[Any]", value.get("choices") or ())
    word = str(choices[0]).strip().casefold() if len(choices) == 1 else ""
    said = _CHOICES.get(word)
    fits = said is not None and (said["verdict"] == "thumb") == (answers == 1)
    return said if fits else None


def _ranking(row: Row, value: Mapping[str, Any], answers: int) -> dict[str, Any]:
    """`{ranker: {rank: [NAME, …]}}`, best first; names end in the number of the answer, from 1 on."""
    buckets = cast("Mapping[str, Sequence[Any]]", value.get("ranker") or {})
    order = [str(name) for names in buckets.values() for name in names]
    try:
        places = [int(name.rsplit("_", 1)[-1]) - 1 for name in order]
    except ValueError:
        places = []
    if sorted(places) != list(range(answers)):
        raise refuse(row.origin, "result.value.ranker", order, f"it orders answer_1 to answer_{answers}")
    ranking = [0] * answers
    for rank, place in enumerate(places, start=1):
        ranking[place] = rank
    return {"verdict": "ranking", "ranking": tuple(ranking)}


def label_studio_task(labelled: Labelled, labels: Sequence[PersonLabel], unsaid: Unsaid) -> dict[str, Any]:
    """A task of ours."""
    annotations = [
        {"completed_by": label.person, "was_cancelled": False, "lead_time": label.decision.seconds, "result": result}
        for label in labels
        if (result := list(_results(label.decision, unsaid)))
    ]
    data = {
        "prompt": plain(labelled.prompt),
        "answers": [plain(answer) for answer in labelled.answers],
        "heldout": labelled.item.is_heldout,
        "key": labelled.item.key,
    }
    return {"data": data, "annotations": annotations, "predictions": []}


def _results(decision: Decision, unsaid: Unsaid) -> Iterator[dict[str, Any]]:
    def result(name: str, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        return {"from_name": name, "to_name": "answers", "type": kind, "value": dict(value)}

    outcome, ranking = decision.outcome or 0, decision.ranking
    match decision.verdict:
        case "step" if outcome:
            yield result("preference", "pairwise", {"selected": "left" if outcome < 0 else "right"})
            yield result("strength", "rating", {"rating": abs(outcome)})
        case "step":
            yield result("preference", "choices", {"choices": ["tie"]})
        case "both_bad":
            yield result("preference", "choices", {"choices": ["both bad"]})
        case "thumb":
            yield result("thumb", "choices", {"choices": ["good" if outcome > 0 else "bad"]})
        case "ranking" if ranking is not None:
            if len(set(ranking)) < len(ranking):
                unsaid.add("ranking with ties: label-studio orders strictly")
                return
            order = sorted(range(len(ranking)), key=lambda place: ranking[place])
            yield result("ranking", "ranker", {"ranker": {"rank": [f"answer_{place + 1}" for place in order]}})
        case _:
            pass
    for axis, step in sorted((decision.axes or {}).items()):
        yield result(axis, "rating", {"rating": step + _MIDDLE})
    for name, text in (("edit", decision.edit), ("reason", decision.reason)):
        if text is not None:
            yield result(name, "textarea", {"text": [text]})
