"""A verdict decided again from its evidence: what was changed together with its seal shows here."""

from __future__ import annotations

from pathlib import Path

from kedge.core.files import hash_file
from kedge.core.yaml.source import tree_of
from kedge.gate.decide import decide
from kedge.gate.evidence import Source, read_evidence
from kedge.gate.rules import GateRules, Rules
from kedge.gate.verdict import SealedVerdict


def contradiction(verdict: SealedVerdict) -> str:
    """How the evidence differs from what a verdict says of it; empty where it does not, or where some of it is gone."""
    files = {name: Path(name) for name in verdict.evidence}
    for name, file in files.items():
        if file.is_file() and hash_file(file) != verdict.evidence[name]:
            return f"{name} is not what the verdict was made from"
    if not all(file.is_file() for file in files.values()):
        return ""
    about = verdict.body["rules"]
    rules = Rules(
        settings=GateRules.model_validate(about["content"]), tree=tree_of(about["content"]), file=Path(about["file"])
    )
    sources = [
        Source(folder=Path(source["folder"]), names=source["names"], tie=source["tie"])
        for source in verdict.body["sources"]
    ]
    again = {
        (result.section, result.name): result for result in decide(rules, read_evidence(sources), part=verdict.part)
    }
    told = {(result.section, result.name): result for result in verdict.results if result.section != "replay"}
    for rule in dict.fromkeys((*again, *told)):
        if rule not in told or rule not in again or told[rule].verdict != again[rule].verdict:
            said = told[rule].verdict if rule in told else "not there"
            found = again[rule].verdict if rule in again else "not asked for"
            return f"{' '.join(rule)} is {said} in the verdict, and {found} by the evidence"
    return ""
