"""What judges said of tasks, as examples: pairs, rankings, held-out pairs, agreement.json, judgements.jsonl, a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kedge.core.errors import ContractStop
from kedge.core.files import write_json, write_text
from kedge.core.urls import redacted
from kedge.data.converting import to_fields
from kedge.data.examples import Origin, Pair, Ranking
from kedge.data.writing import encode, row_writer
from kedge.feedback.agreement import AgreementInterval
from kedge.feedback.alt_test import Choice
from kedge.label.incoming import Draft
from kedge.label.settle import Settled
from kedge.report.pages import render_page
from kedge.stages.label.beside import PeopleOf, beside_people, people_of
from kedge.stages.label.deciding import fit_panel, panel_agreement, ranks_of, settle
from kedge.stages.label.figures import by_principle, judge_figures, prompt_numbers
from kedge.stages.label.judging import Comparison, Judged, ask, open_judges, read_tasks
from kedge.stages.label.settings import LabelSettings
from kedge.stages.shared.context import Context

AGREEMENT, REPORT, JUDGEMENTS = "agreement.json", "label-report.html", "judgements.jsonl"
_NOWHERE = Origin("", 0)
_LARGE = 3
"""Times a small margin."""
_NEVER = ("thumbs", "demonstrations")
"""What judges do not make: the files are there, and empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file of examples. `left_out` counts the comparisons without a row, by why."""

    rows: int
    hash: str
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Tasks and what is settled on every comparison of theirs."""

    drafts: Sequence[Draft]
    comparisons: Sequence[Comparison]
    panel: Sequence[Judged]
    settled: Sequence[Settled | None]
    agreement: AgreementInterval | None
    people: PeopleOf = field(default_factory=dict[int, Mapping[str, Choice]])
    """What people said of the same comparisons."""
    files: dict[str, Written] = field(default_factory=dict[str, Written])

    @property
    def labels(self) -> int:
        return sum(label is not None for label in self.settled)


def label_by_judges(context: Context, settings: LabelSettings) -> Mapping[str, Path]:
    """Ask every judge about every comparison, settle, write."""
    judges = open_judges(settings, context)
    for judge in judges:
        if reason := judge.trust.get("without"):
            message = f"{judge.panelist.name} labels without a trust report: {reason}"
            context.event("warning", "label.untrusted", message)
    drafts, comparisons = read_tasks(context.input("data"))
    people = people_of(context.input("beside"), drafts, comparisons) if context.inputs("beside") else {}
    panel = [ask(context, judge, drafts, comparisons) for judge in judges]
    verdicts = [judged.verdicts for judged in panel]
    clamp = any(judged.judge.settings.is_clamped for judged in panel)
    labelled = Labelled(
        drafts=drafts,
        comparisons=comparisons,
        panel=panel,
        settled=settle(verdicts, settings.settle, clamp=clamp),
        agreement=panel_agreement(verdicts, [prompt_numbers(drafts)[one.task] for one in comparisons]),
        people=people,
    )
    _write_files(context.folder, settings, labelled)
    numbers = _numbers(settings, labelled)
    write_json(context.folder / AGREEMENT, numbers)
    page = render_page("kedge.stages.label", "judged.html.j2", numbers=numbers, problems=_unmet(settings, labelled))
    write_text(context.folder / REPORT, page)
    _tell(context, labelled)
    if problems := _unmet(settings, labelled):
        raise ContractStop(f"labels of {context.name}: {'; '.join(problems)}. Every reply is kept")
    return {name: context.folder / f"{name}.jsonl" for name in labelled.files}


def _write_files(folder: Path, settings: LabelSettings, labelled: Labelled) -> None:
    pairs, heldout, rankings = _Rows(), _Rows(), _Rows()
    by_task: dict[int, list[int]] = {}
    for number, comparison in enumerate(labelled.comparisons):
        by_task.setdefault(comparison.task, []).append(number)
    for task, numbers in by_task.items():
        rows = heldout if labelled.drafts[task].is_heldout else pairs
        for number in numbers:
            _add_pair(rows, settings, labelled, number, has_margin=len(numbers) == 1)
        if not labelled.drafts[task].is_heldout:
            _add_ranking(rankings, labelled, task, numbers)
    tables = {"pairs": pairs, "rankings": rankings, **{name: _Rows() for name in _NEVER}, "heldout": heldout}
    for name, rows in tables.items():
        labelled.files[name] = rows.write(folder / f"{name}.jsonl")
    with row_writer(folder / JUDGEMENTS) as write:
        for row in _judgements(labelled):
            write(row)


