"""Readers of rated and labelled answers in foreign layouts, and of message trees: rankings and thumbs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.data.foreign.labels import finite, label_of
from kedge.data.foreign.pairs import Fields, Pick, Rows, canonical, steer_prompt
from kedge.data.messages import shown

STEER_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_MOST_TURNS = 200
FEEDBACK_SCORES = ("fine-grained_score", "overall_score")


def by_prompt(fields: Fields) -> str:
    return str(fields.get("prompt"))


def helpsteer(rows: Rows, pick: Pick) -> list[Any]:
    """HelpSteer and HelpSteer2: one rated response a row; those to one prompt are ranked by one attribute."""
    attribute = pick.get("score", STEER_ATTRIBUTES[0])
    return _ranked(rows, steer_prompt(rows[0]["prompt"]), [row["response"] for row in rows], attribute)


def rated(rows: Rows, pick: Pick) -> list[Any]:
    """Answers with a score, one a row, whose columns were named: those to one prompt are ranked by it."""
    return _ranked(rows, rows[0]["prompt"], [row["completion"] for row in rows], "score")


def _ranked(rows: Rows, prompt: Any, answers: list[Any], score: str) -> list[Any]:
    """None where a prompt has one answer only: there is nothing to compare it with."""
    scores = [finite(row.get(score), score) for row in rows]
    rest = {name: value for name, value in rows[0].items() if name == "system"}
    return [{"prompt": prompt, "answers": answers, "scores": scores, **rest}] if len(rows) > 1 else []


def ultrafeedback(rows: Rows, pick: Pick) -> list[Any]:
    """UltraFeedback as it was collected: four completions with ratings; `fine-grained_score` is their mean."""
    (fields,) = rows
    score = pick.get("score", FEEDBACK_SCORES[0])
    completions = cast(list[Mapping[str, Any]], fields["completions"])
    scores = [finite(item.get(score), f"completions[{number}].{score}") for number, item in enumerate(completions)]
    answers = [item["response"] for item in completions]
    used = ("instruction", "completions")
    return [canonical(fields, used, prompt=fields["instruction"], answers=answers, scores=scores)]


def nectar(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    items = cast(list[Mapping[str, Any]], fields["answers"])
    ranks = [finite(item.get("rank"), f"answers[{number}].rank") for number, item in enumerate(items)]
    answers = [item["answer"] for item in items]
    return [canonical(fields, ("prompt", "answers"), prompt=fields["prompt"], answers=answers, rank=ranks)]


def beavertails(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    is_safe = label_of(fields["is_safe"])
    if is_safe is None:
        raise DataError(f"'is_safe' is {shown(fields['is_safe'])}; it must be true or false")
    own = {"prompt": fields["prompt"], "completion": fields["response"], "label": is_safe}
    return [canonical(fields, ("prompt", "response"), **own)]


def stepwise(rows: Rows, pick: Pick) -> list[Any]:
    """Steps with a label each (TRL's stepwise supervision): an answer is good where all of its steps are."""
    (fields,) = rows
    steps, labels = fields["completions"], fields["labels"]
    if not steps or len(steps) != len(labels):
        raise DataError(f"{len(steps)} steps in 'completions' and {len(labels)} 'labels'; there must be one a step")
    verdicts = [label_of(label) for label in labels]
    if None in verdicts:
        raise DataError(f"'labels' has {shown(labels[verdicts.index(None)])}; each must be true or false")
    own = {"prompt": fields["prompt"], "completion": "\n".join(map(str, steps)), "label": all(verdicts)}
    kept = {name: value for name, value in fields.items() if name not in ("prompt", "completions", "labels")}
    return [{**own, "extra": {**kept, "steps": steps, "step_labels": verdicts}}]


def verl(rows: Rows, pick: Pick) -> list[Any]:
    """verl: `ground_truth` is the checkable answer, unless a model judges (`style: model`), which does not read it."""
    (fields,) = rows
    reward = cast(Mapping[str, Any], fields["reward_model"])
    truth = None if reward.get("style") == "model" else _only_truth(reward.get("ground_truth"))
    own = {} if truth is None else {"answer": truth}
    return [canonical(fields, ("prompt",), prompt=fields["prompt"], **own)]


def _only_truth(truth: Any) -> Any:
    """The one accepted answer: as it is, in a list of one, or under `target` (Search-R1)."""
    accepted = cast(Mapping[str, Any], truth)["target"] if isinstance(truth, Mapping) and "target" in truth else truth
    if isinstance(accepted, list) and len(cast(list[Any], accepted)) == 1:
        accepted = accepted[0]
    if accepted is None or (isinstance(accepted, str | int | float) and not isinstance(accepted, bool)):
        return accepted
    raise DataError(
        f"'reward_model.ground_truth' is {shown(truth)}; a checkable answer must be one text or number. To read the "
        "rows as prompts without it: columns: {ignore: [reward_model]}"
    )


def tree_id(fields: Fields) -> str:
    return str(fields["message_tree_id"])


def oasst_flat(rows: Rows, pick: Pick) -> list[Any]:
    """OASST as a table of messages: the rows of one tree, joined by `parent_id`."""
    nodes = {row["message_id"]: {**row, "replies": []} for row in rows}
    roots: list[Any] = []
    for node in nodes.values():
        parent = node.get("parent_id")
        if parent is None:
            roots.append(node)
        elif parent in nodes:
            nodes[parent]["replies"].append(node)
        else:
            raise DataError(f"message '{node['message_id']}' answers '{parent}', which is not in the file")
    waiting, reached = list(roots), 0
    while waiting:
        reached += 1
        waiting.extend(waiting.pop()["replies"])
    if reached < len(nodes):
        raise DataError(f"{len(nodes) - reached} messages of the tree answer each other in a circle")
    return [row for root in roots for row in _compared(root, [])]


def oasst_tree(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    return list(_compared(fields["prompt"], []))


def _compared(node: Mapping[str, Any], before: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """A ranking wherever several answers to the same message have places (rank 0 is best)."""
    if node.get("deleted"):
        return
    if len(before) > _MOST_TURNS:
        raise DataError(f"the tree is more than {_MOST_TURNS} messages deep")
    role = "user" if node["role"] == "prompter" else node["role"]
    path = [*before, {"role": role, "content": node["text"]}]
    replies = [reply for reply in node.get("replies") or () if not reply.get("deleted")]
    placed = [reply for reply in replies if reply["role"] == "assistant" and reply.get("rank") is not None]
    if role == "user" and len(placed) > 1:
        ranks = [finite(reply["rank"], "rank") + 1 for reply in placed]
        yield {"prompt": path, "answers": [reply["text"] for reply in placed], "rank": ranks}
    for reply in replies:
        yield from _compared(reply, path)
