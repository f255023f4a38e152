"""What a board shows, as plain records: whoever gathers it has computed every number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Decision = Literal["pass", "fail", "undecided"]
Change = Literal["better", "worse", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A row of the board."""

    label: str
    origin: str
    """The stage that made it, or where it was met first."""
    kind: str
    """Of that stage; empty for a model from outside."""
    weights: str
    is_baseline: bool
    aliases: tuple[str, ...] = ()
    """The names under which it is out now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One metric of one exam, or the win rate by one judge. All numbers in it were measured alike."""

    title: str
    metric: str
    topic: str
    better: Literal["more", "less"]
    summary: str
    items_hash: str
    is_share: bool
    is_main: bool = True
    """Shown with arrows; others stand in a table of their own, without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A model minus the baseline on the items of both, above 0 where the model is better; `low` and `high` are its
    95 % interval."""

    value: float
    low: float
    high: float
    p_value: float
    items: int
    left_out: int = 0
    """Items that only one of the two has a score for."""
    adjusted: float = 1.0
    """The p-value adjusted for all arrows of the page (Holm)."""

    def change(self, alpha: float) -> Change:
        if self.adjusted >= alpha or self.value == 0:
            return "undecided"
        return "better" if self.value > 0 else "worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    value: float
    low: float
    high: float
    items: int
    difference: Difference | None = None
    note: str = ""
    """Why there is no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The items with one value of a field: a cell for each model of the board, None where there is none."""

    value: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    column: Column
    field: str
    rows: tuple[GroupRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One rule of a verdict in words."""

    section: str
    name: str
    value: str
    needs: str
    items: int
    verdict: Decision
    is_deciding: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictCard:
    file: str
    problem: str = ""
    """Why it is not to be trusted; then there is nothing else."""
    verdict: Decision = "undecided"
    candidate: str = ""
    baseline: str = ""
    created: str = ""
    weights: str = ""
    rules_file: str = ""
    rules: tuple[RuleRow, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRow:
    alias: str
    model: str
    weights: str
    verdict: str
    by: str
    at: str
    override: str
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow:
    id: str
    severity: str
    status: str
    why: str
    check: str
    replayed: tuple[str, ...]
    """What the verdicts of the page found: candidate and outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaxPoint:
    """What a model gained, and what it paid: win rate over the baseline, and the worst of its differences."""

    label: str
    gain: Cell
    exam: str
    loss: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    label: str
    strength: float
    error: float
    elo: float
    places: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class League:
    """All models that one source of preferences has compared."""

    source: str
    standings: tuple[Standing, ...]
    problem: str
    """Why there is no ranking; then there are no standings."""
    models: tuple[str, ...]
    wins: Mapping[tuple[str, str], tuple[float, int]]
    """By two models: the share of the comparisons that the first won, ties halved, and how many there are."""
    matches: int
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyPoint:
    label: str
    proxy: Cell
    gold: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class LostItem:
    """An item that the baseline did better."""

    model: str
    column: str
    item: str
    score: float
    baseline_score: float
    prompt: tuple[tuple[str, str], ...]
    answer: str
    baseline_answer: str
    command: str
    """Makes a badcase of it; empty where none can be made."""
    problem: str = ""
    """Why none can be made."""
    choices: tuple[str, ...] = ()
    """What there was to choose from, where the prompt does not say it."""
    source: tuple[str, str] | None = None
    """The file of answers and the id in it; None where no badcase can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    items: tuple[LostItem, ...] = ()
    count: int = 0
    """All of them, also those that the page has no room for."""
    unanswered: int = 0
    """Lost items whose answers nobody has kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    models: tuple[Model, ...]
    columns: tuple[Column, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    """By model, then by column."""
    alpha: float
    comparisons: int
    """Differences that the p-values are adjusted for."""
    groups: tuple[GroupTable, ...] = ()
    verdicts: tuple[VerdictCard, ...] = ()
    promotions: tuple[PromotionRow, ...] = ()
    cases: tuple[CaseRow, ...] = ()
    tax: tuple[TaxPoint, ...] = ()
    tax_source: str = ""
    kept: tuple[str, ...] = ()
    """The exams among which the worst difference is looked for."""
    leagues: tuple[League, ...] = ()
    proxies: tuple[tuple[ProxyPoint, ...], ...] = ()
    """A course for each set of prompts and judges."""
    lost: Lost = Lost()
    notes: Sequence[str] = field(default_factory=tuple[str, ...])
    problems: Sequence[str] = field(default_factory=tuple[str, ...])
    """What could not be read."""

    @property
    def baseline(self) -> str:
        return next((model.label for model in self.models if model.is_baseline), "")
