"""What exams and evaluations have left in their folders, about two models: paired item by item.

A number is compared only with one that was measured alike: the same items, the same settings of the exam. What is
missing is an error that names what to add; a file that has fewer rows than it should is an error too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

import orjson

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import hash_file
from kedge.core.suggest import did_you_mean
from kedge.evaluate.judged import Judged, prompt_results
from kedge.evaluate.length_control import PromptResult
from kedge.evaluate.win_rates import outcome_of
from kedge.exams.rows import ItemRow, read_rows
from kedge.gate.judgements import JUDGEMENTS, Judgements, read_judgements

Role = Literal["candidate", "baseline"]
EXAM, ITEMS, EVALUATION, ANSWERS = "exam.json", "items.jsonl", "evaluation.json", "answers.jsonl"


class Unmeasured(Exception):
    """What a rule names and nobody has measured, with what to add. It becomes an error with the rule's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder that an `exam` or `evaluate` stage has filled, and what the two models are called in it."""

    folder: Path
    names: Mapping[Role, str]
    """A model that was not asked there has no name."""
    tie: float = 1e-4
    """Scores that differ by no more are equal."""

    @property
    def is_exam(self) -> bool:
        return (self.folder / EXAM).is_file()

    @property
    def is_evaluation(self) -> bool:
        return (self.folder / EVALUATION).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    score: float
    cluster: str
    groups: Mapping[str, str]


