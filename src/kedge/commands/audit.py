"""The audit of a recipe's files, all together: what would be trained on against what is held out.

What a stage of kind `data` leaves out by itself is told, but does not make a recipe unfit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link, Plan
from kedge.stages.data.settings import DataSettings

_FAULT_CODES = {
    "empty": ("empty.prompt", "empty.chosen", "empty.rejected", "empty.answer"),
    "identical": ("pairs.identical",),
    "contradictory": ("pairs.contradictory", "files.contradictory"),
    "duplicate": ("duplicates.exact", "files.shared_items"),
}
"""What the audit calls the faults that a `data` stage may be told to drop."""


def audit_all(
    recipe: Recipe, plan: Plan, readable: set[str], progress: Callable[[int], None] | None
) -> Iterator[Finding]:
    """All files together. What a stage calls `heldout`, and the prompts of an evaluation, must not be trained on."""
    from kedge.data.auditing import audit

    held = _held_out(recipe, plan) & readable
    cared_for: dict[str, frozenset[str]] = {}
    for name in plan.order:
        codes = _cared_for(recipe.stages[name], plan.links[name], held)
        for link in plan.links[name]:
            source = link.source()
            if source in readable - held and link.field != "decontaminate":
                cared_for[source] = cared_for.get(source, codes) & codes
    told: set[tuple[str, str, str]] = set()
    for codes in dict.fromkeys(cared_for.values()):
        train = [source for source, own in cared_for.items() if own == codes]
        report = audit(
            train,
            heldout=sorted(held),
            max_broken=max_broken_of(*recipe.stages.values()),
            columns_of=_columns_by_file(plan),
            progress=progress,
        )
        for finding in report.findings:
            key = (finding.code, finding.where, finding.message)
            if finding.level in ("warning", "fatal") and key not in told:
                told.add(key)
                # A stage cleans what it reads; what is wrong in a held-out file stays there.
                is_held = finding.code != "leakage.exact" and finding.where.startswith(tuple(held))
                yield _settled(finding) if finding.code in codes and not is_held else finding


def _columns_by_file(plan: Plan) -> dict[str, Mapping[str, Any]]:
    links = (link for links in plan.links.values() for link in links)
    return {link.source(): link.reading.columns for link in links if link.reading is not None and not link.stage}


def _held_out(recipe: Recipe, plan: Plan) -> set[str]:
    return {
        link.source()
        for name, stage in recipe.kinds.items()
        for link in plan.links[name]
        if link.field == "heldout" or "evaluation" in stage.makes.values()
    }


def _cared_for(settings: Section, links: Sequence[Link], held: set[str]) -> frozenset[str]:
    """The findings on a stage's files that the stage itself takes care of: a `data` stage cleans before it splits."""
    if not isinstance(settings, DataSettings):
        return frozenset()
    codes = {code for fault in settings.drop for code in _FAULT_CODES[fault]}
    if held <= {link.source() for link in links if link.field == "decontaminate"}:
        codes.add("leakage.exact")
    return frozenset(codes)


def _settled(finding: Finding) -> Finding:
    return replace(finding, level="info", message=f"{finding.message} The `data` stage leaves them out.", fix="")


def max_broken_of(*stages: Section) -> float:
    """The share of unreadable lines that these stages put up with."""
    from kedge.data.reading import MAX_BROKEN

    own = [settings.max_broken for settings in stages if isinstance(settings, DataSettings)]
    return max(own, default=MAX_BROKEN)
