"""Preference training on judged answers that are given: a file in, a model folder out.

Left out: pairs that are made on the way, which is `online_training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.data.template import encode_prompt
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import base_of
from kedge.models.loading.start import save_causal, start_causal
from kedge.models.training.preference_methods import TDPO
from kedge.models.training.preference_objectives import adapters_off, reference_for
from kedge.stages.preference.given import DisplacementWatch, given_data
from kedge.stages.preference.learning import Look, PreferenceRound, learn
from kedge.stages.preference.online import train_online
from kedge.stages.preference.preferences import Preferences
from kedge.stages.preference.reference import NAME
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.shared import loop as training
from kedge.stages.shared.context import Context
from kedge.stages.shared.samples import tell_samples
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train(context: Context, settings: PreferenceSettings) -> Mapping[str, Path]:
    """Train, with samples before and after, and save the model; a resumed run goes on where it was."""
    if settings.online is not None:
        return {"model": train_online(context, settings, settings.online)}
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    data, held = given_data(context, settings, tokenizer)
    device = training.pick_device(context.device)
    model = start_causal(
        context.input("from"), lora=settings.lora, device=device, seed=context.seed, keeps_dropout=False
    )
    lesson = PreferenceRound(
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
    return {"model": save_causal(model, tokenizer, context.folder / "model")}


def _prompts(held: Preferences, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """The first few different prompts."""
    by_key = {one.key: one.prompt for one in reversed(held.items)}
    kept = list(reversed(by_key.values()))[:count]
    return [encode_prompt(tokenizer, prompt) for prompt in kept]
