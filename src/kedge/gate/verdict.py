"""`verdict.json`: what was decided about which weights, by which rules and evidence, sealed.

The seal is a hash of everything in the file. Whoever changes the file and the seal alike still has to make every rule
agree with its bounds and the whole with its rules; a promotion decides again from the evidence (`recheck`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from kedge.core.errors import DataError
from kedge.core.files import read_sealed_json, write_sealed_json
from kedge.evaluate.paired import Verdict
from kedge.gate.decide import overall
from kedge.gate.ledger import Part
from kedge.gate.results import RuleResult

FORMAT = 1
NAME = "verdict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedModel:
    """A model by what it is, whatever it is called."""

    name: str
    path: str
    weights: str
    """Hash of its safetensors files."""
    content: str
    """Hash of the whole folder but its card: weights, settings, tokenizer, template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedVerdict:
    verdict: Verdict
    candidate: GatedModel
    baseline: GatedModel
    part: Part
    reserve: float
    results: tuple[RuleResult, ...]
    created: str
    seal: str
    evidence: Mapping[str, str]
    """Files that were read, and their hashes."""
    body: Mapping[str, Any]
    """Everything, as the file has it."""

    @property
    def is_for_promotion(self) -> bool:
        """Whether it read the items that are kept for a promotion, where some are."""
        return self.part == ("reserved" if self.reserve else "all")


def seal_verdict(
    file: Path,
    *,
    candidate: GatedModel,
    baseline: GatedModel,
    results: Sequence[RuleResult],
    rules: Mapping[str, Any],
    part: Part,
    exams: Mapping[str, Mapping[str, Any]],
    evidence: Mapping[str, str],
    about: Mapping[str, Any],
) -> SealedVerdict:
    """Write the file. `rules` are their file, hash and content; `about` is what else belongs to it: judge, badcases."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "verdict": overall(results),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "candidate": _model_fields(candidate),
        "baseline": _model_fields(baseline),
        "rules": dict(rules),
        "items": part,
        "exams": {name: dict(facts) for name, facts in exams.items()},
        "evidence": dict(evidence),
        **about,
        "results": [result.as_dict() for result in results],
    }
    write_sealed_json(file, body)
    return read_verdict(file)


def read_verdict(file: Path) -> SealedVerdict:
    """A verdict as it was written; one that was changed since is an error."""
    try:
        body, seal = read_sealed_json(file, format=FORMAT, again="run the gate again")
        results = tuple(RuleResult(**fields) for fields in body["results"])
        verdict = SealedVerdict(
            verdict=body["verdict"],
            candidate=GatedModel(**body["candidate"]),
            baseline=GatedModel(**body["baseline"]),
            part=body["items"],
            reserve=float(body["rules"]["content"]["reserve"]),
            results=results,
            created=body["created"],
            seal=seal,
            evidence=body["evidence"],
            body=body,
        )
    except FileNotFoundError:
        raise DataError(f"{file}: there is no such verdict; `kedge gate` makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}: not a verdict of a gate ({type(error).__name__}: {error})") from error
    _refuse_contradiction(file, verdict)
    return verdict


def _refuse_contradiction(file: Path, verdict: SealedVerdict) -> None:
    """A whole that does not follow from its rules, or a rule that does not follow from its bounds."""
    if verdict.verdict not in get_args(Verdict) or overall(verdict.results) != verdict.verdict:
        raise DataError(f"{file}: it says {verdict.verdict!r}, which its own rules do not; run the gate again")
    for result in verdict.results:
        if result.verdict == "pass" and not _may_pass(result, alpha=float(verdict.body["rules"]["content"]["alpha"])):
            raise DataError(f"{file}: {result.section} {result.name} is said to pass, and its numbers say otherwise")


def _may_pass(result: RuleResult, *, alpha: float) -> bool:
    match result.section:
        case "keep":
            return result.low is not None and result.low > -result.threshold
        case "limit":
            return result.high is not None and result.high < result.threshold
        case "improve":
            return result.adjusted is not None and result.adjusted < alpha
        case "replay":
            return result.value is None or result.value >= result.threshold


def _model_fields(model: GatedModel) -> dict[str, str]:
    return {name: cast(str, getattr(model, name)) for name in ("name", "path", "weights", "content")}
