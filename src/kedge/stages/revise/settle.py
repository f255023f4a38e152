"""Which chains become data, why the others do not, and what each principle did: pure functions of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Final, Literal

from kedge.core.errors import DataError
from kedge.core.quoting import quoted
from kedge.data.examples import Prompt
from kedge.exams.refusal import Refusal, classify
from kedge.stages.revise.chains import Chain, Step
from kedge.stages.revise.settings import SafePrompts

Reason = Literal["failed", "too_long", "empty", "unchanged", "evasive", "unjudged", "judged_worse"]
REASONS: Final[Mapping[Reason, str]] = {
    "failed": "a call for a critique or a revision failed",
    "too_long": "a request left no room for a reply in the model's window",
    "empty": "the answer or its last revision is empty",
    "unchanged": "the last revision is the first answer",
    "evasive": "the last revision refuses, and the prompt is safe",
    "unjudged": "the judge named no winner",
    "judged_worse": "the judge prefers the first answer",
}
"""Why a chain is left out, in the order in which it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A chain, whether its prompt is safe, and why it is left out; None where it becomes data."""

    chain: Chain
    is_safe: bool
    left_out: Reason | None
    preference: float | None = None
    """What the judge thinks of the last revision beside the first answer, from 0 to 1; None where it was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipleReport:
    """What became of the answers that a principle was drawn for. Shares are from 0 to 1, lengths in words."""

    id: str
    axis: str
    steps: int
    changed: float
    empty: int
    words_before: float
    words_after: float
    refused_before: float
    refused_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First answers and last revisions of all chains that came to their end."""

    chains: int
    words_first: float
    words_last: float
    refused_first: float
    refused_last: float


def is_safe(prompt: Prompt, safe: SafePrompts) -> bool:
    """Whether a refusal is no answer to this prompt."""
    value = prompt.extra.get(safe.field)
    if value is None:
        return safe.default
    if not isinstance(value, bool):
        raise DataError(f"{prompt.origin}: {safe.field}: must be true or false, found {quoted(value)} (revise.safe)")
    return value


def reason_of(chain: Chain, *, safe: bool) -> Reason | None:
    """Why a chain is left out, as far as its texts say; None where they do not."""
    if chain.broken is not None:
        return "too_long" if chain.broken.reason == "too_long" else "failed"
    if not chain.first or not chain.steps[-1].revision:
        return "empty"
    if _plain(chain.last) == _plain(chain.first):
        return "unchanged"
    return "evasive" if safe and refusal(chain.last) == "full" else None


def judged_reason(preference: float | None) -> Reason | None:
    """The same by a judge that was asked: a tie is no reason.

    >>> judged_reason(0.5), judged_reason(0.0), judged_reason(None)
    (None, 'judged_worse', 'unjudged')
    """
    if preference is None:
        return "unjudged"
    return "judged_worse" if preference < 0.5 else None


def counted(settled: Iterable[Settled]) -> dict[Reason, int]:
    """Chains that are left out, by reason."""
    counts = Counter(one.left_out for one in settled if one.left_out is not None)
    return {reason: counts[reason] for reason in REASONS if counts[reason]}


def change_of(chains: Sequence[Chain]) -> Change | None:
    """None where no chain came to its end."""
    whole = [chain for chain in chains if chain.broken is None]
    if not whole:
        return None
    return Change(
        chains=len(whole),
        words_first=fmean(len(chain.first.split()) for chain in whole),
        words_last=fmean(len(chain.last.split()) for chain in whole),
        refused_first=fmean(refusal(chain.first) != "none" for chain in whole),
        refused_last=fmean(refusal(chain.last) != "none" for chain in whole),
    )


def by_principle(chains: Iterable[Chain]) -> list[PrincipleReport]:
    """Of every principle that was drawn, those of one axis together."""
    steps: dict[str, list[Step]] = {}
    for chain in chains:
        for step in chain.steps:
            steps.setdefault(step.principle.id, []).append(step)
    reports = [_report(own) for own in steps.values()]
    return sorted(reports, key=lambda report: (report.axis, report.id))


@lru_cache(maxsize=1 << 16)
def refusal(text: str) -> Refusal:
    """Chains hold the same text several times, as what was before and what was after."""
    return classify(text)


def _report(steps: Sequence[Step]) -> PrincipleReport:
    return PrincipleReport(
        id=steps[0].principle.id,
        axis=steps[0].principle.axis,
        steps=len(steps),
        changed=fmean(_plain(step.before) != _plain(step.after) for step in steps),
        empty=sum(not step.revision for step in steps),
        words_before=fmean(len(step.before.split()) for step in steps),
        words_after=fmean(len(step.after.split()) for step in steps),
        refused_before=fmean(refusal(step.before) != "none" for step in steps),
        refused_after=fmean(refusal(step.after) != "none" for step in steps),
    )


def _plain(text: str) -> str:
    return " ".join(text.split())
