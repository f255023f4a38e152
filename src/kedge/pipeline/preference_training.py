"""Preference training on judged answers that are given: a file in, a model folder out.

Left out: pairs that are made on the way, which is `online_training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kedge.core.errors import DataError
from kedge.core.protocols import Metrics
from kedge.data.template import encode_prompt
from kedge.data.tokenizer import padding_id
from kedge.models.adapters import base_of
from kedge.models.preference_objectives import adapters_off, reference_for
from kedge.models.preference_settings import KTO, TDPO
from kedge.models.start import save_causal, start_causal
from kedge.pipeline import training
from kedge.pipeline.context import Context
from kedge.pipeline.preference_data import Preferences, hold_out, read_preferences
from kedge.pipeline.preference_learning import Lesson, Look, learn
from kedge.pipeline.preference_reference import NAME
from kedge.pipeline.sampling_table import tell_samples
from kedge.pipeline.stages.preference import PreferenceSettings
from kedge.pipeline.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISPLACEMENT: Final = 0.1
"""How far the log-prob of held-out chosen answers may fall, as a share of where it began, before it is a warning."""


def train_preference(context: Context, settings: PreferenceSettings) -> Path:
    """Train, with samples before and after, and save the model; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    data, held = given_data(context, settings, tokenizer)
    device = training.pick_device(context.device)
    model = start_causal(
        context.input("from"), lora=settings.lora, device=device, seed=context.seed, keeps_dropout=False
    )
    lesson = Lesson(
        data=data,
        held=held,
        reference=reference_for(model) if isinstance(settings.method, TDPO) else partial(adapters_off, model),
        file=context.folder / NAME,
        seed=context.seed,
    )
    prompts = _prompts(held, tokenizer, settings.samples)

    def sample(step: int) -> None:
        tell_samples(context, base_of(model), tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=step)

    def before(look: Look) -> None:
        context.tracker.log(look(), step=0)
        sample(0)

    watched = replace(context, tracker=DisplacementWatch(context))
    learner, _ = learn(watched, settings, model, lesson, pad=padding_id(tokenizer), before=before)
    sample(learner.total_steps)
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
        seen = (one.get("heldout/chosen_logp") for one in run.read_metrics() if one["step"] == 0)
        start = next(value for value in seen if value is not None)
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


def given_data(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[Preferences, Preferences]:
    """The preferences of `data` to learn, and those that are held out; what is left out is said."""
    data = _read(context, settings, tokenizer, "data")
    if context.inputs("heldout"):
        held = _read(context, settings, tokenizer, "heldout")
        if shared := {one.key for one in data.items} & {one.key for one in held.items}:
            raise DataError(f"`heldout` shares {len(shared)} prompt(s) with `data`: split them with kedge data split")
    else:
        data, held = hold_out(data, share=settings.heldout_share, seed=context.seed)
    told = f"{len(data.items):,} {_noun(settings)} to learn, {len(held.items):,} held out by prompt"
    context.event("info", "preference.data", told)
    return data, held


def given_heldout(context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase) -> Preferences:
    """The preferences of `heldout`, where nothing else is given."""
    return _read(context, settings, tokenizer, "heldout")


def _read(
    context: Context, settings: PreferenceSettings, tokenizer: PreTrainedTokenizerBase, field: str
) -> Preferences:
    wants_thumbs = isinstance(settings.method, KTO)
    found = read_preferences(context.input(field), tokenizer, max_length=settings.max_length, wants_thumbs=wants_thumbs)
    for number, why in (
        (found.num_too_long, f"are longer than {settings.max_length} tokens"),
        (found.num_identical, "prefer an answer to itself"),
    ):
        if number:
            told = f"{number:,} {_noun(settings)} of `{field}` {why}: left out"
            context.event("warning", "preference.left_out", told)
    return found


def _noun(settings: PreferenceSettings) -> str:
    return "answers" if isinstance(settings.method, KTO) else "pairs"


def _prompts(held: Preferences, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """The first few different prompts."""
    by_key = {one.key: one.prompt for one in reversed(held.items)}
    kept = list(reversed(by_key.values()))[:count]
    return [encode_prompt(tokenizer, prompt) for prompt in kept]