class _Rows:
    """Rows of a file as they come, and what has none."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()

    def write(self, file: Path) -> Written:
        digest = blake2b(digest_size=16)
        with row_writer(file) as write:
            for row in self.rows:
                write(row)
                digest.update(encode(row) + b"\n")
        return Written(rows=len(self.rows), hash=digest.hexdigest(), left_out=dict(self.left_out))


def _add_pair(rows: _Rows, settings: LabelSettings, labelled: Labelled, number: int, *, has_margin: bool) -> None:
    label, comparison = labelled.settled[number], labelled.comparisons[number]
    if label is None:
        rows.left_out["without a readable verdict"] += 1
        return
    if label.better is None and settings.ties == "drop":
        rows.left_out["ties" if label.consistent else "ties: orders or judges disagree"] += 1
        return
    draft, places = labelled.drafts[comparison.task], (comparison.first, comparison.second)
    chosen = label.better or 0
    better, worse = draft.answers[places[chosen]], draft.answers[places[1 - chosen]]
    models = {"chosen_model": better.model, "rejected_model": worse.model}
    axes = _axes(labelled, number, chosen)
    scale = _LARGE if settings.margins == "large" else 1
    pair = Pair(
        prompt=draft.prompt,
        chosen=better.text,
        rejected=worse.text,
        margin=scale * label.margin if has_margin and label.better is not None else None,
        origin=_NOWHERE,
        extra={name: model for name, model in models.items() if model is not None} | ({"axes": axes} if axes else {}),
    )
    rows.rows.append(to_fields(pair) | {"certainty": label.certainty} | _about(labelled, number, label))


def _about(labelled: Labelled, number: int, label: Settled) -> dict[str, Any]:
    draft = labelled.drafts[labelled.comparisons[number].task]
    named = {judged.principles[number] for judged in labelled.panel} - {None}
    readable = [judged for judged in labelled.panel if judged.verdicts[number].preference is not None]
    return {
        "consistent": label.consistent,
        "labels": len(readable),
        "judges": [judged.judge.panelist.name for judged in readable],
        "round": draft.round,
        **({"principle": "+".join(sorted(map(str, named)))} if named else {}),
        **({} if draft.propensity is None else {"propensity": draft.propensity}),
    }


def _axes(labelled: Labelled, number: int, chosen: int) -> dict[str, float]:
    """From −1 to 1 towards the chosen answer, the mean over judges."""
    values: dict[str, list[float]] = {}
    for judged in labelled.panel:
        for axis, preference in judged.verdicts[number].axes.items():
            values.setdefault(axis, []).append((2 * preference - 1) * (1 if chosen == 0 else -1))
    return {axis: sum(own) / len(own) for axis, own in values.items()}


def _add_ranking(rows: _Rows, labelled: Labelled, task: int, numbers: Sequence[int]) -> None:
    draft = labelled.drafts[task]
    labels = {number: label for number in numbers if (label := labelled.settled[number]) is not None}
    if not labels:
        rows.left_out["without a readable verdict"] += 1
        return
    preferences = {
        (labelled.comparisons[number].first, labelled.comparisons[number].second): _preference(label)
        for number, label in labels.items()
    }
    models = [answer.model for answer in draft.answers]
    ranking = Ranking(
        prompt=draft.prompt,
        answers=tuple(answer.text for answer in draft.answers),
        rank=ranks_of(len(draft.answers), preferences),
        origin=_NOWHERE,
        extra={"models": models} if any(models) else {},
    )
    about: dict[str, Any] = {"consistent": all(label.consistent for label in labels.values()), "round": draft.round}
    if len(numbers) == 1:
        about = {"certainty": labels[numbers[0]].certainty, **_about(labelled, numbers[0], labels[numbers[0]])}
    rows.rows.append(to_fields(ranking) | about)


def _preference(label: Settled) -> float:
    return 0.5 if label.better is None else 1.0 - label.better


def _preferences(labelled: Labelled) -> list[float | None]:
    """What is settled on each comparison, of its first answer."""
    return [None if label is None else _preference(label) for label in labelled.settled]


def _judgements(labelled: Labelled) -> list[dict[str, Any]]:
    """Every vote of every judge on every comparison, of the first answer: 1, ½ or 0 in each order."""
    return [
        {
            "judge": judged.judge.panelist.name,
            "task": comparison.task,
            "answers": [comparison.first, comparison.second],
            "principle": judged.principles[number],
            "as_first": vote.as_a,
            "as_second": vote.as_b,
            "probability": vote.probability,
            **({"axes": dict(vote.axes)} if vote.axes else {}),
            **({"failed": vote.reason} if vote.reason else {}),
        }
        for judged in labelled.panel
        for number, comparison in enumerate(labelled.comparisons)
        for vote in judged.votes[number]
    ]


def _numbers(settings: LabelSettings, labelled: Labelled) -> dict[str, Any]:
    panel = labelled.panel
    accuracy = fit_panel([judged.verdicts for judged in panel]).accuracy.tolist() if len(panel) > 1 else [None]
    judges: list[dict[str, Any]] = []
    for judged, share in zip(panel, accuracy, strict=True):
        judge = judged.judge
        judges.append(
            {
                "name": judge.panelist.name,
                "model": judge.settings.model,
                "url": redacted(judge.settings.url),
                "trust": dict(judge.trust),
                "votes": judge.settings.votes,
                "estimate": asdict(judged.estimate),
                "spent": asdict(judge.panelist.calls.spent),
                "accuracy": share,
                **_beside(labelled, [verdict.preference for verdict in judged.verdicts]),
                **judge_figures(judged, labelled.drafts, labelled.comparisons),
            }
        )
    return {
        "by": "judge",
        "settle": settings.settle,
        "ties": settings.ties,
        "margins": settings.margins,
        "tasks": len(labelled.drafts),
        "comparisons": len(labelled.comparisons),
        "labels": labelled.labels,
        "agreement": {"panel": asdict(labelled.agreement)} if labelled.agreement else {},
        **_beside(labelled, _preferences(labelled)),
        "judges": judges,
        "usd": sum(judge["spent"]["usd"] for judge in judges),
        "budget": settings.budget and settings.budget.model_dump(),
        "principles": by_principle(panel, labelled.drafts, labelled.comparisons, labelled.settled),
        "exports": {name: asdict(written) for name, written in labelled.files.items()},
        "need": settings.need.model_dump(),
    }


def _beside(labelled: Labelled, preferences: Sequence[float | None]) -> dict[str, Any]:
    """κ and agreement with people; None where they labelled none of the same comparisons."""
    if not labelled.people:
        return {"kappa": None, "people_agreement": None}
    figures = beside_people(labelled.people, preferences, labelled.drafts, labelled.comparisons)
    return {"kappa": figures["kappa"], "people_agreement": figures["agreement"]}


def _tell(context: Context, labelled: Labelled) -> None:
    for judged in labelled.panel:
        context.say(f"  {judged.judge.panelist.name}: {judged.judge.panelist.calls.spent.in_words()}")
    if labelled.agreement:
        alpha = labelled.agreement
        context.say(f"  agreement of the judges: α {alpha.value:.2f} [{alpha.low:.2f}, {alpha.high:.2f}]")
    if kappa := _beside(labelled, _preferences(labelled)).get("kappa"):
        interval = f"[{kappa['low']:.2f}, {kappa['high']:.2f}]"
        context.say(f"  κ with people on {kappa['count']:,} comparisons: {kappa['value']:.2f} {interval}")
    made = ", ".join(f"{written.rows:,} {name}" for name, written in labelled.files.items() if written.rows)
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in labelled.files["pairs"].left_out.items())
    context.event("info", "label.judged", f"{made or 'nothing'}{f' (left out: {left_out})' if left_out else ''}")


def _unmet(settings: LabelSettings, labelled: Labelled) -> list[str]:
    need, alpha, problems = settings.need, labelled.agreement, list[str]()
    if not labelled.labels:
        problems.append(
            f"not one of {len(labelled.comparisons):,} comparisons has a verdict that can be read, in both orders: "
            "this judge cannot judge (what it replied is in calls/; a larger model, or more max_tokens, may)"
        )
    if need.labels is not None and labelled.labels < need.labels:
        problems.append(f"{labelled.labels:,} labels, and need.labels is {need.labels:,}")
    if need.alpha is not None and (alpha is None or alpha.value < need.alpha):
        agreement = "no two judges labelled the same" if alpha is None else f"α {alpha.value:.2f}"
        problems.append(f"{agreement}, and need.alpha is {need.alpha}")
    return problems
