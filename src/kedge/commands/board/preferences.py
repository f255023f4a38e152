"""What evaluations say of the models of a board: win rates over the baseline, strengths, gold against proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson

from kedge.commands.board.models import Known, Models
from kedge.commands.board.places import Place
from kedge.core.errors import DataError
from kedge.core.files import hash_json
from kedge.evaluate import bradley_terry, rank_intervals
from kedge.evaluate.bounds import share_above
from kedge.evaluate.judged import MAJORITY, Judged, majority
from kedge.evaluate.ranking import Match
from kedge.evaluate.win_rates import outcome_of, share_interval
from kedge.gate.evidence import ANSWERS, EVALUATION, Answers, Source, read_evidence
from kedge.report.board.records import Cell, Column, Difference, GroupRow, GroupTable, League, ProxyPoint, Standing

PREFERENCE = "preference"
PROXY, GOLD = "reward", "gold"
_JUDGEMENTS = "judgements.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluate stage: its answers with scores, and what judges said of them."""

    place: Place
    about: Mapping[str, Any]
    answers: Answers
    prompts: Mapping[str, str]
    """By the number of a prompt, what tells it from others."""
    judged: Mapping[str, Mapping[str, Sequence[Judged]]]
    """By judge, then by model: comparisons with the stage's own baseline."""

    @property
    def baseline(self) -> str:
        return str(self.about["baseline"])

    @property
    def prompts_hash(self) -> str:
        return hash_json(sorted(self.prompts.values()))

    def source_hash(self, source: str) -> str:
        """Equal where the same judge scored answers that were sampled alike; without a stage, by the folder."""
        manifest = self.place.manifest
        if manifest is None:
            return hash_json(str(self.place.folder.resolve()))
        inputs = [artefact.hash for artefact in manifest.inputs if artefact.name.partition(".")[0] == source]
        judge = inputs or [manifest.settings.get(source if source in (PROXY, GOLD) else "judge")]
        return hash_json([source, judge, self.about.get("sampling"), self.answers.tie])

    def sources(self) -> list[str]:
        return [*sorted(self.answers.sources()), *self.judged]

    def scores(self, source: str) -> dict[str, dict[str, list[float]]]:
        """By model and prompt, the scores of a source."""
        by_model: dict[str, dict[str, list[float]]] = {}
        for model, prompts in self.answers.models.items():
            own = by_model[model] = {}
            for number, answers in prompts.items():
                if scores := answers.scores.get(source):
                    own.setdefault(self.prompts[number], []).extend(scores)
        return by_model

    def preferences(self, judge: str) -> dict[str, dict[str, list[float]]]:
        """By model and prompt, what a judge prefers over the stage's own baseline: 1, ½ or 0."""
        by_model: dict[str, dict[str, list[float]]] = {}
        for model, comparisons in self.judged[judge].items():
            own = by_model[model] = {}
            for comparison in comparisons:
                if (preference := comparison.preference) is not None:
                    prompt = self.prompts.get(str(comparison.prompt), str(comparison.prompt))
                    own.setdefault(prompt, []).append(preference)
        return by_model


Played = tuple[Known, Known, float]
"""Two models, and 1, ½ or 0 for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Everything that one source says, over all evaluations that asked it alike."""

    source: str
    scores: dict[Known, dict[str, list[float]]]
    """Of a source that scores answers: by model and prompt. Answers to one prompt are compared wherever they stand."""
    preferences: dict[tuple[Known, Known], dict[str, list[float]]]
    """Of a judge: by two models that it compared, and prompt."""
    tie: float

    def rates(self, model: Known, baseline: Known) -> dict[str, float]:
        """By prompt, the preference for a model over another: wins, and half of the ties."""
        own, other = self.scores.get(model, {}), self.scores.get(baseline, {})
        rates = {prompt: outcome_of(own[prompt], other[prompt], tie=self.tie).rate for prompt in own if prompt in other}
        return rates or {prompt: fmean(all_) for prompt, all_ in self.preferences.get((model, baseline), {}).items()}

    def matches(self) -> Iterator[tuple[Played, str]]:
        """With the prompt: answers of the same number are compared."""
        for first, second in combinations(self.scores, 2):
            own, other = self.scores[first], self.scores[second]
            for prompt in own:
                for ours, theirs in zip(own[prompt], other.get(prompt, ()), strict=False):
                    outcome = 0.5 if abs(ours - theirs) <= self.tie else float(ours > theirs)
                    yield (first, second, outcome), prompt
        for (first, second), prompts in self.preferences.items():
            for prompt, preferences in prompts.items():
                yield from (((first, second, preference), prompt) for preference in preferences)

    def prompts_of(self, model: Known) -> list[str]:
        compared = [prompts for pair, prompts in self.preferences.items() if model in pair]
        return sorted({*self.scores.get(model, {}), *(prompt for prompts in compared for prompt in prompts)})


