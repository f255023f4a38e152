"""`kedge judge trust`: from files on the command line to a report on a judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedge.commands.judge.asking import Trial
from kedge.commands.judge.reading import HumanItem, read_judge, read_people, read_stored
from kedge.commands.judge.table import PageTables, page_tables
from kedge.core.errors import ContractStop, DataError
from kedge.core.files import cache_root, hash_file, write_text
from kedge.core.quoting import one_line
from kedge.feedback.canaries import CANARIES
from kedge.feedback.judge_figures import JudgedItem, Replies, measure
from kedge.feedback.trust import (
    LEAST_ITEMS,
    LEAST_OVERLAP,
    Trust,
    make_trust,
    write_trust,
)
from kedge.report.pages import render_page

Say = Callable[[str], None]


def trust_asked(
    judge: Path,
    on: Path,
    *,
    repeat: int,
    family: str | None,
    seed: int,
    say: Say,
    progress: Callable[[int], None] = lambda done: None,
) -> Trust:
    """Ask the judge of a file what people have decided, and measure it."""
    settings = read_judge(judge)
    items = _unlike(read_people(on), say)
    overlap = sum(len(item.verdicts) > 1 for item in items)
    if len(items) < LEAST_ITEMS or overlap < LEAST_OVERLAP:
        say(
            f"{on}: {len(items):,} items, {overlap:,} of them by two people or more: too few for trust, which needs "
            f"{LEAST_ITEMS} and {LEAST_OVERLAP}; measured all the same"
        )
    data = hash_file(on)
    trial = Trial(
        settings,
        items,
        folder=judge.parent,
        data=data,
        repeat=repeat,
        seed=seed,
        cache=cache_root() / "judge",
        note=lambda words: say(f"{settings.label}: {words}"),
    )
    say(
        f"{settings.label}: {len(items):,} items in both orders, {_times(repeat)}, and {len(CANARIES)} canaries: "
        f"{trial.estimate()}"
    )
    asked = trial.ask(progress)
    if asked.failed:
        say(f"{asked.failed:,} comparisons could not be asked, and count as unreadable")
    figures = measure(
        _judged(items), asked.replies, again=asked.again, canaries=asked.canaries, family=family, seed=seed
    )
    return make_trust(
        judge=settings.label,
        identity=trial.identity,
        figures=figures | {"failed": asked.failed},
        data=data,
        settings=trial.fields,
    )


def trust_stored(verdicts: Path, on: Path, *, family: str | None, seed: int, say: Say) -> Trust:
    """Measure verdicts that a judge gave elsewhere, in one order: swap, repetition and canaries are not measured."""
    items = read_people(on)
    stored = read_stored(verdicts, items, on)
    missing = sum(verdict is None for verdict in stored)
    if missing:
        say(f"{verdicts}: {missing:,} of {len(items):,} items have no verdict, and count as unreadable")
    probabilities = [None if verdict is None else verdict.probability for verdict in stored]
    replies = Replies(
        as_a=[None if verdict is None else verdict.verdict for verdict in stored],
        probability=None if all(probability is None for probability in probabilities) else probabilities,
    )
    content = hash_file(verdicts)
    return make_trust(
        judge=verdicts.name,
        identity=f"verdicts:{content}",
        figures=measure(_judged(items), replies, family=family, seed=seed),
        data=hash_file(on),
        settings={"verdicts": content},
    )


def write_files(trust: Trust, to: Path, page: Path) -> None:
    """The report and its page, each as a whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, trust_page(trust))
    write_trust(to, trust)


def trust_page(trust: Trust) -> str:
    tables: PageTables = page_tables(trust)
    return render_page("kedge.commands.judge", "page.html.j2", trust=trust, tables=tables)


def facts(trust: Trust) -> dict[str, Any]:
    """The report for machines."""
    return asdict(trust)


def refuse(trust: Trust, to: Path) -> None:
    """A judge that may not label ends with exit code 3."""
    if not trust.passed:
        listed = "\n".join(f"  {reason}" for reason in trust.reasons)
        raise ContractStop(
            f"{one_line(trust.judge)} may not label alone: {len(trust.reasons)} reason(s), in {to}\n{listed}"
        )


def _judged(items: Sequence[HumanItem]) -> list[JudgedItem]:
    return [
        JudgedItem(
            prompt=item.prompt,
            people=item.verdicts,
            lengths=(len(item.first), len(item.second)),
            models=item.models,
        )
        for item in items
    ]


def _unlike(items: Sequence[HumanItem], say: Say) -> list[HumanItem]:
    """Items whose answers differ: of equal ones a judge is not asked, and would be consistent for nothing."""
    unlike = [item for item in items if item.first != item.second]
    if len(unlike) < len(items):
        say(f"{len(items) - len(unlike):,} left out: both answers are the same")
    if not unlike:
        raise DataError(f"{items[0].where}: both answers are the same in all {len(items):,} rows")
    return unlike


def _times(repeat: int) -> str:
    return "once" if repeat == 0 else f"{1 + repeat} times"
