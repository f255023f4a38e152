"""Preference training on labelled answers that are given: a file in, a model folder out.

Left out: pairs that are made on the way, which is `online`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.data.template import encode_prompt
from kedge.data.tokenizer import padding_id
from kedge.models.training.preference_methods import TDPO
from kedge.models.training.preference_objectives import adapters_off, reference_for
from kedge.stages.preference.data import offline_data
from kedge.stages.preference.displacement import warn_of_displacement
from kedge.stages.preference.online import train_online
from kedge.stages.preference.preferences import Preference
from kedge.stages.preference.reference import NAME
from kedge.stages.preference.round import prepare_round
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, passes_for
from kedge.stages.shared.policy import save_policy, start_policy
from kedge.stages.shared.samples import write_samples
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train(context: Context, settings: PreferenceSettings) -> Mapping[str, Path]:
    """Train, with samples before and after, and save the model; a resumed run goes on where it was."""
    if settings.online is not None:
        return {"model": train_online(context, settings, settings.online)}
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    data, held_out = offline_data(context, settings, tokenizer)
    prompts = _prompts(held_out, tokenizer, settings.samples)
    model, trained, policy = start_policy(context, settings.lora, settings.memory, keeps_dropout=False)
    training = prepare_round(
        context,
        settings,
        trained,
        policy,
        train=data,
        held_out=held_out,
        reference=reference_for(model) if isinstance(settings.method, TDPO) else adapters_off(model),
        file=context.folder / NAME,
        pad=padding_id(tokenizer),
        passes=passes_for(context, settings.micro_batch),
        max_steps=settings.max_steps,
    )
    loop = TrainLoop(context, training.learner, checkpoints=settings.checkpoints, evaluation=settings.eval)
    if not loop.is_resumed:
        context.tracker.log(training.held_out_metrics(), step=0)
        write_samples(context, model, tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=0)
    with interruptible(context.stop, context.say):
        for rows in loop.steps(training.order(context.seed)):
            metrics = loop.update(training.batches(rows))
            if metrics is None:
                continue
            if loop.is_evaluation_due:
                metrics |= training.held_out_metrics()
                warn_of_displacement(context, metrics["heldout/chosen_logp"], step=loop.step)
            loop.finish(metrics)
    loop.take_best()
    last = training.learner.total_steps
    write_samples(context, model, tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=last)
    dtype = settings.memory.save_dtype
    return {"model": save_policy(context, model, tokenizer, weights=trained.weights(), dtype=dtype)}


def _prompts(items: Sequence[Preference], tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """The first few different prompts."""
    by_key = {item.prompt_key: item.prompt for item in reversed(items)}
    return [encode_prompt(tokenizer, prompt) for prompt in list(reversed(by_key.values()))[:count]]