def pools(evaluations: Sequence[Evaluated], models: Models) -> list[Pool]:
    """One for each source; of answers that were scored in two evaluations the later ones count."""
    found: dict[tuple[str, str], Pool] = {}
    for evaluation in evaluations:
        for source in evaluation.sources():
            empty = Pool(source=source, scores={}, preferences={}, tie=evaluation.answers.tie)
            pool = found.setdefault((source, evaluation.source_hash(source)), empty)
            if source in evaluation.judged:
                baseline = models.asked(evaluation.place, evaluation.baseline)
                for name, prompts in evaluation.preferences(source).items():
                    pair = (models.asked(evaluation.place, name), baseline)
                    if pair[0] is not pair[1]:
                        pool.preferences.setdefault(pair, {}).update(prompts)
            else:
                for name, prompts in evaluation.scores(source).items():
                    pool.scores.setdefault(models.asked(evaluation.place, name), {}).update(prompts)
    return sorted(found.values(), key=lambda pool: _rank(pool.source))


def read_evaluation(place: Place) -> Evaluated:
    """What is broken is an error that names the file."""
    file = place.folder / EVALUATION
    try:
        about: dict[str, Any] = json.loads(file.read_bytes())
        _ = about["baseline"], {name: model["answers"] for name, model in about["models"].items()}
        tie = place.manifest.settings.get("tie") if place.manifest else None
        source = Source(folder=place.folder, names={}, **({"tie": float(tie)} if tie is not None else {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: not the numbers of an evaluation ({type(error).__name__}: {error}); run the stage again"
        ) from error
    answers = read_evidence([source]).evaluations[0]
    prompts: dict[str, str] = {}
    for line in (place.folder / ANSWERS).read_bytes().splitlines():
        row = orjson.loads(line)
        prompts.setdefault(str(row["id"]).rsplit("-", 2)[1], hash_json(row.get("prompt")))
    return Evaluated(
        place=place, about=about, answers=answers, prompts=prompts, judged=_judged(place.folder / _JUDGEMENTS)
    )


def _judged(file: Path) -> dict[str, dict[str, list[Judged]]]:
    judged: dict[str, dict[str, list[Judged]]] = {}
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else (), start=1):
        try:
            row = orjson.loads(line)
            comparison = Judged(
                prompt=int(row["prompt"]),
                as_first=row["as_first"],
                as_second=row["as_second"],
                length=row["length"],
                baseline_length=row["baseline_length"],
            )
            judged.setdefault(str(row["judge"]), {}).setdefault(str(row["model"]), []).append(comparison)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}:{number}: not a judgement ({error}); run the stage again") from error
    if len(judged) > 1:
        asked = next(iter(judged.values()))
        judged[MAJORITY] = {model: majority([judged[judge][model] for judge in judged]) for model in asked}
    return judged


@dataclass(frozen=True, slots=True, kw_only=True)
class WinColumn:
    source: str
    column: Column
    cells: Mapping[Known, Cell]


def win_columns(pooled: Sequence[Pool], rows: Sequence[Known], baseline: Known, notes: list[str]) -> list[WinColumn]:
    """Win rates over the baseline of the board, a column for each source that has compared somebody with it."""
    columns: list[WinColumn] = []
    for pool in pooled:
        rates = {model: list(pool.rates(model, baseline).values()) for model in rows if model is not baseline}
        cells = {model: _win_cell(own) for model, own in rates.items() if own}
        others = [model.label for model in rates if model not in cells and pool.prompts_of(model)]
        if cells:
            same = sum(other.source == pool.source for other in pooled)
            column = _win_column(pool.source, hash_json(pool.prompts_of(baseline)), baseline, is_alone=same == 1)
            columns.append(WinColumn(source=pool.source, column=column, cells=cells))
        if cells and others:
            notes.append(f"{', '.join(others)}: by {pool.source} never met {baseline.label} on a prompt: not compared")
    return columns


def _win_column(source: str, prompts: str, baseline: Known, *, is_alone: bool) -> Column:
    return Column(
        title=f"wins by {source}" + ("" if is_alone else f" ({prompts[:4]})"),
        metric="win rate",
        topic=PREFERENCE,
        better="more",
        summary=_summary(source, baseline.label),
        items_hash=prompts,
        is_share=True,
    )


def _rank(source: str) -> int:
    """The gold judge, then judges, their majority first, then the reward that was optimised."""
    return {GOLD: 0, MAJORITY: 1, PROXY: 3}.get(source, 2)


def _summary(source: str, baseline: str) -> str:
    by = {PROXY: "the reward, which may be what was optimised", GOLD: "the gold source"}.get(source, source)
    return f"share of prompts won over {baseline}, ties halved, by {by}"


