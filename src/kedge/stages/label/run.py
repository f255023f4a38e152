"""Tasks into the store of labels; and when people have done them, an export that is sealed into the run. Judges need no
store: `judged`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.core.errors import ConfigError, ContractStop, Waiting
from kedge.core.files import write_json, write_text
from kedge.report.pages import render_page
from kedge.stages.label.judged import AGREEMENT, REPORT, label_by_judges
from kedge.stages.label.settings import LabelSettings, People
from kedge.stages.shared.context import Context
from kedge.stages.shared.people import open_people

if TYPE_CHECKING:
    from kedge.label.agreement import Agreement
    from kedge.label.database import Store
    from kedge.label.export import Exported
    from kedge.label.progress import Progress
    from kedge.label.projects import Project
    from kedge.label.status import PersonStatus

_QUESTIONS = ("pair", "rank", "thumb")
"""Whose agreement is asked for, the first that there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """What came of the tasks."""

    as_of: int
    progress: Progress
    agreement: Mapping[str, Agreement]
    exports: Mapping[str, Exported]
    people: Sequence[PersonStatus]

    @property
    def headline(self) -> Agreement | None:
        return next((self.agreement[name] for name in _QUESTIONS if name in self.agreement), None)


def run(context: Context, settings: LabelSettings) -> Mapping[str, Path]:
    """Ask judges; or add the tasks, wait for people, export. The first process speaks to them."""
    label = label_by_judges if settings.judges else _run
    return context.once(lambda: label(context, settings))


def _people(settings: LabelSettings) -> People:
    assert settings.people is not None
    return settings.people


def _run(context: Context, settings: LabelSettings) -> Mapping[str, Path]:
    by = _people(settings)
    with open_people(by.address(context.recipe_folder), create=by.guideline is not None) as store:
        from kedge.label.incoming import read_items
        from kedge.label.items import add_items
        from kedge.label.progress import progress_of

        project = _project(context, settings, store)
        drafts = read_items(context.input("data")).drafts
        own = replace(
            project,
            settings=replace(
                project.settings, wanted=by.wanted, overlap_share=by.overlap.share, overlap_wanted=by.overlap.wanted
            ),
        )
        added = add_items(store, own, drafts, origin=str(context.folder))
        if added.items:
            context.event("info", "label.added", f"{added.items:,} tasks are added to project {project.name}")
        if by.gold is not None:
            add_items(store, project, read_items(str(context.recipe_folder / by.gold), gold=True).drafts)
        progress = progress_of(store, project, drafts)
        if progress.share < settings.enough:
            raise Waiting(_waiting(store, project, progress, settings))
        labels = _export(context, settings, store, project, progress)
    write_json(context.folder / AGREEMENT, _numbers(settings, labels))
    write_text(context.folder / REPORT, _page(settings, labels))
    _tell(context, labels)
    _refuse(settings, labels)
    return {name: context.folder / f"{name}.jsonl" for name in labels.exports}


def _project(context: Context, settings: LabelSettings, store: Store) -> Project:
    from kedge.label.projects import all_names, find_project, new_project

    by = _people(settings)
    if by.guideline is None or by.project in all_names(store):
        return find_project(store, by.project)
    file = context.recipe_folder / by.guideline
    try:
        words = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"by.guideline: {file}: {error}; name a file of text") from error
    context.event("info", "label.project", f"project {by.project} is made: asks {', '.join(settings.questions)}")
    return new_project(store, by.project, settings.questions, words)


def _waiting(store: Store, project: Project, progress: Progress, settings: LabelSettings) -> str:
    from kedge.label.status import status

    now = status(store, project)
    missing = progress.wanted - progress.given
    hours = f", about {missing * now.seconds / 3600:,.1f} h of people" if now.seconds else ""
    skipped = (
        f" {progress.skipped:,} tasks that lack labels were skipped by somebody: a lower `enough` goes on without them."
        if progress.skipped
        else ""
    )
    return (
        f"waiting for people: {progress.given:,} of {progress.wanted:,} labels of project {project.name} are there "
        f"({progress.done:,} of {len(progress.items):,} tasks done), {missing:,} are missing{hours}.{skipped} "
        f"`kedge label status {project.name}` tells more; when they are done, `kedge run RECIPE --resume` goes on"
    )


