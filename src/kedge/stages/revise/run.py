"""Prompts in; demonstrations (the last revision) and pairs (the last over the first) out, with every step kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kedge.core.errors import DataError
from kedge.core.files import write_json, write_text
from kedge.core.seeds import seed_for
from kedge.data.examples import Messages, Prompt, text_of
from kedge.data.writing import row_writer
from kedge.feedback.constitution import Principle, fingerprint, read_constitution
from kedge.report.pages import render_page
from kedge.rewards.spending.tokens import Spent
from kedge.stages.revise.chains import PIECE, Chain, revised
from kedge.stages.revise.judging import RevisionJudge
from kedge.stages.revise.settings import ReviseSettings
from kedge.stages.revise.settle import (
    REASONS,
    Change,
    PrincipleReport,
    Reason,
    Settled,
    by_principle,
    change_of,
    counted,
    is_safe,
    judged_reason,
    reason_of,
    refusal,
)
from kedge.stages.revise.writers import EndpointWriter, LocalWriter
from kedge.stages.rl.candidates import fitting_prompts, read_prompts_once
from kedge.stages.shared.context import Context

REVISIONS, NUMBERS, REPORT = "revisions.jsonl", "revisions.json", "revise-report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that the files and the page tell."""

    settled: Sequence[Settled]
    principles: Sequence[PrincipleReport]
    constitution: str
    change: Change | None
    heldout: frozenset[int]
    spent: Mapping[str, Spent]
    """By the field of the recipe, what its calls cost."""

    @property
    def kept(self) -> list[Settled]:
        return [one for one in self.settled if one.left_out is None]


def run(context: Context, settings: ReviseSettings) -> Mapping[str, Path]:
    """Answer, criticise, revise, settle, write."""
    principles = read_constitution(context.input("constitution"))
    prompts = read_prompts_once(context, code="revise.broken")
    prompts = fitting_prompts(context, settings, prompts, context.inputs("from"))
    if not prompts:
        raise DataError(f"{context.input('prompts')}: no prompts in it; look at it with kedge data check")
    safe = [is_safe(prompt, settings.safe) for prompt in prompts]
    if not any(safe):
        message = "no prompt is called safe (revise.safe): refusals are counted, and none is left out as evasive"
        context.event("info", "revise.safe", message)
    max_failed = settings.failures.max_share
    judge = RevisionJudge(context, settings.judge, max_failed=max_failed) if settings.judge else None
    local = LocalWriter(context, settings)
    critic = EndpointWriter(context, settings.by, settings.failures) if settings.by else local
    chains: list[Chain] = []
    for start in range(0, len(prompts), PIECE):
        chains += revised(
            prompts[start : start + PIECE],
            principles,
            answerer=local,
            critic=critic,
            times=settings.times,
            seed=context.seed,
            start=start,
        )
        context.say(f"  {len(chains):,} of {len(prompts):,} answers revised")
    settled = _settled(chains, safe, judge)
    paid = {"by": critic if isinstance(critic, EndpointWriter) else None, "judge": judge}
    outcome = Outcome(
        settled=settled,
        principles=by_principle(chains),
        constitution=fingerprint(principles),
        change=change_of(chains),
        heldout=_heldout(prompts, settings.heldout, seed=context.seed),
        spent={field: who.spent() for field, who in paid.items() if who is not None},
    )
    made = context.once(lambda: _write(context, settings, principles, outcome))
    _tell(context, outcome)
    return made


def _settled(chains: Sequence[Chain], safe: Sequence[bool], judge: RevisionJudge | None) -> list[Settled]:
    reasons: list[Reason | None] = [reason_of(chain, safe=own) for chain, own in zip(chains, safe, strict=True)]
    good = [chain for chain, reason in zip(chains, reasons, strict=True) if reason is None]
    preferences = judge.preferences(good) if judge is not None else {}
    return [
        Settled(
            chain=chain,
            is_safe=own,
            left_out=judged_reason(preferences[chain.place]) if chain.place in preferences else reason,
            preference=preferences.get(chain.place),
        )
        for chain, own, reason in zip(chains, safe, reasons, strict=True)
    ]


def _heldout(prompts: Sequence[Prompt], share: float, *, seed: int) -> frozenset[int]:
    """Places of the prompts that are held out: equal prompts stand on one side."""
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(text_of(prompt.prompt), []).append(place)
    texts = list(places)
    order = np.random.default_rng(seed_for(seed, "heldout")).permutation(len(texts))
    chosen = [texts[int(at)] for at in order[: round(share * len(texts))]]
    return frozenset(place for text in chosen for place in places[text])


