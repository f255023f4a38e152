"""`gate.yaml`: what a model must show before it may go out, as sections with a line for every mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kedge.core.errors import ConfigError
from kedge.core.files import hash_json
from kedge.core.settings import Section
from kedge.core.yaml.sections import problems_of, read_section
from kedge.core.yaml.source import KeyPath, Tree

RuleSection = Literal["improve", "keep", "limit", "replay"]
WIN_RATE, LENGTH_RATIO, SHRINKAGE, KL = "win_rate", "length.ratio", "length.shrinkage", "kl"
MEASURED = (LENGTH_RATIO, SHRINKAGE, KL)
"""What an `evaluate` stage measures; every other name is an exam, or a metric of one."""
Margin = Annotated[float, Field(gt=0, lt=1)]


class GainRule(Section):
    """Something that should be better. Of an exam, `0.02` is short for `{over: 0.02}`: better by more than this."""

    judge: str = Field(default="gold", min_length=1)
    """Of a win rate: who says who wins in the `evaluate` stage. `gold` or `reward`, which score every answer, or a
    judge by its name; `majority` are all judges together."""
    at_equal_length: bool = True
    """Of a win rate: as it would be if answers were equally long; without it, the plain one."""
    over: float = Field(default=0.5, ge=0, lt=1)
    """Shown is what is above this."""

    @model_validator(mode="before")
    @classmethod
    def _number_alone(cls, given: Any) -> Any:
        return {"over": given} if isinstance(given, int | float | str) else given


class KeepRule(Section):
    """One exam: `0.01` is short for `{margin: 0.01}`."""

    margin: Margin
    """The most by which the candidate may be worse."""
    by: str | None = Field(default=None, min_length=1)
    """A field of the items: every value of it must keep the margin too, so that a loss in one language cannot hide."""

    @model_validator(mode="before")
    @classmethod
    def _margin_alone(cls, given: Any) -> Any:
        return {"margin": given} if isinstance(given, int | float | str) else given


class ReplayRule(Section):
    """Which share of the badcases must hold, by their severity."""

    block: Literal["all"] | Annotated[float, Field(ge=0, le=1)] = "all"
    """Of those that block."""
    warn: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Of those that warn."""


class GateRules(Section):
    """`mmlu` names an exam's main metric, `xstest.refused_safe` another one; `length.ratio`, `length.shrinkage` (its
    inverse) and `kl` are measured by an `evaluate` stage."""

    improve: dict[str, GainRule] = Field(default_factory=dict[str, GainRule])
    """Of these at least one must be shown: `win_rate`, or an exam that is better by more than a number."""
    keep: dict[str, KeepRule] = Field(default_factory=dict[str, KeepRule])
    """By how much the candidate may be worse than the baseline at most."""
    limit: dict[str, float] = Field(default_factory=dict[str, float])
    """What the candidate must stay below, whatever the baseline does."""
    groups: dict[str, dict[str, Margin]] = Field(default_factory=dict[str, dict[str, Margin]])
    """Margins that every value of a field must keep: `{language: {mmlu: 0.05}}`."""
    replay: ReplayRule = ReplayRule()
    """Badcases."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Of every one-sided bound."""
    reserve: float = Field(default=0.0, ge=0, le=0.9)
    """Share of the items that are kept for the verdict that a promotion asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the rules. `threshold` is a margin, a limit, or what a gain must exceed."""

    section: RuleSection
    metric: str
    threshold: float
    path: KeyPath
    by: str | None = None
    win_rate: GainRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a file, in order."""

    settings: GateRules
    tree: Tree
    file: Path

    @property
    def hash(self) -> str:
        return hash_json(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json")

    def all(self) -> list[Rule]:
        return list(_rules_of(self.settings))

    def problem(self, rule: Rule, text: str) -> ConfigError:
        """An error about one rule, with its line."""
        return self.problems([(rule, text)])

    def problems(self, noted: list[tuple[Rule, str]]) -> ConfigError:
        return problems_of(self.file, [self.tree.problem(rule.path, text) for rule, text in noted])


def load_rules(file: Path) -> Rules:
    settings, tree = read_section(
        file, GateRules, noun="file of rules", start="`kedge gate --write-rules gate.yaml` writes rules to start from"
    )
    rules = Rules(settings=settings, tree=tree, file=file)
    if not rules.all():
        raise ConfigError(f"{file}: no rule in it: improve, keep and limit are empty, so nothing would be decided")
    return rules


def default_rules() -> str:
    """The text of the rules that ship."""
    return (files("kedge.gate") / "default.yaml").read_text(encoding="utf-8")


def _rules_of(settings: GateRules) -> Iterator[Rule]:
    for name, gain in settings.improve.items():
        win_rate = gain if name == WIN_RATE else None
        yield Rule(section="improve", metric=name, threshold=gain.over, win_rate=win_rate, path=("improve", name))
    for name, keep in settings.keep.items():
        yield Rule(section="keep", metric=name, threshold=keep.margin, path=("keep", name))
        if keep.by:
            yield Rule(section="keep", metric=name, threshold=keep.margin, by=keep.by, path=("keep", name, "by"))
    for field, margins in settings.groups.items():
        for name, margin in margins.items():
            yield Rule(section="keep", metric=name, threshold=margin, by=field, path=("groups", field, name))
    for name, limit in settings.limit.items():
        yield Rule(section="limit", metric=name, threshold=limit, path=("limit", name))
