"""Supervised fine-tuning: demonstrations in, a model folder out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.core.batches import Batch
from kedge.data.batching import TokenSequence, num_steps, packed_batches, padded_batches, step_rows
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import base_of
from kedge.models.loading.start import save_causal, start_causal
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.stages.sft.settings import SFTSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.encoding import Conversations, encode_demonstrations
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, held_out_metrics
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
    held_out_batches = padded_batches(held_out.sequences, rows=settings.micro_batch, pad=pad) if held_out else []
    prompts = (held_out or data).prompts[: settings.samples]

    device = pick_device(context.device)
    model = start_causal(context.input("from"), lora=settings.lora, device=device, seed=context.seed)
    total = num_steps(len(data.sequences), epochs=settings.epochs, batch=settings.batch)
    learner = Learner(model, imitation(base_of(model)), settings.optimiser, total_steps=total)
    loop = TrainLoop(context, learner, checkpoints=settings.checkpoints, evaluation=settings.eval)
    if not loop.is_resumed:
        write_samples(context, base_of(model), tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=0)
    order = step_rows(
        len(data.sequences), epochs=settings.epochs, batch=settings.batch, seed=context.seed, start=learner.step
    )
    with interruptible(context.stop, context.say):
        for rows in loop.steps(order):
            metrics = loop.update(_batches([data.sequences[row] for row in rows], settings, pad))
            if metrics is None:
                continue
            if held_out_batches and loop.is_evaluation_due:
                metrics |= held_out_metrics(learner, held_out_batches)
            loop.finish(metrics)
    loop.take_best()
    write_samples(context, base_of(model), tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=total)
    return {"model": save_causal(model, tokenizer, context.folder / "model")}


def _read(context: Context, settings: SFTSettings, tokenizer: PreTrainedTokenizerBase, field: str) -> Conversations:
    source = context.input(field)
    return encode_demonstrations(source, tokenizer, max_length=settings.max_length, samples=settings.samples)


def _report(context: Context, data: Conversations, held_out: Conversations | None, settings: SFTSettings) -> None:
    message = f"{len(data.sequences):,} conversations with {data.num_counted:,} tokens to learn"
    if held_out:
        message += f", {len(held_out.sequences):,} held out"
    context.event("info", "sft.data", message)
    for field, conversations in (("data", data), ("heldout", held_out)):
        if conversations and conversations.num_too_long:
            what = f"{conversations.num_too_long:,} conversations of `{field}`"
            context.event("warning", "sft.too_long", f"{what} are longer than {settings.max_length} tokens: left out")


def _batches(sequences: Sequence[TokenSequence], settings: SFTSettings, pad: int) -> list[Batch]:
    """The micro-batches of one optimiser step."""
    if settings.packing:
        return packed_batches(sequences, rows=settings.micro_batch, width=settings.max_length, pad=pad)
    return padded_batches(sequences, rows=settings.micro_batch, pad=pad)
