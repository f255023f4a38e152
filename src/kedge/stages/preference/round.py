"""One round of preference training: what is learnt and what is held out, in batches, with a learner of its own.

Offline training is one round; online training has one for every time that the policy answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

from torch import Tensor

from kedge.core.batches import AnswerBatch
from kedge.data.batching import LabelledAnswers, answer_batches, num_steps, step_rows
from kedge.data.encoding.store import joined, lazy_map
from kedge.models.forward.heads import LanguageModel
from kedge.models.training.learner import Learner
from kedge.models.training.passes import Cut, Passes, PassSize
from kedge.models.training.preference_methods import KTO, TDPO, needs_reference
from kedge.models.training.preference_objectives import Reference, anchor_point, preference_objective
from kedge.models.training.train_step import TrainedWeights
from kedge.stages.preference.preferences import Preference, mismatched, sequences_of, with_reference_logprobs
from kedge.stages.preference.reference import reference_logprobs
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.loop import held_out_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSet:
    """Labelled answers with the reference's log-probs, where the method reads them.

    `anchors` are for KTO alone: beside each item its prompt with an answer to another one.
    """

    items: Sequence[LabelledAnswers]
    anchors: Sequence[LabelledAnswers]

    def take(self, rows: Sequence[int]) -> AnswerSet:
        anchors = [self.anchors[row] for row in rows] if self.anchors else []
        return AnswerSet(items=[self.items[row] for row in rows], anchors=anchors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRound:
    settings: PreferenceSettings
    policy: LanguageModel
    learner: Learner[AnswerBatch]
    train: AnswerSet
    held_out: AnswerSet
    pad: int

    def order(self, seed: int) -> Iterator[list[int]]:
        """The rows of each optimiser step, from where the learner is."""
        epochs, batch = self.settings.epochs, self.settings.batch
        return step_rows(
            len(self.train.items),
            epochs=epochs,
            batch=batch,
            seed=seed,
            start=self.learner.step,
            max_steps=self.learner.total_steps,
        )

    def batches(self, rows: Sequence[int]) -> Cut[AnswerBatch]:
        """The micro-batches of one optimiser step, for any size of them."""
        return self._lay_out(self.train.take(rows))

    def held_out_metrics(self) -> dict[str, float]:
        return held_out_metrics(self.learner, self._lay_out(self.held_out))

    def _lay_out(self, answers: AnswerSet) -> Cut[AnswerBatch]:
        """KTO's reference point is estimated with the weights as they are now, so batches are made when needed."""
        anchor = None
        if answers.anchors:
            others = partial(self._cut, answers.anchors, None)
            anchor = anchor_point(self.learner.trained.module, self.policy, others, self.learner.train_step.inference)
        if self.settings.is_sorted:
            return lambda _: answer_batches(answers.items, pad=self.pad)
        return partial(self._cut, answers.items, anchor)

    def _cut(self, items: Sequence[LabelledAnswers], anchor: Tensor | None, size: PassSize) -> Sequence[AnswerBatch]:
        return answer_batches(
            items, rows=size.rows, tokens=size.tokens, shares=size.shares, pad=self.pad, anchor=anchor
        )


def prepare_round(
    context: Context,
    settings: PreferenceSettings,
    trained: TrainedWeights,
    policy: LanguageModel,
    *,
    train: Sequence[Preference],
    held_out: Sequence[Preference],
    reference: Reference,
    file: Path,
    pad: int,
    passes: Passes,
    max_steps: int | None,
    has_adapters: bool = False,
) -> PreferenceRound:
    """A learner for these preferences, and the log-probs of the model that `reference` opens, which `file` keeps.

    With `has_adapters`, adapters are a part of the reference.
    """
    objective_reference = reference if isinstance(settings.method, TDPO) else None
    objective = preference_objective(policy, settings.method, reference=objective_reference)
    total = num_steps(len(train), epochs=settings.epochs, batch=settings.batch, max_steps=max_steps)
    learner = Learner(trained, policy.backbone, objective, settings.optimiser, total_steps=total, passes=passes)
    parts = [_answer_set(items, settings) for items in (train, held_out)]
    if needs_reference(settings.method):
        logp = reference_logprobs(
            context,
            reference,
            joined([sequences_of(items) for part in parts for items in (part.items, part.anchors)]),
            file=file,
            pad=pad,
            has_adapters=has_adapters,
        )
        parts = _with_reference(parts, logp)
    train_part, held_out_part = parts
    return PreferenceRound(
        settings=settings, policy=policy, learner=learner, train=train_part, held_out=held_out_part, pad=pad
    )


def _answer_set(items: Sequence[Preference], settings: PreferenceSettings) -> AnswerSet:
    is_kto = isinstance(settings.method, KTO)
    return AnswerSet(
        items=lazy_map(lambda item: item.answers, items),
        anchors=mismatched(items, max_length=settings.max_length) if is_kto else [],
    )


def _with_reference(parts: Sequence[AnswerSet], logprobs: Sequence[float]) -> list[AnswerSet]:
    """`logprobs` are of all sequences, part by part, those of a part's items before those of its anchors."""
    sets = [items for part in parts for items in (part.items, part.anchors)]
    ends = list(accumulate((len(sequences_of(items)) for items in sets), initial=0))
    changed = [
        with_reference_logprobs(items, logprobs[start:end])
        for items, (start, end) in zip(sets, pairwise(ends), strict=True)
    ]
    return [AnswerSet(items=changed[at], anchors=changed[at + 1]) for at in range(0, len(changed), 2)]
