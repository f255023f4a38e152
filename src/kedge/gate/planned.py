"""Rules against stages that have not run yet: which of them would have nothing to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean
from kedge.core.yaml.source import read_tree
from kedge.evaluate.judged import MAJORITY
from kedge.exams.catalogue import expanded, is_engine
from kedge.gate.rules import MEASURED, Rule, Rules

SCORES = ("gold", "reward")
"""Settings of an evaluation that give every answer a score."""


def unasked(rules: Rules, stages: Sequence[Section], folder: Path) -> list[tuple[Rule, str]]:
    """Rules that name an exam which none of these stages takes, or a number of an evaluation that none of them is.

    Own exams are files that start in `folder`. What an engine of others calls its exams is not known before it runs.
    """
    exams = [exam for stage in stages if _kind(stage) == "exam" for exam in expanded(getattr(stage, "exams", ()))]
    if any(map(is_engine, exams)):
        return []
    names = [str(read_tree(folder / exam).values.get("name")) if _is_file(exam) else exam for exam in exams]
    evaluations = [stage for stage in stages if _kind(stage) == "evaluate"]
    return [(rule, text) for rule in rules.all() if (text := _lack(rule, names, evaluations))]


def _lack(rule: Rule, exams: Sequence[str], evaluations: Sequence[Section]) -> str:
    if rule.win_rate is not None:
        known = [name for stage in evaluations for name in _judges(stage)]
        if (judge := rule.win_rate.judge) in known:
            return ""
        there = f"; there are {', '.join(known)}" if known else ""
        return (
            f"no evaluate stage of `from` has `{judge}`{did_you_mean(judge, known)}{there}: nobody would say who wins"
        )
    if rule.metric in MEASURED:
        return "" if evaluations else "no evaluate stage is in `from`, and it is measured there"
    if any(rule.metric == exam or rule.metric.startswith(f"{exam}.") for exam in exams):
        return ""
    exam = rule.metric.partition(".")[0]
    there = f"; they take {', '.join(exams)}" if exams else ""
    return f"no exam stage of `from` takes {exam!r}{did_you_mean(exam, exams)}{there}: add it to its `exams`"


def _judges(stage: Section) -> list[str]:
    """Who tells the winner in an evaluation: its sources of scores, its judges, and of several all together."""
    sources = [name for name in SCORES if getattr(stage, name, None) is not None]
    judges = [str(judge.label) for judge in getattr(stage, "judges", ())]
    return [*sources, *judges, *([MAJORITY] if len(judges) > 1 else [])]


def _is_file(exam: str) -> bool:
    return exam.endswith((".yaml", ".yml"))


def _kind(stage: Section) -> str:
    return str(getattr(stage, "kind", ""))
