"""Verdicts, promotions and badcases of a board. What cannot be trusted is told, never left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kedge.commands.board.models import Known, Models
from kedge.commands.board.places import Place
from kedge.core.errors import KedgeError
from kedge.core.quoting import one_line
from kedge.gate.badcases import read_badcases
from kedge.gate.ledger import MANY_LOOKS
from kedge.gate.recheck import contradiction
from kedge.gate.registry import promotions
from kedge.gate.results import RuleResult
from kedge.gate.table import needs_text, value_text
from kedge.gate.verdict import SealedVerdict, read_verdict
from kedge.report.board.records import CaseRow, PromotionRow, RuleRow, VerdictCard


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """A verdict that could be read, and the two models that it is about."""

    file: Path
    verdict: SealedVerdict
    candidate: Known
    baseline: Known


def read_verdicts(places: Sequence[Place], models: Models) -> tuple[list[Gated], list[VerdictCard]]:
    """Verdicts, and cards for those that are not to be trusted."""
    gated: list[Gated] = []
    broken: list[VerdictCard] = []
    for place in places:
        file = place.verdict_file
        if file is None:
            continue
        try:
            verdict = read_verdict(file)
            if found := contradiction(verdict):
                broken.append(VerdictCard(file=str(file), problem=f"{file}: {found}; run the gate again"))
                continue
        except KedgeError as error:
            broken.append(VerdictCard(file=str(file), problem=str(error)))
            continue
        gated.append(
            Gated(
                file=file,
                verdict=verdict,
                candidate=models.add_gated(place, verdict.candidate),
                baseline=models.add_gated(place, verdict.baseline),
            )
        )
    return gated, broken


def named_metrics(gated: Sequence[Gated]) -> set[str]:
    """What rules of these verdicts name: `mmlu`, `xstest.refused_safe`."""
    return {result.metric for one in gated for result in one.verdict.results}


def kept_metrics(gated: Sequence[Gated]) -> list[str]:
    """What rules of `keep` name, in order."""
    return list(
        dict.fromkeys(result.metric for one in gated for result in one.verdict.results if result.section == "keep")
    )


def verdict_card(gated: Gated) -> VerdictCard:
    verdict = gated.verdict
    looks = {name: int(facts.get("looks", 0)) for name, facts in verdict.body["exams"].items()}
    notes = [
        f"{name}: {count} looks of this lineage, so that chance has had as many tries"
        for name, count in looks.items()
        if count >= MANY_LOOKS
    ]
    if verdict.part != "all":
        kept = "that are kept for a promotion" if verdict.part == "reserved" else "that are not kept for a promotion"
        notes.append(f"it has read the items {kept}")
    return VerdictCard(
        file=str(gated.file),
        verdict=verdict.verdict,
        candidate=gated.candidate.label,
        baseline=gated.baseline.label,
        created=verdict.created,
        weights=verdict.candidate.weights,
        rules_file=str(verdict.body["rules"].get("file", "")),
        rules=tuple(_rule_row(result, verdict) for result in verdict.results),
        notes=tuple(notes),
    )


def _rule_row(result: RuleResult, verdict: SealedVerdict) -> RuleRow:
    note = result.note
    if result.verdict == "undecided" and result.needed and result.needed > result.items:
        more = f"about {result.needed:,} items like these would decide it"
        note = f"{note}; {more}" if note else more
    return RuleRow(
        section=result.section,
        name=result.name,
        value=value_text(result),
        needs=needs_text(result),
        items=result.items,
        verdict=result.verdict,
        is_deciding=verdict.verdict != "pass" and result.verdict == verdict.verdict,
        note=note,
    )


def promotion_rows(registry: Path, models: Models, problems: list[str]) -> list[PromotionRow]:
    """Everything that was ever promoted, the newest last; the last of each name is what is out."""
    try:
        entries = promotions(registry)
    except KedgeError as error:
        problems.append(str(error))
        return []
    last = {entry.alias: place for place, entry in enumerate(entries)}
    rows: list[PromotionRow] = []
    for place, entry in enumerate(entries):
        model = models.with_hash(entry.model.content, entry.model.weights)
        rows.append(
            PromotionRow(
                alias=entry.alias,
                model=(model.label if model else "") or entry.model.path,
                weights=entry.model.weights,
                verdict=entry.verdict,
                by=entry.by,
                at=entry.at,
                override=entry.override,
                is_current=last[entry.alias] == place,
            )
        )
    return rows


def case_rows(folder: Path, gated: Sequence[Gated], problems: list[str]) -> list[CaseRow]:
    """All badcases with the status that they have now, and how candidates of these verdicts did on them."""
    try:
        cases = read_badcases(folder)
    except KedgeError as error:
        problems.append(str(error))
        return []
    replayed: dict[str, list[str]] = {}
    for one in gated:
        results: Sequence[Mapping[str, str]] = one.verdict.body.get("badcases", {}).get("results", ())
        for result in results:
            replayed.setdefault(result["id"], []).append(f"{one.candidate.label}: {result['verdict']}")
    today = datetime.now(UTC).date()
    return [
        CaseRow(
            id=case.id,
            severity=case.severity,
            status=(case.status if case.counts(today) else f"quarantined until {case.until}")
            + (f" ({case.reason})" if case.reason else ""),
            why=case.why,
            check=one_line(str(case.check.as_dict()), 80),
            replayed=tuple(replayed.get(case.id, ())),
        )
        for case in cases
    ]
