"""Supervised fine-tuning: demonstrations in, a model folder out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from kedge.stages.shared import loop as training
from kedge.stages.shared.context import Context
from kedge.stages.shared.encoding import Conversations, encode_demonstrations
from kedge.stages.shared.samples import tell_samples
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    pass


def train(context: Context, settings: SFTSettings) -> Mapping[str, Path]:
    """Train, with samples before and after, and save the model; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    encode = partial(
        encode_demonstrations, tokenizer=tokenizer, max_length=settings.max_length, samples=settings.samples
    )
    data = encode(context.input("data"))
    held = encode(context.inputs("heldout")[0]) if context.inputs("heldout") else None
    _report(context, data, held, settings)
    model = start_causal(
        context.input("from"), lora=settings.lora, device=training.pick_device(context.device), seed=context.seed
    )
    total = num_steps(len(data.sequences), epochs=settings.epochs, batch=settings.batch)
    learner = Learner(model, imitation(base_of(model)), settings.optimiser, total_steps=total)
    pad = padding_id(tokenizer)

    prompts = (held or data).prompts[: settings.samples]

    def sample(step: int) -> None:
        tell_samples(context, base_of(model), tokenizer, prompts, max_new_tokens=settings.sample_tokens, step=step)

    training.fit(
        context,
        learner,
        settings,
        steps_from=lambda start: _steps(data.sequences, settings, context.seed, pad, start=start),
        held=padded_batches(held.sequences, rows=settings.micro_batch, pad=pad) if held else (),
        tokens_of=lambda batch: int((batch.segment_BT > 0).sum()),
        before=lambda: sample(0),
    )
    sample(total)
    return {"model": save_causal(model, tokenizer, context.folder / "model")}


def _report(context: Context, data: Conversations, held: Conversations | None, settings: SFTSettings) -> None:
    trained = sum(sum(one.counted) for one in data.sequences)
    message = f"{len(data.sequences):,} conversations with {trained:,} tokens to learn"
    if held:
        message += f", {len(held.sequences):,} held out"
    context.event("info", "sft.data", message)
    for part, found in (("data", data), ("heldout", held)):
        if found and found.num_too_long:
            what = f"{found.num_too_long:,} conversations of `{part}`"
            context.event("warning", "sft.too_long", f"{what} are longer than {settings.max_length} tokens: left out")


def _steps(
    sequences: Sequence[TokenSequence], settings: SFTSettings, seed: int, pad: int, *, start: int
) -> Iterator[Sequence[Batch]]:
    order = step_rows(len(sequences), epochs=settings.epochs, batch=settings.batch, seed=seed, start=start)
    for rows in order:
        chosen = [sequences[row] for row in rows]
        if settings.packing:
            yield packed_batches(chosen, rows=settings.micro_batch, width=settings.max_length, pad=pad)
        else:
            yield padded_batches(chosen, rows=settings.micro_batch, pad=pad)
