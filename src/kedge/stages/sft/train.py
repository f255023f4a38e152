"""Supervised fine-tuning: demonstrations in, a model folder out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.data.batching import num_steps, step_rows
from kedge.data.tokenizer import padding_id
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.stages.sft.settings import SFTSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.encoding import Conversations, encode_demonstrations, report_long
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, batches_of, held_out_metrics, passes_for
from kedge.stages.shared.policy import save_policy, start_policy
from kedge.stages.shared.samples import write_samples
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train(context: Context, settings: SFTSettings) -> Mapping[str, Path]:
    """Train, with samples before and after, and save the model; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    pad = padding_id(tokenizer)
    data = _read(context, settings, tokenizer, "data")
    held_out = _read(context, settings, tokenizer, "heldout") if context.inputs("heldout") else None
    _report(context, data, held_out, settings)
    prompts = (held_out or data).prompts[: settings.samples]

    model, trained, policy = start_policy(context, settings.lora, settings.memory)
    total = num_steps(len(data.sequences), epochs=settings.epochs, batch=settings.batch, max_steps=settings.max_steps)
    learner = Learner(
        trained,
        policy.backbone,
        imitation(policy),
        settings.optimiser,
        total_steps=total,
        passes=passes_for(context, settings.micro_batch),
    )
    loop = TrainLoop(context, learner, checkpoints=settings.checkpoints, evaluation=settings.eval)
    if not loop.is_resumed:
        write_samples(context, model, tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=0)
    order = step_rows(
        len(data.sequences),
        epochs=settings.epochs,
        batch=settings.batch,
        seed=context.seed,
        start=learner.step,
        max_steps=settings.max_steps,
    )
    with interruptible(context.stop, context.say):
        for rows in loop.steps(order):
            metrics = loop.update(batches_of([data.sequences[row] for row in rows], pad))
            if metrics is None:
                continue
            if held_out and loop.is_evaluation_due:
                metrics |= held_out_metrics(learner, batches_of(held_out.sequences, pad))
            loop.finish(metrics)
    loop.take_best()
    write_samples(context, model, tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=total)
    dtype = settings.memory.save_dtype
    return {"model": save_policy(context, model, tokenizer, weights=trained.weights(), dtype=dtype)}


def _read(context: Context, settings: SFTSettings, tokenizer: PreTrainedTokenizerBase, field: str) -> Conversations:
    source = context.input(field)
    return encode_demonstrations(
        source,
        tokenizer,
        max_length=settings.max_length,
        samples=settings.samples,
        too_long=settings.too_long,
    )


def _report(context: Context, data: Conversations, held_out: Conversations | None, settings: SFTSettings) -> None:
    message = f"{len(data.sequences):,} conversations with {data.num_counted:,} tokens to learn"
    if held_out:
        message += f", {len(held_out.sequences):,} held out"
    context.event("info", "sft.data", message)
    for field, conversations in (("data", data), ("heldout", held_out)):
        if conversations:
            report_long(
                context,
                "sft.too_long",
                f"conversations of `{field}`",
                max_length=settings.max_length,
                dropped=conversations.num_too_long,
                cut=conversations.num_cut,
            )