Scores = Mapping[str, Item]
"""By item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamFacts:
    """What all models of an exam share."""

    items_hash: str
    main: str
    better: Mapping[str, str]
    """By metric: `more` or `less`."""
    settings: Mapping[str, Any]
    where: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswers:
    """One model's answers to one prompt."""

    scores: Mapping[str, Sequence[float]]
    """By source; answers without a score are left out."""
    length: float
    kl: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """An evaluation: by model, then by prompt."""

    models: Mapping[str, Mapping[str, PromptAnswers]]
    names: Mapping[Role, str]
    measured_from: str
    """The model that KL is measured from."""
    tie: float
    where: Path
    judged: Judgements = field(default_factory=dict[str, Mapping[str, Sequence[Judged]]])
    """What judges said of pairs of answers, `measured_from` being the model that all are compared with."""

    def sources(self) -> set[str]:
        return {
            source
            for own in self.models.values()
            for prompt in own.values()
            for source in prompt.scores
            if prompt.scores[source]
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    exams: Mapping[str, ExamFacts]
    scores: Mapping[tuple[str, str, Role], Scores]
    """By exam, metric and model."""
    evaluations: Sequence[Answers]
    files: Mapping[str, str]
    """Everything that was read, with its hash."""

    def resolve(self, metric: str) -> tuple[str, str]:
        """The exam and the metric that a rule names: `mmlu`, or `xstest.refused_safe`."""
        if metric in self.exams:
            return metric, self.exams[metric].main
        for exam in self.exams:
            if metric.startswith(f"{exam}."):
                name = metric.removeprefix(f"{exam}.")
                known = self.exams[exam].better
                if name not in known:
                    raise Unmeasured(
                        f"{exam} has no metric {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
                    )
                return exam, name
        exam = metric.partition(".")[0]
        there = f"; there are {', '.join(self.exams)}" if self.exams else ""
        raise Unmeasured(
            f"no stage of `from` has the exam {exam!r}{did_you_mean(exam, self.exams)}{there}. Add it to an exam "
            f"stage, exam: {{kind: exam, models: [BASELINE, CANDIDATE], exams: [{exam}]}}, and name the stage in `from`"
        )

    def of(self, exam: str, metric: str, role: Role) -> Scores:
        scores = self.scores.get((exam, metric, role))
        if not scores:
            raise Unmeasured(
                f"the {role} has no item of {exam}.{metric}: let the exam stage ask both models "
                "(models: [BASELINE, CANDIDATE])"
            )
        return scores


@dataclass(slots=True)
class _Collected:
    exams: dict[str, ExamFacts] = field(default_factory=dict[str, ExamFacts])
    scores: dict[tuple[str, str, Role], dict[str, Item]] = field(
        default_factory=dict[tuple[str, str, Role], dict[str, Item]]
    )
    evaluations: list[Answers] = field(default_factory=list[Answers])
    files: dict[str, str] = field(default_factory=dict[str, str])


def read_evidence(sources: Sequence[Source]) -> Evidence:
    """What is in the folders about the two models. Exams of one name must be the same exam everywhere."""
    collected = _Collected()
    for source in sources:
        if not (source.is_exam or source.is_evaluation):
            raise ConfigError(
                f"{source.folder}: neither {EXAM} nor {EVALUATION} is here; `from` names exam and evaluate stages"
            )
        if source.is_exam:
            _read_exam(source, collected)
        if source.is_evaluation:
            collected.evaluations.append(_read_answers(source, collected.files))
    return Evidence(
        exams=collected.exams, scores=collected.scores, evaluations=collected.evaluations, files=collected.files
    )


def _read_exam(source: Source, collected: _Collected) -> None:
    about = _json(source.folder / EXAM, collected.files)
    for name, facts in cast("dict[str, dict[str, Any]]", about["exams"]).items():
        exam = ExamFacts(
            items_hash=facts["items_hash"],
            main=facts["main"],
            better={metric: how["better"] for metric, how in facts["metrics"].items()},
            # Whoever draws with another luck is still asked the same.
            settings={name: value for name, value in facts.get("settings", {}).items() if name != "seed"},
            where=source.folder,
        )
        _refuse_other(name, collected.exams.setdefault(name, exam), exam)
    roles: dict[str, list[Role]] = {}
    for role, name in source.names.items():
        roles.setdefault(name, []).append(role)
    file = source.folder / ITEMS
    collected.files[str(file)] = _hash_of(file)
    counts: dict[tuple[str, str, str], int] = {}
    for row in read_rows(file):
        for role in roles.get(row.model, ()):
            _add(row, role, collected, file)
        counts[row.exam, row.metric, row.model] = counts.get((row.exam, row.metric, row.model), 0) + 1
    refuse_lost(about.get("results", ()), counts, file)


def _add(row: ItemRow, role: Role, collected: _Collected, file: Path) -> None:
    if not math.isfinite(row.score):
        raise DataError(f"{file}: the score of {row.exam} {row.item} is {row.score}; make the file again")
    own = collected.scores.setdefault((row.exam, row.metric, role), {})
    if row.item in own:
        raise DataError(
            f"{file}: the {role} ({row.model}) has item {row.item} of {row.exam}.{row.metric} more than once; name "
            "each exam once in `from`"
        )
    own[row.item] = Item(score=row.score, cluster=row.cluster, groups=row.groups)


def _refuse_other(name: str, first: ExamFacts, second: ExamFacts) -> None:
    if first.items_hash != second.items_hash:
        raise ConfigError(
            f"{name}: its items in {first.where} and in {second.where} are not the same (items_hash {first.items_hash} "
            f"and {second.items_hash}), so the models are not compared; ask both with the same files of the exam"
        )
    if first.settings != second.settings:
        raise ConfigError(
            f"{name}: asked with other settings in {first.where} ({dict(first.settings)}) than in {second.where} "
            f"({dict(second.settings)}), so the models are not compared"
        )


def refuse_lost(results: Iterable[Mapping[str, Any]], counts: Mapping[tuple[str, str, str], int], file: Path) -> None:
    """A row that is gone would change a verdict."""
    for result in results:
        key = (result["exam"], result["metric"], result["model"])
        if not result.get("group") and result["items"] != counts.get(key, 0):
            raise DataError(
                f"{file}: {counts.get(key, 0):,} items of {'.'.join(key[:2])} by {key[2]}, and {EXAM} beside it counts "
                f"{result['items']:,}; run the exam again"
            )


def _read_answers(source: Source, files: dict[str, str]) -> Answers:
    about = _json(source.folder / EVALUATION, files)
    file = source.folder / ANSWERS
    files[str(file)] = _hash_of(file)
    collected: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            row = orjson.loads(line)
            prompt = str(row["id"]).rsplit("-", 2)[1]
            collected.setdefault(row["model"], {}).setdefault(prompt, []).append(row)
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise DataError(f"{file}:{number}: not an answer of an evaluate stage ({error})") from error
    expected = {model: summary["answers"] for model, summary in about["models"].items()}
    found = {model: sum(map(len, prompts.values())) for model, prompts in collected.items()}
    if found != expected:
        raise DataError(
            f"{file}: answers of {found}, and {EVALUATION} beside it counts {expected}; run the stage again"
        )
    models = {
        model: {prompt: _prompt_answers(rows) for prompt, rows in prompts.items()}
        for model, prompts in collected.items()
    }
    return Answers(
        models=models,
        names=source.names,
        measured_from=about["baseline"],
        tie=source.tie,
        where=source.folder,
        judged=_judgements(source.folder / JUDGEMENTS, about.get("judges") or {}, files),
    )


def _judgements(file: Path, rates: Mapping[str, Any], files: dict[str, str]) -> Judgements:
    if not rates and not file.is_file():
        return {}
    files[str(file)] = _hash_of(file)
    return read_judgements(file, rates)


def _prompt_answers(rows: Sequence[Mapping[str, Any]]) -> PromptAnswers:
    sources: list[str] = list(rows[0]["scores"])
    kls = [row["kl"] for row in rows if row["kl"] is not None]
    return PromptAnswers(
        scores={
            source: [row["scores"][source] for row in rows if row["scores"].get(source) is not None]
            for source in sources
        },
        length=fmean(row["length"] for row in rows),
        kl=fmean(kls) if kls else None,
    )


def results_over_baseline(answers: Answers, source: str, keeps: Iterable[str]) -> dict[str, list[PromptResult]]:
    """By model other than the baseline: preference and lengths on each of these prompts that all have a score for, or a
    comparison by a judge of that name."""
    if source not in answers.sources():
        kept = set(keeps)
        return {
            model: [result for prompt, result in own.items() if str(prompt) in kept]
            for model, own in prompt_results(answers.judged[source]).items()
        }
    baseline = answers.models[answers.names["baseline"]]
    others = {model: own for model, own in answers.models.items() if own is not baseline}
    prompts = [
        prompt
        for prompt in keeps
        if all(own.get(prompt) and own[prompt].scores.get(source) for own in answers.models.values())
    ]

    def rows(own: Mapping[str, PromptAnswers]) -> Iterator[PromptResult]:
        for prompt in prompts:
            theirs, ours = baseline[prompt], own[prompt]
            outcome = outcome_of(ours.scores[source], theirs.scores[source], tie=answers.tie)
            yield outcome.rate, ours.length, theirs.length

    return {model: list(rows(own)) for model, own in others.items()}


def _json(file: Path, files: dict[str, str]) -> dict[str, Any]:
    files[str(file)] = _hash_of(file)
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error}); run the stage again") from error


def _hash_of(file: Path) -> str:
    if not file.is_file():
        raise DataError(f"{file}: not there; run the stage again")
    return hash_file(file)
