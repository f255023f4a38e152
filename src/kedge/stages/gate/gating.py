"""A gate from beginning to end: rules, evidence, decision, badcases, seal. The stage and the command both call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kedge.core.errors import ConfigError, ContractStop
from kedge.core.files import hash_json
from kedge.core.world import once
from kedge.gate.badcases import Badcase, badcases_hash, read_badcases
from kedge.gate.decide import decide
from kedge.gate.evidence import Evidence, Role, Source, Unmeasured, read_evidence
from kedge.gate.ledger import MANY_LOOKS, Part, count_looks
from kedge.gate.replayed import CaseResult, replay_results
from kedge.gate.results import RuleResult
from kedge.gate.rules import Rules, load_rules
from kedge.gate.verdict import GatedModel, SealedVerdict, seal_verdict
from kedge.stages.gate.models import Wanted, gated_model, judges_of, open_source, root_of, training_files
from kedge.stages.gate.replay import Replay, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model, and what it may be called in the folders that are read."""

    place: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRequest:
    candidate: NamedModel
    baseline: NamedModel
    sources: Sequence[Path]
    rules: Path
    badcases: Path
    ledger: Path
    is_reserved: bool
    """Decide by the items that are kept for a promotion."""
    replay: Replay
    """Of which the model and the files are filled in here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is decided before the candidate answers anything."""

    rules: Rules
    candidate: GatedModel
    baseline: GatedModel
    sources: list[Source]
    evidence: Evidence
    results: list[RuleResult]
    part: Part
    cases: list[Badcase]
    quarantined: int
    files: list[Path] | None


def gate(request: GateRequest, file: Path) -> tuple[SealedVerdict, list[str]]:
    """Decide, and write the verdict into `file`; gives it, and what is to be said besides."""
    world = request.replay.world
    ready = once(world, lambda: _prepare(request))
    how = replace(request.replay, model=ready.candidate.path, files=ready.files)
    replayed = replay(ready.cases, how)
    return once(world, lambda: _finish(request, ready, replayed, file))


def _prepare(request: GateRequest) -> _Prepared:
    rules = load_rules(request.rules)
    candidate, baseline = (gated_model(model.names[0], model.place) for model in (request.candidate, request.baseline))
    if candidate.content == baseline.content:
        raise ConfigError(f"{candidate.path} and {baseline.path} hold the same model: there is nothing to decide")
    reserve = rules.settings.reserve
    if request.is_reserved and not reserve:
        raise ConfigError(f"{request.rules}: no items are kept back (reserve is 0), so every verdict reads all of them")
    part: Part = "reserved" if request.is_reserved else "open" if reserve else "all"
    wanted: dict[Role, Wanted] = {
        "candidate": Wanted(model=candidate, names=request.candidate.names),
        "baseline": Wanted(model=baseline, names=request.baseline.names),
    }
    sources = [open_source(place, wanted) for place in request.sources]
    evidence = read_evidence(sources)
    results = decide(rules, evidence, part=part)
    today = datetime.now(UTC).date()
    cases = read_badcases(request.badcases)
    counting = [case for case in cases if case.counts(today)]
    return _Prepared(
        rules=rules,
        candidate=candidate,
        baseline=baseline,
        sources=sources,
        evidence=evidence,
        results=results,
        part=part,
        cases=counting,
        quarantined=len(cases) - len(counting),
        files=training_files(candidate) if counting else None,
    )


def _finish(
    request: GateRequest, ready: _Prepared, replayed: Sequence[CaseResult], file: Path
) -> tuple[SealedVerdict, list[str]]:
    rules, exams = ready.rules, _exams_of(ready)
    looks = count_looks(
        request.ledger,
        lineage=root_of(ready.candidate, ready.baseline),
        candidate=ready.candidate.content,
        exams=exams,
        part=ready.part,
    )
    notes = [
        f"{exam}: this is look {count} of its lineage, so that chance has had as many tries. Keep items back for the "
        "verdict that counts (reserve), or get new ones"
        for exam, count in looks.items()
        if count >= MANY_LOOKS
    ]
    judges = dict(judges_of([source.folder for source in ready.sources]))
    cases = {"folder": str(request.badcases), "hash": badcases_hash(ready.cases), "quarantined": ready.quarantined}
    verdict = seal_verdict(
        file,
        candidate=ready.candidate,
        baseline=ready.baseline,
        results=[
            *ready.results,
            *replay_results(rules.settings.replay, replayed, quarantined=ready.quarantined),
        ],
        rules={"file": str(rules.file), "hash": rules.hash, "content": rules.as_dict()},
        part=ready.part,
        exams={name: {"items_hash": items_hash, "looks": looks[name]} for name, items_hash in exams.items()},
        evidence=ready.evidence.files,
        about={
            "sources": [
                {"folder": str(source.folder), "names": dict(source.names), "tie": source.tie}
                for source in ready.sources
            ],
            "judge": {name: {"hash": hash_json(settings), "settings": settings} for name, settings in judges.items()},
            "badcases": {**cases, "results": [result.as_dict() for result in replayed]},
        },
    )
    return verdict, notes


def _exams_of(ready: _Prepared) -> dict[str, str]:
    """The exams that a rule has read, with the hashes of their items."""
    exams: dict[str, str] = {}
    for rule in ready.rules.all():
        try:
            name, _ = ready.evidence.resolve(rule.metric)
        except Unmeasured:  # a number of an evaluation, which has been decided
            continue
        exams[name] = ready.evidence.exams[name].items_hash
    return exams


def refuse(verdict: SealedVerdict, *, undecided: Literal["block", "allow"], file: Path) -> None:
    """End with exit code 3 where the candidate may not go out."""
    if verdict.verdict == "pass" or (verdict.verdict == "undecided" and undecided == "allow"):
        return
    deciding = [result for result in verdict.results if result.verdict == verdict.verdict]
    names = ", ".join(result.name for result in deciding)
    raise ContractStop(f"the gate says {verdict.verdict}: {names} ({file})")


def verdict_facts(verdict: SealedVerdict) -> dict[str, Any]:
    return {**verdict.body, "seal": verdict.seal}
