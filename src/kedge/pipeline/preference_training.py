"""Preference training: judged answers in, a model folder out. Offline: nothing is sampled to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from kedge.core.answer_batches import AnswerBatch
from kedge.core.errors import DataError
from kedge.core.protocols import Metrics
from kedge.data.answer_batching import Answers, answer_batches
from kedge.data.batching import num_steps, step_rows
from kedge.data.template import encode_prompt
from kedge.data.tokenizer import padding_id
from kedge.models.adapters import Module, base_of
from kedge.models.learner import Learner
from kedge.models.preference_objectives import anchor_point, preference_objective, reference_for
from kedge.models.preference_settings import KTO, TDPO, needs_reference
from kedge.models.start import save_causal, start_causal
from kedge.pipeline import training
from kedge.pipeline.context import Context
from kedge.pipeline.preference_data import Preferences, hold_out, mismatched, read_preferences, referred, sequences_of
from kedge.pipeline.preference_reference import reference_logprobs
from kedge.pipeline.sampling_table import tell_samples
from kedge.pipeline.stages.preference import PreferenceSettings
from kedge.pipeline.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISPLACEMENT: Final = 0.1
"""How far the log-prob of held-out chosen answers may fall, as a share of where it began, before it is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is trained on, or looked at. `anchors` are for KTO alone: one answer to another prompt beside each item."""

    items: Sequence[Answers]
    anchors: Sequence[Answers]

    def take(self, rows: Sequence[int]) -> _Part:
        anchors = [self.anchors[row] for row in rows] if self.anchors else []
        return _Part(items=[self.items[row] for row in rows], anchors=anchors)


_LayOut = Callable[[_Part], list[AnswerBatch]]


def train_preference(context: Context, settings: PreferenceSettings) -> Path:
    """Train, with samples before and after, and save the model; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    data, held = _data(context, settings, tokenizer)
    device = training.pick_device(context.device)
    model = start_causal(context.input("from"), lora=settings.lora, device=device, seed=context.seed)
    reference = reference_for(model) if isinstance(settings.method, TDPO) else None
    objective = preference_objective(model, settings.method, reference=reference)
    total = num_steps(len(data.items), epochs=settings.epochs, batch=settings.batch)
    learner = Learner(model, objective, settings.optimiser, total_steps=total)
    pad = padding_id(tokenizer)
    train_part, held_part = _parts(context, settings, learner, model, (data, held), pad)
    lay_out = _lay_out(settings, learner, model, pad)
    looked_at = _MadeAnew(make=lambda: lay_out(held_part))
    prompts = _prompts(held, tokenizer, settings.samples)

    def sample(step: int) -> None:
        tell_samples(context, base_of(model), tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=step)

    def before() -> None:
        seen = learner.measure(looked_at)
        context.tracker.log({f"heldout/{name}": value for name, value in seen.items()}, step=0)
        sample(0)

    training.fit(
        replace(context, tracker=DisplacementWatch(context)),
        learner,
        settings,
        steps_from=lambda start: _steps(train_part, settings, context.seed, lay_out, start=start),
        held=cast("Sequence[AnswerBatch]", looked_at),
        tokens_of=lambda batch: int((batch.segment_BT > 0).sum()),
        before=before,
    )
    sample(total)
    return save_causal(model, tokenizer, context.folder / "model")


