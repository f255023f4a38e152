"""One lesson of preferences: what is learnt and what is looked at, laid out in batches, with a learner of its own.

Offline training is one lesson, online training one a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from kedge.core.batches import AnswerBatch
from kedge.core.protocols import Metrics
from kedge.data.batching import LabelledAnswers, answer_batches, num_steps, step_rows
from kedge.models.forward.lora import Module
from kedge.models.training.learner import Learner
from kedge.models.training.preference_methods import KTO, TDPO, needs_reference
from kedge.models.training.preference_objectives import Reference, anchor_point, preference_objective
from kedge.stages.preference.preferences import Preferences, mismatched, referred, sequences_of
from kedge.stages.preference.reference import reference_logprobs
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.shared import loop as training
from kedge.stages.shared.context import Context

Look = Callable[[], Metrics]
"""What the held-out preferences say of the policy as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRound:
    """`reference` opens the model that holds the policy; its log-probs are kept in `file`."""

    data: Preferences
    held: Preferences
    reference: Reference
    file: Path
    seed: int
    has_adapters: bool = False
    """Whether adapters are a part of the reference."""
    first_step: int = 0
    """How many steps of the run came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is trained on, or looked at. `anchors` are for KTO alone: one answer to another prompt beside each item."""

    items: Sequence[LabelledAnswers]
    anchors: Sequence[LabelledAnswers]

    def take(self, rows: Sequence[int]) -> _Part:
        anchors = [self.anchors[row] for row in rows] if self.anchors else []
        return _Part(items=[self.items[row] for row in rows], anchors=anchors)


_LayOut = Callable[[_Part], list[AnswerBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeAnew:
    """Held-out batches as they are at each look: KTO's carry a number that depends on the weights."""

    make: Callable[[], list[AnswerBatch]]

    def __iter__(self) -> Iterator[AnswerBatch]:
        return iter(self.make())


def learn(
    context: Context,
    settings: PreferenceSettings,
    model: Module,
    lesson: PreferenceRound,
    *,
    pad: int,
    before: Callable[[Look], None],
) -> tuple[Learner[AnswerBatch], int]:
    """Train from where the run was to the end of the lesson; gives the step it ended at. `before` happens first."""
    asked = lesson.reference if isinstance(settings.method, TDPO) else None
    objective = preference_objective(model, settings.method, reference=asked)
    total = num_steps(len(lesson.data.items), epochs=settings.epochs, batch=settings.batch)
    learner = Learner(model, objective, settings.optimiser, total_steps=total)
    train_part, held_part = _parts(context, settings, learner, lesson, pad)
    lay_out = _lay_out(settings, learner, model, pad)
    looked_at = _MadeAnew(make=lambda: lay_out(held_part))
    last = training.fit(
        context,
        learner,
        settings,
        steps_from=lambda start: _steps(train_part, settings, lesson.seed, lay_out, start=start),
        held=cast("Sequence[AnswerBatch]", looked_at),
        tokens_of=lambda batch: int((batch.segment_BT > 0).sum()),
        first_step=lesson.first_step,
        before=partial(before, lambda: _named(learner.measure(looked_at))),
    )
    return learner, last


def _named(seen: Metrics) -> Metrics:
    return {f"heldout/{name}": value for name, value in seen.items()}


def _parts(
    context: Context, settings: PreferenceSettings, learner: Learner[AnswerBatch], lesson: PreferenceRound, pad: int
) -> list[_Part]:
    """The answers, with the reference's log-probs where the method reads them."""
    is_kto = isinstance(settings.method, KTO)
    parts = [
        _Part(
            items=[one.answers for one in part.items],
            anchors=mismatched(part, max_length=settings.max_length) if is_kto else [],
        )
        for part in (lesson.data, lesson.held)
    ]
    if not needs_reference(settings.method):
        return parts
    sequences = [one for part in parts for one in sequences_of([*part.items, *part.anchors])]
    logp = iter(
        reference_logprobs(
            lesson.reference,
            sequences,
            file=lesson.file,
            pad=pad,
            has_adapters=lesson.has_adapters,
            autocast=learner.train_step.autocast,
            warn=lambda code, message: context.event("warning", code, message),
        )
    )
    return [
        _Part(
            items=[referred(one, logp) for one in part.items],
            anchors=[referred(one, logp) for one in part.anchors],
        )
        for part in parts
    ]


def _lay_out(settings: PreferenceSettings, learner: Learner[AnswerBatch], model: Module, pad: int) -> _LayOut:
    """From a step's answers to its batches. KTO's reference point is asked of the policy as it is at that moment."""
    width = settings.max_length if settings.packing else None

    def batches(items: Sequence[LabelledAnswers]) -> list[AnswerBatch]:
        return answer_batches(items, rows=settings.micro_batch, pad=pad, width=width)

    def lay_out(part: _Part) -> list[AnswerBatch]:
        if not part.anchors:
            return batches(part.items)
        with learner.train_step.autocast():
            anchor = anchor_point(model, batches(part.anchors))
        return [replace(batch, anchor=anchor) for batch in batches(part.items)]

    return lay_out


def _steps(
    part: _Part, settings: PreferenceSettings, seed: int, lay_out: _LayOut, *, start: int
) -> Iterator[Sequence[AnswerBatch]]:
    order = step_rows(len(part.items), epochs=settings.epochs, batch=settings.batch, seed=seed, start=start)
    return (lay_out(part.take(rows)) for rows in order)
