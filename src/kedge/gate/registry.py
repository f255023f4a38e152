"""`models/registry.jsonl`: which model went out under which name, by which verdict, or by whose override."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kedge.core.errors import ConfigError, ContractStop
from kedge.gate.chain import append_chain, read_chain
from kedge.gate.recheck import contradiction
from kedge.gate.verdict import GatedModel, SealedVerdict

REGISTRY = Path("models/registry.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    alias: str
    model: GatedModel
    verdict: str
    """`pass`, or what it was when somebody overrode it; `none` where there was none."""
    seal: str
    override: str
    by: str
    at: str


def promote(
    registry: Path,
    *,
    alias: str,
    model: GatedModel,
    verdicts: Iterable[tuple[Path, SealedVerdict]],
    by: str,
    override: str = "",
) -> Promotion:
    """Enter a model under a name. Refused without a passing verdict for exactly its weights, unless overridden."""
    own = [(file, verdict) for file, verdict in verdicts if verdict.candidate.content == model.content]
    final = [(file, verdict) for file, verdict in own if verdict.is_for_promotion]
    latest = max(final, key=lambda entry: entry[1].created, default=None)
    refusal = _refusal(model, own, latest)
    if refusal and not override:
        raise ContractStop(f"{model.path} is not promoted: {refusal}")
    if override and not override.strip():
        raise ConfigError("--override needs a reason: it stays in the registry")
    record = {
        "as": alias,
        "model": {"path": model.path, "name": model.name, "weights": model.weights, "content": model.content},
        "verdict": latest[1].verdict if latest else "none",
        "verdict_file": str(latest[0]) if latest else None,
        "seal": latest[1].seal if latest else None,
        "override": override if refusal else None,
        "by": by,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    line = append_chain(registry, lambda _: record)
    assert line is not None
    return _promotion(line)


def promotions(registry: Path) -> list[Promotion]:
    """All that was ever promoted, in order; a line that was changed is an error."""
    return [_promotion(line) for line in read_chain(registry)]


def _refusal(
    model: GatedModel, own: list[tuple[Path, SealedVerdict]], latest: tuple[Path, SealedVerdict] | None
) -> str:
    """Why there is no passing verdict; empty where there is one."""
    if latest is None:
        if own:
            return (
                f"{own[-1][0]} has not read the items that are kept for a promotion; run `kedge gate … --reserved` "
                "(stage: reserved: true)"
            )
        return (
            f"there is no verdict for these weights ({model.weights}); run `kedge gate CANDIDATE BASELINE --from "
            'FOLDER`, or give --verdict FILE, or --override "reason"'
        )
    file, verdict = latest
    if verdict.verdict != "pass":
        rules = ", ".join(result.name for result in verdict.results if result.verdict != "pass")
        return f"its verdict is {verdict.verdict} ({rules}; {file})"
    if found := contradiction(verdict):
        return f"{found} ({file}); run the gate again"
    return ""


def _promotion(line: Mapping[str, Any]) -> Promotion:
    return Promotion(
        alias=line["as"],
        model=GatedModel(**line["model"]),
        verdict=line["verdict"],
        seal=line["seal"] or "",
        override=line["override"] or "",
        by=line["by"],
        at=line["at"],
    )
