"""What a stage cost: seconds by phase, and tokens. From the metrics alone, so a resumed run counts its steps once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kedge.report.run.records import Record, StageRecord

_PHASES = {"time/generate": "generating", "time/judge": "judging", "time/update": "learning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`seconds` is the time of the steps; `by_phase` what is known of its parts, the rest as "other"."""

    seconds: float
    elapsed: float
    tokens: float
    by_phase: tuple[tuple[str, float], ...]


def cost_of(stage: StageRecord) -> Cost:
    metrics = stage.metrics
    seconds = _sum(metrics, "time/step")
    tokens = sum(record.get("tokens/per_second", 0.0) * record.get("time/step", 0.0) for record in metrics)
    phases = [(name, _sum(metrics, key)) for key, name in _PHASES.items()]
    known = [(name, spent) for name, spent in phases if spent]
    other = seconds - sum(spent for _, spent in known)
    if known and other > 0.01 * seconds:
        known.append(("other", other))
    return Cost(seconds=seconds, elapsed=elapsed(stage), tokens=tokens, by_phase=tuple(known))


def elapsed(stage: StageRecord) -> float:
    """Seconds from the manifest's beginning to its end, or to the last thing that was written."""
    begun = datetime.fromisoformat(stage.manifest.created).timestamp()
    if stage.manifest.finished:
        return max(0.0, datetime.fromisoformat(stage.manifest.finished).timestamp() - begun)
    written = [journal[-1]["at"] for journal in (stage.metrics, stage.events, stage.samples) if journal]
    return max(0.0, max(written, default=begun) - begun)


def _sum(metrics: Sequence[Record], name: str) -> float:
    return sum(record.get(name, 0.0) for record in metrics)