def _export(context: Context, settings: LabelSettings, store: Store, project: Project, progress: Progress) -> _Labels:
    from kedge.label import tables
    from kedge.label.agreement import read_agreement
    from kedge.label.audit import last_seq
    from kedge.label.export import EXPORTS, Settling, export_labels
    from kedge.label.status import status

    as_of = store.read(lambda connection: last_seq(connection, tables.judgment))
    settling = Settling(settle=settings.settle, ties=settings.ties, margins=settings.margins)

    def export(kind: str, name: str, *, heldout: bool) -> Exported:
        return export_labels(
            store,
            project,
            context.folder / f"{name}.jsonl",
            kind=kind,
            as_of=as_of,
            heldout=heldout,
            settling=settling,
            items=progress.items,
            force=True,
        )

    exports = {kind: export(kind, kind, heldout=False) for kind in EXPORTS}
    exports["heldout"] = export("pairs", "heldout", heldout=True)
    agreement = store.read(lambda connection: read_agreement(connection, project, as_of=as_of, items=progress.items))
    return _Labels(
        as_of=as_of,
        progress=progress,
        agreement=agreement,
        exports=exports,
        people=_nameless(store, project, status(store, project, whole=True).people),
    )


def _nameless(store: Store, project: Project, people: Sequence[PersonStatus]) -> list[PersonStatus]:
    """With the names of exports: a run is copied to where addresses do not belong."""
    from kedge.label.accounts import pseudonyms

    names = pseudonyms(store, project)
    return [replace(person, name=names.get(person.name, person.name)) for person in people]


def _numbers(settings: LabelSettings, labels: _Labels) -> dict[str, Any]:
    return {
        "project": _people(settings).project,
        "as_of": labels.as_of,
        "settle": settings.settle,
        "ties": settings.ties,
        "margins": settings.margins,
        "tasks": len(labels.progress.items),
        "labels": labels.progress.given,
        "wanted": labels.progress.wanted,
        "agreement": {question: asdict(agreement) for question, agreement in labels.agreement.items()},
        "people": [asdict(person) for person in labels.people],
        "exports": {name: asdict(exported) for name, exported in labels.exports.items()},
        "need": settings.need.model_dump(),
    }


def _page(settings: LabelSettings, labels: _Labels) -> str:
    people = [(person, list(person.care.worries()) if person.care else []) for person in labels.people]
    return render_page(
        "kedge.stages.label",
        "page.html.j2",
        settings=settings,
        labels=labels,
        people=people,
        problems=_unmet(settings, labels),
    )


def _tell(context: Context, labels: _Labels) -> None:
    for question, agreement in labels.agreement.items():
        context.say(f"  agreement on {question}: {agreement.in_words()}")
    made = ", ".join(f"{exported.rows:,} {name}" for name, exported in labels.exports.items() if exported.rows)
    context.event("info", "label.exported", f"as of {labels.as_of}: {made or 'nothing'}", as_of=labels.as_of)


def _unmet(settings: LabelSettings, labels: _Labels) -> list[str]:
    problems: list[str] = []
    need, headline = settings.need, labels.headline
    if need.labels is not None and labels.progress.given < need.labels:
        problems.append(f"{labels.progress.given:,} labels, and need.labels is {need.labels:,}")
    if need.alpha is not None and headline is None:
        problems.append(f"no two people labelled the same task, and need.alpha is {need.alpha}")
    elif need.alpha is not None and headline is not None and headline.alpha < need.alpha:
        problems.append(f"{headline.in_words()}, and need.alpha is {need.alpha}")
    return problems


def _refuse(settings: LabelSettings, labels: _Labels) -> None:
    if problems := _unmet(settings, labels):
        name = _people(settings).project
        raise ContractStop(
            f"labels of {name}: {'; '.join(problems)}. `kedge label calibrate {name}` makes a session of the worst "
            "disagreements; with more labels, --resume looks again"
        )
