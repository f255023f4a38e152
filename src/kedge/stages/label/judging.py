"""Judges label tasks: who may, what it costs, both orders of every comparison. Replies are kept as they come, so that a
run that is resumed pays for nothing twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import cache_root, hash_json
from kedge.data.examples import Messages
from kedge.feedback.constitution import Principle, draw, fingerprint, read_constitution
from kedge.feedback.trust import deciding_fields, judge_identity, read_trust
from kedge.label.incoming import Draft, read_items
from kedge.rewards.context import RewardContext
from kedge.rewards.pairwise import BothOrders, Panelist, TwoAnswers, ledger_of, refuse_failures
from kedge.rewards.spending.ledger import SharedBudget
from kedge.rewards.spending.tokens import Estimate
from kedge.stages.label.deciding import Verdict, verdict_of
from kedge.stages.label.settings import Judge, LabelSettings, WithoutTrust
from kedge.stages.shared.context import Context

_CHUNK = 64
"""Comparisons that are asked at once: a server that is gone is noticed after so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two answers of a task, by their places."""

    task: int
    first: int
    second: int
    key: str
    """Of prompt and answers, whichever comes first: by it the principle is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A judge that may label."""

    settings: Judge
    panelist: Panelist
    principles: Sequence[Principle]
    trust: Mapping[str, Any]
    """What is written of its trust: the report that it passed, or the reason why it labels without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one judge said of every comparison."""

    judge: Ready
    estimate: Estimate
    votes: Sequence[Sequence[BothOrders]]
    verdicts: Sequence[Verdict]
    principles: Sequence[str | None] = field(default_factory=list[str | None])
    """The id of the principle of each comparison."""

    @property
    def failed(self) -> int:
        return sum(any(vote.reason for vote in votes) for votes in self.votes)


def read_tasks(source: str) -> tuple[list[Draft], list[Comparison]]:
    """The tasks, and every two answers of each; tasks that a judge cannot label are refused."""
    drafts = list(read_items(source).drafts)
    for draft in drafts:
        if len(draft.answers) < 2:
            what = "a thumb" if draft.answers else "a written answer"
            raise DataError(
                f"{draft.origin or source}: a task of {len(draft.answers)} answers asks for {what}; a judge compares "
                "two answers or more. People can do it (by: people), or make tasks with ask: pair or rank"
            )
    comparisons = [
        Comparison(task=task, first=first, second=second, key=key_of(draft.prompt, [left.text, right.text]))
        for task, draft in enumerate(drafts)
        for (first, left), (second, right) in combinations(enumerate(draft.answers), 2)
    ]
    if not comparisons:
        raise DataError(f"{source}: there is nothing to compare in it")
    return drafts, comparisons


def open_judges(settings: LabelSettings, context: Context) -> list[Ready]:
    """The judges of a stage: rubrics, keys, constitutions and trust are looked at before anything is asked. All of them
    spend of the stage's budget, where it has one."""
    shared = SharedBudget(settings.budget.usd) if settings.budget else None
    known = RewardContext(folder=context.recipe_folder, seed=context.seed, note=partial(context.event, "warning"))
    return [
        open_judge(
            judge, known, cache=cache_root() / "judge", ledger=ledger_of(context.folder, judge, number), shared=shared
        )
        for number, judge in enumerate(settings.judges)
    ]


def open_judge(
    judge: Judge,
    known: RewardContext,
    *,
    cache: Path | None = None,
    ledger: Path | None = None,
    shared: SharedBudget | None = None,
) -> Ready:
    """A judge, once it may label; else a ConfigError that says why not."""
    principles = read_constitution(known.folder / judge.constitution) if judge.constitution else ()
    panelist = Panelist(judge, known, cache=cache, ledger=ledger, shared=shared, by_principle=bool(principles))
    fields = judge.model_dump(include={"model", "temperature", "max_tokens"}) | {
        "url": judge.url,
        "rubric": panelist.rubric,
        "constitution": fingerprint(principles) if principles else None,
    }
    return Ready(settings=judge, panelist=panelist, principles=principles, trust=_trust(judge, fields, known.folder))


