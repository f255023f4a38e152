"""What the judges of a run were paid: the calls of a stage, and of the stages that it learnt from, each counted once.

A policy that is trained on a judge's grades pays for them itself; one that is trained on a reward model owes it the
calls of the labels. Read from the ledgers in the stages' folders (`calls/`), which name tokens and no prices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import RunError
from kedge.report.run.run_records import StageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidCalls:
    """Replies that were paid for, and what they cost; `usd` is None where a stage says no price of tokens."""

    calls: int = 0
    usd: float | None = 0.0
    by_stage: Mapping[str, int]
    """Calls of every stage that paid."""


def paid_calls(stage: StageRecord, around: Sequence[StageRecord]) -> PaidCalls:
    """The calls behind a policy: of its stage and of all that its inputs come from."""
    calls: dict[str, int] = {}
    usd: float | None = 0.0
    for other in lineage(stage, around):
        tokens = list(_paid(other.folder))
        if not tokens:
            continue
        calls[other.name] = len(tokens)
        prices = {(budget["input"], budget["output"]) for budget in _budgets(other.settings)}
        if len(prices) != 1 or usd is None:
            usd = None
        else:
            ((sent, replied),) = prices
            usd += sum(prompt * sent + completion * replied for prompt, completion in tokens) / 1e6
    return PaidCalls(calls=sum(calls.values()), usd=usd, by_stage=calls)


def lineage(stage: StageRecord, around: Sequence[StageRecord]) -> list[StageRecord]:
    """The stage and those whose files it read, directly or through others; each once."""
    folders = {other.folder.resolve(): other for other in (*around, stage)}
    found: dict[Path, StageRecord] = {}
    waiting = [stage.folder.resolve()]
    while waiting:
        folder = waiting.pop()
        if folder in found or folder not in folders:
            continue
        found[folder] = folders[folder]
        for artefact in folders[folder].manifest.inputs:
            waiting += [parent for parent in (folder / artefact.path).resolve().parents if parent in folders]
    return list(found.values())


def _paid(folder: Path) -> Iterator[tuple[int, int]]:
    """Prompt and completion tokens of every reply in a stage's ledgers."""
    for ledger in sorted((folder / "calls").rglob("*.jsonl")):
        for number, line in enumerate(ledger.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # a killed process did not end it, and what it says was not done yet
            try:
                row = json.loads(line)
                if "paid" in row:
                    yield int(row["prompt"]), int(row["completion"])
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(f"{ledger}:{number}: this is no line of a ledger ({error})") from error


def _budgets(settings: Any) -> Iterator[Mapping[str, float]]:
    """The budgets in a stage's settings, wherever they stand."""
    if isinstance(settings, Mapping):
        for name, value in cast("Mapping[str, Any]", settings).items():
            if name == "budget" and isinstance(value, Mapping) and "input" in value:
                yield cast("Mapping[str, float]", value)
            else:
                yield from _budgets(value)
    elif isinstance(settings, list):
        for value in cast("list[Any]", settings):
            yield from _budgets(value)
