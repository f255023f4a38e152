"""What the scores of a file say: their spread, and where it holds preferences, how far the judge agrees with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kedge.commands.score import Answers, answers_of
from kedge.core.errors import DataError
from kedge.core.files import write_text
from kedge.core.findings import Finding
from kedge.data.examples import Example, Kind, Pair, Ranking, prompt_of, text_of
from kedge.models.reward.ensemble import combined, disagreement
from kedge.report.reward import ScoredPair, render_html, reward_report
from kedge.report.reward.accuracy import Share, share
from kedge.report.reward.scored_pairs import columns, won
from kedge.report.words import number, percent, with_interval
from kedge.stages.reward.scoring import in_reports
from kedge.stages.rl.judge import Judge, template_findings
from kedge.stages.shared.encoding import Encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The judge against the preferences of the file, one by one. Equal scores count half."""

    accuracy: Share
    longer_scores_higher: float | None
    """Share of the preferences between answers of unequal length; None where there is none."""
    longer_is_preferred: float | None
    """The same for the people, or whoever it was, who preferred."""
    num_unequal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSummary:
    mean: float
    std: float
    disagreement: float | None
    """Mean of the spread between members; None for a single one."""
    agreement: Agreement | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    reward: str
    file: str
    kind: Kind
    examples: int
    answers: int
    cut: int
    max_length: int
    broken: int
    set_aside: str
    is_raw: bool
    objectives: dict[str, ObjectiveSummary]
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(judge: Judge, answers: Answers, scores_MNK: Tensor, *, is_raw: bool) -> Summary:
    return Summary(
        reward=judge.place,
        file=answers.source,
        kind=answers.kind,
        examples=len(answers.examples),
        answers=len(answers.tokens),
        cut=answers.num_cut,
        max_length=judge.max_length,
        broken=answers.num_broken,
        set_aside=str(answers.set_aside) if answers.num_broken else "",
        is_raw=is_raw,
        objectives={
            name: _of_objective(judge, answers, scores_MNK, index) for index, name in enumerate(judge.facts.objectives)
        },
        findings=tuple(template_findings(judge)),
    )


def in_words(summary: Summary) -> list[str]:
    """The summary as lines for a terminal."""
    raw = ", not normalised" if summary.is_raw else ""
    lines = [f"scored {summary.answers:,} answers of {summary.examples:,} {summary.kind} in {summary.file}{raw}"]
    for name, objective in summary.objectives.items():
        members = "" if objective.disagreement is None else f", members differ by {number(objective.disagreement)}"
        lines.append(f"{name}: mean {number(objective.mean)}, std {number(objective.std)}{members}")
        if objective.agreement is not None:
            lines += [f"  {line}" for line in _agreement_in_words(objective.agreement)]
    if summary.cut:
        lines.append(f"texts over {summary.max_length:,} tokens, which lost their beginning: {summary.cut:,}")
    if summary.broken:
        lines.append(f"broken rows, set aside with line and reason in {summary.set_aside}: {summary.broken:,}")
    return lines


def save_reports(to: Path, judge: Judge, answers: Answers, scores_MNK: Tensor) -> list[Path]:
    """The page on a reward model, made on this file; with several objectives, one page for each."""
    names = judge.facts.objectives
    how, coef = in_reports(judge.combine)
    to.parent.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for index, name in enumerate(names):
        facts = {"reward model": judge.place, "scored file": answers.source, "objective": name}
        report = reward_report(
            preferences(answers, scores_MNK[:, :, index], judge.encoder),
            combine=how,
            uncertainty_coef=coef,
            facts=facts,
        )
        page = to if len(names) == 1 else to.with_name(f"{to.stem}-{name}{to.suffix}")
        write_text(page, render_html(report))
        written.append(page)
    return written


def refuse_report(file: str, kind: Kind) -> None:
    """A report is about preferences."""
    if kind not in ("pairs", "rankings"):
        raise DataError(f"--report: {file} holds {kind}; a reward model is judged on pairs or rankings")


def preferences(answers: Answers, scores_MN: Tensor, encoder: Encoder) -> list[ScoredPair]:
    """Every strict preference of the file with the scores of its two answers."""
    found: list[ScoredPair] = []
    for example, own in answers.by_example():
        texts = [answer for _, answer in answers_of(example)]
        lengths = encoder.lengths(texts)
        scores_AM: list[list[float]] = scores_MN[:, own].T.tolist()
        for better, worse in _strict(example):
            found.append(
                ScoredPair(
                    chosen=tuple(scores_AM[better]),
                    rejected=tuple(scores_AM[worse]),
                    chosen_length=lengths[better],
                    rejected_length=lengths[worse],
                    margin=example.margin if isinstance(example, Pair) else None,
                    where=str(example.origin),
                    prompt=text_of(prompt_of(example)),
                    chosen_text=text_of(texts[better]),
                    rejected_text=text_of(texts[worse]),
                )
            )
    return found


def _strict(example: Example) -> Sequence[tuple[int, int]]:
    match example:
        case Pair():
            return [(0, 1)]
        case Ranking(rank=rank):
            return [(a, b) for a, b in permutations(range(len(rank)), 2) if rank[a] < rank[b]]
        case _:
            return []


def _of_objective(judge: Judge, answers: Answers, scores_MNK: Tensor, index: int) -> ObjectiveSummary:
    score_N = combined(scores_MNK, judge.combine)[:, index].double()
    has_many = len(judge.members) > 1
    pairs = preferences(answers, scores_MNK[:, :, index], judge.encoder)
    return ObjectiveSummary(
        mean=score_N.mean().item(),
        std=score_N.std(correction=0).item(),
        disagreement=disagreement(scores_MNK)[:, index].mean().item() if has_many else None,
        agreement=_agreement(judge, pairs) if pairs else None,
    )


def _agreement(judge: Judge, pairs: Sequence[ScoredPair]) -> Agreement:
    how, coef = in_reports(judge.combine)
    data = columns(pairs, combine=how, uncertainty_coef=coef)
    unequal_B = data.gap_B != 0
    higher_B, preferred_B = won(data.difference_B * np.sign(data.gap_B)), won(data.gap_B)
    has_unequal = bool(unequal_B.any())
    return Agreement(
        accuracy=share(data.correct_B, data.prompt_B),
        longer_scores_higher=float(higher_B[unequal_B].mean()) if has_unequal else None,
        longer_is_preferred=float(preferred_B[unequal_B].mean()) if has_unequal else None,
        num_unequal=int(unequal_B.sum()),
    )


def _agreement_in_words(found: Agreement) -> list[str]:
    ties = f", {found.accuracy.ties:,} of them ties" if found.accuracy.ties else ""
    higher = with_interval(found.accuracy)
    lines = [f"the preferred answer scores higher in {higher} of {found.accuracy.n:,} comparisons{ties}"]
    if found.longer_scores_higher is not None and found.longer_is_preferred is not None:
        lines.append(
            f"the longer answer scores higher in {percent(found.longer_scores_higher)} and is the preferred one in "
            f"{percent(found.longer_is_preferred)} of the {found.num_unequal:,} with unequal lengths"
        )
    return lines