def _trust(judge: Judge, fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    identity = judge_identity(fields)
    if isinstance(judge.trust, WithoutTrust):
        return {"identity": identity, "without": judge.trust.without}
    file = folder / judge.trust
    again = 'measure this one with `kedge judge trust`, or say why not: trust: {without: "reason"}'
    trust = read_trust(file)
    if trust.identity != identity:
        own = deciding_fields(fields)
        other = [name for name, value in own.items() if trust.settings.get(name) != value]
        raise ConfigError(
            f"by.trust: {file}: it is the report on another judge than {judge.label} ({trust.judge}; other: "
            f"{', '.join(other)}); {again}"
        )
    if not trust.passed:
        raise ConfigError(f"by.trust: {file}: {trust.judge} may not label: {'; '.join(trust.reasons)}; {again}")
    return {"identity": identity, "report": judge.trust, "created": trust.created, "data": trust.data}


def ask(context: Context, judge: Ready, drafts: Sequence[Draft], comparisons: Sequence[Comparison]) -> Judged:
    """What a judge says of all comparisons, what that costs being told before."""
    settings, panelist = judge.settings, judge.panelist
    pairs, drawn = pairs_of(judge, drafts, comparisons, seed=context.seed)
    estimate = panelist.estimate(pairs, samples=settings.votes)
    budget = f" of a budget of {settings.budget.usd:g} USD" if settings.budget else ""
    context.event(
        "info", "label.estimate", f"{panelist.name}: {len(pairs):,} comparisons: {estimate.in_words()}{budget}"
    )
    votes: list[list[BothOrders]] = []
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        samples = [panelist.compare(chunk, sample=sample) for sample in range(settings.votes)]
        votes += [list(own) for own in zip(*samples, strict=True)]
        _refuse_failures(settings, votes, chunk=len(chunk), comparisons=len(pairs))
    return Judged(
        judge=judge,
        estimate=estimate,
        votes=votes,
        verdicts=[verdict_of(own) for own in votes],
        principles=[principle and principle.id for principle in drawn],
    )


def pairs_of(
    judge: Ready, drafts: Sequence[Draft], comparisons: Sequence[Comparison], *, seed: int
) -> tuple[list[TwoAnswers], list[Principle | None]]:
    """What a judge is shown of each comparison, and the principle that it is asked to compare by."""
    drawn = [
        draw(judge.principles, seed=seed, key=comparison.key) if judge.principles else None
        for comparison in comparisons
    ]
    pairs = [
        _two_answers(drafts[comparison.task], comparison, principle)
        for comparison, principle in zip(comparisons, drawn, strict=True)
    ]
    return pairs, drawn


def _refuse_failures(judge: Judge, votes: Sequence[Sequence[BothOrders]], *, chunk: int, comparisons: int) -> None:
    """Stop where more comparisons failed than may in all, or where nothing was answered lately: a server that is gone
    is not asked for the rest."""
    failed = [next((vote for vote in own if vote.reason), own[0]) for own in votes]
    if all(vote.reason for vote in failed[-chunk:]):
        refuse_failures(
            judge.label, failed[-chunk:], max_share=0.0 if judge.max_failed < 1 else 1, setting="max_failed"
        )
    allowed = judge.max_failed * comparisons / len(failed)
    refuse_failures(judge.label, failed, max_share=min(1.0, allowed), setting="max_failed")


def _two_answers(draft: Draft, comparison: Comparison, principle: Principle | None) -> TwoAnswers:
    return TwoAnswers(
        prompt=tuple((message.role, message.content) for message in draft.prompt),
        first=text_of(draft.answers[comparison.first].text),
        second=text_of(draft.answers[comparison.second].text),
        principle=principle.choice if principle else "",
    )


def text_of(answer: Messages) -> str:
    """An answer as a judge is shown it: one message is its text, several name who speaks."""
    if len(answer) == 1:
        return answer[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in answer)


def key_of(prompt: Messages, answers: Sequence[Messages]) -> str:
    """Of a prompt and answers, in whichever order they stand."""
    return hash_json([[message.role, message.content] for message in prompt] + sorted(map(text_of, answers)))