def _tell(context: Context, outcome: Outcome) -> None:
    left_out = counted(outcome.settled)
    listed = "".join(f"; {count:,} {reason}" for reason, count in left_out.items())
    message = f"{len(outcome.kept):,} of {len(outcome.settled):,} revisions become data{listed}"
    context.event("info", "revise.settled", message, kept=len(outcome.kept), **left_out)
    if change := outcome.change:
        context.say(
            f"  words {change.words_first:.1f} → {change.words_last:.1f}, refusals {change.refused_first:.1%} → "
            f"{change.refused_last:.1%}"
        )
    for field, spent in outcome.spent.items():
        context.event("info", "revise.spent", f"{field}: {spent.in_words()}", **asdict(spent))
    if not outcome.kept:
        why = "; ".join(f"{count:,}: {REASONS[reason]}" for reason, count in left_out.items())
        raise DataError(f"no revision is left to learn from ({why}); {REVISIONS} has them all")


def _write(
    context: Context, settings: ReviseSettings, principles: Sequence[Principle], outcome: Outcome
) -> Mapping[str, Path]:
    folder = context.folder
    _rows(folder / REVISIONS, outcome.settled, lambda one: _revision(one, outcome.heldout))
    learnt = [one for one in outcome.kept if one.chain.place not in outcome.heldout]
    held_out = [one for one in outcome.kept if one.chain.place in outcome.heldout]
    write_json(folder / NUMBERS, _numbers(settings, outcome))
    page = render_page(
        "kedge.stages.revise",
        "page.html.j2",
        settings=settings,
        outcome=outcome,
        left_out=counted(outcome.settled),
        reasons=REASONS,
        undrawn=len(principles) - len(outcome.principles),
        examples=outcome.kept[:5],
    )
    write_text(folder / REPORT, page)
    return {
        "demonstrations": _rows(folder / "demonstrations.jsonl", learnt, _demonstration),
        "pairs": _rows(folder / "pairs.jsonl", learnt, _pair),
        "heldout": _rows(folder / "heldout.jsonl", held_out, _pair),
    }


def _rows(file: Path, settled: Sequence[Settled], row: Callable[[Settled], Mapping[str, Any]]) -> Path:
    with row_writer(file) as write:
        for one in settled:
            write(row(one))
    return file


def _turns(prompt: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in prompt]


def _facts(one: Settled) -> dict[str, Any]:
    """What every row says of where it comes from."""
    return {"principles": [step.principle.id for step in one.chain.steps], "origin": str(one.chain.prompt.origin)}


def _demonstration(one: Settled) -> dict[str, Any]:
    turns = [*_turns(one.chain.prompt.prompt), {"role": "assistant", "content": one.chain.last}]
    return {"messages": turns, **_facts(one)}


def _pair(one: Settled) -> dict[str, Any]:
    chain = one.chain
    return {"prompt": _turns(chain.prompt.prompt), "chosen": chain.last, "rejected": chain.first, **_facts(one)}


def _revision(one: Settled, heldout: frozenset[int]) -> dict[str, Any]:
    chain = one.chain
    return {
        "prompt": _turns(chain.prompt.prompt),
        "first": chain.first,
        "steps": [
            {"principle": step.principle.id, "critique": step.critique, "revision": step.revision}
            for step in chain.steps
        ],
        "last": chain.last,
        "left_out": one.left_out,
        "detail": chain.broken.detail if chain.broken else "",
        "safe": one.is_safe,
        "refusal": {"first": refusal(chain.first), "last": refusal(chain.last)},
        "preference": one.preference,
        "heldout": chain.place in heldout,
        "origin": str(chain.prompt.origin),
    }


def _numbers(settings: ReviseSettings, outcome: Outcome) -> dict[str, Any]:
    return {
        "constitution": outcome.constitution,
        "times": settings.times,
        "prompts": len(outcome.settled),
        "safe": sum(one.is_safe for one in outcome.settled),
        "kept": len(outcome.kept),
        "heldout": sum(one.chain.place in outcome.heldout for one in outcome.kept),
        "left_out": counted(outcome.settled),
        "change": asdict(outcome.change) if outcome.change else None,
        "principles": [asdict(report) for report in outcome.principles],
        "spent": {field: _cost(spent) for field, spent in outcome.spent.items()},
    }


def _cost(spent: Spent) -> dict[str, Any]:
    """From the beginning of the run: how many replies this process found there says nothing of it."""
    return {name: value for name, value in asdict(spent).items() if name != "kept"}