class DisplacementWatch:
    """The tracker of a run, with one warning when the chosen answers themselves become unlikely.

    A preference loss only asks that the rejected answer becomes less likely than the chosen one. Both may fall, and
    what rises then is neither (likelihood displacement; Razin et al. 2024).
    """

    CODE: Final = "preference.displacement"

    def __init__(self, context: Context) -> None:
        self._context = context

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._context.tracker.log(metrics, step=step)
        if "heldout/chosen_logp" in metrics:
            self._judge(metrics["heldout/chosen_logp"], step)

    def event(self, event: Mapping[str, Any]) -> None:
        self._context.tracker.event(event)

    def close(self) -> None:
        self._context.tracker.close()

    def _judge(self, now: float, step: int) -> None:
        run = self._context.run
        start = next(one["heldout/chosen_logp"] for one in run.read_metrics() if one["step"] == 0)
        is_told = any(one["code"] == self.CODE for one in run.read_events())
        if is_told or now >= start - DISPLACEMENT * abs(start):
            return
        message = (
            f"held-out chosen answers have become less likely: from {start:.1f} to {now:.1f} nats an answer. "
            "Probability goes to answers that are in no pair; a higher sft_weight or beta or a lower rate holds it back"
        )
        evidence = {"start": start, "now": now, "allowed_fall": DISPLACEMENT}
        self.event({"level": "warning", "code": self.CODE, "message": message, "step": step, "evidence": evidence})
        self._context.say(f"  {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeAnew:
    """Held-out batches as they are at each look: KTO's carry a number that depends on the weights."""

    make: Callable[[], list[AnswerBatch]]

    def __iter__(self) -> Iterator[AnswerBatch]:
        return iter(self.make())


def _data(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[Preferences, Preferences]:
    def found(source: str) -> Preferences:
        wants_thumbs = isinstance(settings.method, KTO)
        return read_preferences(source, tokenizer, max_length=settings.max_length, wants_thumbs=wants_thumbs)

    data = found(context.input("data"))
    if context.inputs("heldout"):
        held = found(context.input("heldout"))
        if shared := {one.key for one in data.items} & {one.key for one in held.items}:
            raise DataError(f"`heldout` shares {len(shared)} prompt(s) with `data`: split them with kedge data split")
    else:
        data, held = hold_out(data, share=settings.heldout_share, seed=context.seed)
    noun = "answers" if isinstance(settings.method, KTO) else "pairs"
    told = f"{len(data.items):,} {noun} to learn, {len(held.items):,} held out by prompt"
    context.event("info", "preference.data", told)
    for field, part in (("data", data), ("heldout", held)):
        for number, why in (
            (part.num_too_long, f"are longer than {settings.max_length} tokens"),
            (part.num_identical, "prefer an answer to itself"),
        ):
            if number:
                context.event("warning", "preference.left_out", f"{number:,} {noun} of `{field}` {why}: left out")
    return data, held


def _parts(
    context: Context,
    settings: PreferenceSettings,
    learner: Learner[AnswerBatch],
    model: Module,
    found: Sequence[Preferences],
    pad: int,
) -> list[_Part]:
    """The answers, with the reference's log-probs where the method reads them."""
    is_kto = isinstance(settings.method, KTO)
    parts = [
        _Part(
            items=[one.answers for one in part.items],
            anchors=mismatched(part, max_length=settings.max_length) if is_kto else [],
        )
        for part in found
    ]
    if not needs_reference(settings.method):
        return parts
    sequences = [one for part in parts for one in sequences_of([*part.items, *part.anchors])]
    logp = iter(
        reference_logprobs(
            model,
            sequences,
            folder=context.folder,
            pad=pad,
            autocast=learner.stepper.autocast,
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

    def batches(items: Sequence[Answers]) -> list[AnswerBatch]:
        return answer_batches(items, rows=settings.micro_batch, pad=pad, width=width)

    def lay_out(part: _Part) -> list[AnswerBatch]:
        if not part.anchors:
            return batches(part.items)
        with learner.stepper.autocast():
            anchor = anchor_point(model, batches(part.anchors))
        return [replace(batch, anchor=anchor) for batch in batches(part.items)]

    return lay_out


def _steps(
    part: _Part, settings: PreferenceSettings, seed: int, lay_out: _LayOut, *, start: int
) -> Iterator[Sequence[AnswerBatch]]:
    order = step_rows(len(part.items), epochs=settings.epochs, batch=settings.batch, seed=seed, start=start)
    return (lay_out(part.take(rows)) for rows in order)


def _prompts(held: Preferences, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """The first few different prompts."""
    by_key = {one.key: one.prompt for one in reversed(held.items)}
    kept = list(reversed(by_key.values()))[:count]
    return [encode_prompt(tokenizer, prompt) for prompt in kept]
