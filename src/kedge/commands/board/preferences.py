"""What evaluations say of the models of a board: win rates over the baseline, strengths, gold against proxy."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

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


class Played(NamedTuple):
    """Two models, the outcome for the first (1, ½ or 0), the prompt, and which of the answers to it."""

    first: str
    second: str
    outcome: float
    prompt: str
    number: int


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
        """Equal where the same judge scored: by the settings of the stage, else by its folder."""
        manifest = self.place.manifest
        if manifest is None:
            return hash_json(str(self.place.folder.resolve()))
        inputs = [artefact.hash for artefact in manifest.inputs if artefact.name.partition(".")[0] == source]
        if source in (PROXY, GOLD):
            return hash_json([source, inputs or [manifest.settings.get(source)]])
        return hash_json([source, manifest.settings.get("judge")])

    def sources(self) -> list[str]:
        return [*sorted(self.answers.sources()), *self.judged]

    def rates(self, source: str, model: str, baseline: str) -> dict[str, float]:
        """By prompt, the preference for a model over another: wins, and half of the ties."""
        if source in self.judged:
            if baseline != self.baseline or model not in self.judged[source]:
                return {}
            by_prompt: dict[str, list[float]] = {}
            for comparison in self.judged[source][model]:
                if (preference := comparison.preference) is not None:
                    by_prompt.setdefault(str(comparison.prompt), []).append(preference)
            return {prompt: fmean(own) for prompt, own in by_prompt.items()}
        own, other = self.answers.models[model], self.answers.models[baseline]
        return {
            prompt: outcome_of(own[prompt].scores[source], other[prompt].scores[source], tie=self.answers.tie).rate
            for prompt in own
            if prompt in other and own[prompt].scores.get(source) and other[prompt].scores.get(source)
        }

    def matches(self, source: str) -> Iterator[Played]:
        """A match for each answer of a prompt, with the one of the same number."""
        if source in self.judged:
            for model, comparisons in self.judged[source].items():
                answered: dict[int, int] = {}
                for comparison in comparisons:
                    number = answered[comparison.prompt] = answered.get(comparison.prompt, -1) + 1
                    if (preference := comparison.preference) is not None:
                        prompt = self.prompts.get(str(comparison.prompt), str(comparison.prompt))
                        yield Played(model, self.baseline, preference, prompt, number)
            return
        for first, second in combinations(self.answers.models, 2):
            own, other = self.answers.models[first], self.answers.models[second]
            for prompt in own:
                if prompt in other:
                    scores = own[prompt].scores.get(source, ()), other[prompt].scores.get(source, ())
                    for number, (ours, theirs) in enumerate(zip(*scores, strict=False)):
                        gap = ours - theirs
                        outcome = 0.5 if abs(gap) <= self.answers.tie else float(gap > 0)
                        yield Played(first, second, outcome, self.prompts[prompt], number)


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


def win_columns(evaluations: Sequence[Evaluated], models: Models, baseline: Known) -> list[WinColumn]:
    """Win rates over the baseline of the board, a column for each source and set of prompts that it was met on."""
    cells: dict[tuple[str, str, str], dict[Known, Cell]] = {}
    for evaluation in evaluations:
        names = {name: models.asked(evaluation.place, name) for name in evaluation.answers.models}
        own = next((name for name, model in names.items() if model is baseline), None)
        if own is None:
            continue
        for source in evaluation.sources():
            key = (source, evaluation.source_hash(source), evaluation.prompts_hash)
            for name, model in names.items():
                rates = list(evaluation.rates(source, name, own).values()) if model is not baseline else []
                if rates:
                    cells.setdefault(key, {})[model] = _win_cell(rates)
    titles = [source for source, _, _ in cells]
    return [
        WinColumn(
            source=source,
            column=_win_column(source, prompts, baseline, is_alone=titles.count(source) == 1),
            cells=own,
        )
        for (source, _, prompts), own in sorted(cells.items(), key=lambda entry: _rank(entry[0][0]))
    ]


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
    for evaluation in evaluations:
        if models.asked(evaluation.place, evaluation.baseline) is not baseline:
            continue
        for name, values in evaluation.about.get("groups", {}).items():
            for source in evaluation.sources():
                rates = {value: _group_rates(group, source) for value, group in values.items()}
                names = {models.asked(evaluation.place, model): model for model in evaluation.answers.models}
                if any(rates.values()):
                    yield GroupTable(
                        column=_win_column(source, evaluation.prompts_hash, baseline, is_alone=True),
                        field=name,
                        rows=tuple(
                            GroupRow(value=value, cells=tuple(own.get(names.get(model, "")) for model in rows))
                            for value, own in rates.items()
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


def leagues(evaluations: Sequence[Evaluated], models: Models) -> list[League]:
    """Strengths by each source that has compared more than two models, over all evaluations with this source."""
    played: dict[tuple[str, str], dict[Hashable, tuple[Match, Hashable]]] = {}
    for evaluation in evaluations:
        for source in evaluation.sources():
            own = played.setdefault((source, evaluation.source_hash(source)), {})
            for match in evaluation.matches(source):
                first, second = (models.asked(evaluation.place, name).label for name in (match.first, match.second))
                # Answers that were compared in two evaluations count once: the later one.
                pair = (min(first, second), max(first, second), match.prompt, match.number)
                if first != second:
                    own[pair] = (first, second, match.outcome), match.prompt
    return [
        _league(source, list(own.values()))
        for (source, _), own in sorted(played.items(), key=lambda entry: _rank(entry[0][0]))
        if len({name for (first, second, _), _ in own.values() for name in (first, second)}) > 2
    ]


def _league(source: str, played: Sequence[tuple[Match, Hashable]]) -> League:
    matches, clusters = [match for match, _ in played], [cluster for _, cluster in played]
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
