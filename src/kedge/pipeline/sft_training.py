"""Supervised fine-tuning: demonstrations in, a model folder out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from kedge.core.batches import Batch
from kedge.core.errors import DataError
from kedge.data.batching import TokenSequence, num_steps, packed, padded, step_rows
from kedge.data.examples import Demonstration
from kedge.data.reading import read
from kedge.data.template import encode_conversation, encode_prompt
from kedge.data.tokenizer import padding_id
from kedge.models.adapters import base_of
from kedge.models.learner import Learner
from kedge.models.objectives import imitation
from kedge.models.start import save_causal, start_causal
from kedge.pipeline import training
from kedge.pipeline.context import Context
from kedge.pipeline.sampling_table import tell_samples
from kedge.pipeline.stages.sft import SFTSettings
from kedge.pipeline.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What is trained on, tokenised, with the prompts that samples are taken from."""

    sequences: Sequence[TokenSequence]
    prompts: Sequence[Sequence[int]]
    num_too_long: int


def train_sft(context: Context, settings: SFTSettings) -> Path:
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
        held=padded(held.sequences, rows=settings.micro_batch, pad=pad) if held else (),
        tokens_of=lambda batch: int((batch.segment_BT > 0).sum()),
        before=lambda: sample(0),
    )
    sample(total)
    return save_causal(model, tokenizer, context.folder / "model")


def encode_demonstrations(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, samples: int = 0
) -> Conversations:
    """The conversations of a file that are not too long, and the prompts of the first few."""
    sequences: list[TokenSequence] = []
    prompts: list[list[int]] = []
    num_too_long = 0
    for example in read(source, kind="demonstrations"):
        messages = cast(Demonstration, example).messages
        encoded = encode_conversation(tokenizer, messages)
        if len(encoded.tokens) > max_length:
            num_too_long += 1
            continue
        sequences.append(TokenSequence(tokens=encoded.tokens, counted=encoded.assistant_mask))
        if len(prompts) < samples:
            prompts.append(encode_prompt(tokenizer, messages[:-1]))
    if not any(any(one.counted) for one in sequences):
        raise DataError(
            f"{source}: no conversation of at most {max_length} tokens (max_length) has an assistant's token "
            f"to learn, and {num_too_long} are longer; raise max_length, or look at it with kedge data check"
        )
    return Conversations(sequences=sequences, prompts=prompts, num_too_long=num_too_long)


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
            yield packed(chosen, rows=settings.micro_batch, width=settings.max_length, pad=pad)
        else:
            yield padded(chosen, rows=settings.micro_batch, pad=pad)
