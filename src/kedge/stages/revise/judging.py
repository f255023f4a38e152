"""A judge that compares last revisions with first answers, asked by the first process."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.rewards.context import RewardContext
from kedge.rewards.pairwise import Panelist, TwoAnswers, refuse_failures
from kedge.rewards.settings import PairwiseJudge
from kedge.rewards.spending.tokens import Spent
from kedge.stages.revise.chains import Chain
from kedge.stages.revise.writers import CALLS
from kedge.stages.shared.context import Context

LEDGER = "judge-ledger.jsonl"


class RevisionJudge:
    """Opened before anything is sampled: a rubric or a key that is wrong is refused first."""

    def __init__(self, context: Context, settings: PairwiseJudge, *, max_failed: float) -> None:
        self._context, self._settings, self._max_failed = context, settings, max_failed
        context.once(self._open)

    def _open(self) -> None:
        known = RewardContext(
            folder=self._context.recipe_folder,
            seed=self._context.seed,
            note=lambda code, words: self._context.event("warning", f"revise.{code}", words),
        )
        folder = self._context.folder / CALLS
        self._panelist = Panelist(self._settings, known, cache=folder, ledger=folder / LEDGER)

    def preferences(self, chains: Sequence[Chain]) -> dict[int, float | None]:
        """By place, how much the judge prefers the last revision, from 0 to 1, as the mean of both orders; None where
        it names no winner."""
        return self._context.once(lambda: self._preferences(chains))

    def spent(self) -> Spent:
        return self._context.once(lambda: self._panelist.calls.spent)

    def _preferences(self, chains: Sequence[Chain]) -> dict[int, float | None]:
        results = self._panelist.compare(
            [
                TwoAnswers(
                    prompt=tuple((message.role, message.content) for message in chain.prompt.prompt),
                    first=chain.last,
                    second=chain.first,
                )
                for chain in chains
            ]
        )
        refuse_failures(self._panelist.name, results, max_share=self._max_failed)
        return {
            chain.place: None if result.as_a is None or result.as_b is None else (result.as_a + result.as_b) / 2
            for chain, result in zip(chains, results, strict=True)
        }