def _win_cell(rates: Sequence[float]) -> Cell:
    low, high = share_interval(np.asarray(rates, dtype=np.float64))
    above = share_above(rates, 0.5)
    rate = fmean(rates)
    difference = Difference(
        value=rate - 0.5,
        low=low - 0.5,
        high=high - 0.5,
        p_value=min(1.0, 2 * min(above, 1 - above)),
        items=len(rates),
    )
    return Cell(value=rate, low=low, high=high, items=len(rates), difference=difference)


def win_groups(
    evaluations: Sequence[Evaluated], models: Models, rows: Sequence[Known], baseline: Known
) -> Iterator[GroupTable]:
    """Win rates by group, as the evaluations whose own baseline is that of the board have them."""
    tables: dict[tuple[str, str, str, str], dict[str, dict[Known, Cell]]] = {}
    for evaluation in evaluations:
        if models.asked(evaluation.place, evaluation.baseline) is not baseline:
            continue
        for name, values in evaluation.about.get("groups", {}).items():
            for source in evaluation.sources():
                key = (name, source, evaluation.source_hash(source), evaluation.prompts_hash)
                for value, group in values.items():
                    for model, cell in _group_rates(group, source).items():
                        own = tables.setdefault(key, {}).setdefault(value, {})
                        own[models.asked(evaluation.place, model)] = cell
    for (name, source, _, prompts), values in tables.items():
        yield GroupTable(
            column=_win_column(source, prompts, baseline, is_alone=True),
            field=name,
            rows=tuple(
                GroupRow(value=value, cells=tuple(own.get(model) for model in rows)) for value, own in values.items()
            ),
        )


def _group_rates(group: Mapping[str, Any], source: str) -> dict[str, Cell]:
    """By model, from the numbers of one group."""
    compared = {model: own[source]["win_rate"] for model, own in group["comparisons"].items() if source in own}
    judged = {model: own[source] for model, own in group.get("judges", {}).items() if source in own}
    return {
        model: Cell(value=rate["rate"], low=rate["low"], high=rate["high"], items=rate["prompts"])
        for model, rate in (compared | judged).items()
    }


def leagues(pooled: Sequence[Pool]) -> list[League]:
    """Strengths by each source that has compared more than two models."""
    played = [(pool.source, list(pool.matches())) for pool in pooled]
    return [
        _league(source, own)
        for source, own in played
        if len({model for (first, second, _), _ in own for model in (first, second)}) > 2
    ]


def _league(source: str, played: Sequence[tuple[Played, str]]) -> League:
    matches: list[Match] = [(first.label, second.label, outcome) for (first, second, outcome), _ in played]
    clusters = [prompt for _, prompt in played]
    totals: dict[tuple[str, str], list[float]] = {}
    for first, second, outcome in matches:
        totals.setdefault((first, second), []).append(outcome)
        totals.setdefault((second, first), []).append(1 - outcome)
    names = tuple(dict.fromkeys(name for first, second, _ in matches for name in (first, second)))
    standings: tuple[Standing, ...] = ()
    problem = ""
    try:
        ranking = bradley_terry(matches, clusters=clusters)
        places = rank_intervals(ranking)
        standings = tuple(
            Standing(
                label=name,
                strength=strength,
                error=ranking.standard_errors[name],
                elo=ranking.elo(name),
                places=places[name],
            )
            for name, strength in ranking.strengths.items()
        )
        names = tuple(ranking.strengths)
    except ValueError as error:
        problem = str(error)
    return League(
        source=source,
        standings=standings,
        problem=problem,
        models=names,
        wins={pair: (fmean(outcomes), len(outcomes)) for pair, outcomes in totals.items()},
        matches=len(matches),
        prompts=len(set(clusters)),
    )


def proxies(evaluations: Sequence[Evaluated], models: Models) -> list[tuple[ProxyPoint, ...]]:
    """Gold against proxy by model, in the order of the board, for each set of prompts and both sources alike."""
    courses: dict[tuple[str, str, str], dict[Known, ProxyPoint]] = {}
    for evaluation in evaluations:
        key = (evaluation.source_hash(PROXY), evaluation.source_hash(GOLD), evaluation.prompts_hash)
        for name, summary in evaluation.about["models"].items():
            proxy, gold = (_mean_cell(summary, source) for source in (PROXY, GOLD))
            if proxy and gold:
                model = models.asked(evaluation.place, name)
                courses.setdefault(key, {})[model] = ProxyPoint(label=model.label, proxy=proxy, gold=gold)
    return [
        tuple(point for _, point in sorted(course.items(), key=lambda entry: entry[0].order))
        for course in courses.values()
        if len(course) > 1
    ]


def _mean_cell(summary: Mapping[str, Any], source: str) -> Cell | None:
    mean = summary.get("scores", {}).get(source, {}).get("mean")
    if not mean:
        return None
    return Cell(value=mean["mean"], low=mean["low"], high=mean["high"], items=mean["prompts"])
