"""Batch sizes in plain words: what one optimiser step sees, and how it is cut."""

from __future__ import annotations

from kedge.core.quoting import count as count
from kedge.models.settings import AutoSize


def cut(total: int, size: AutoSize) -> str:
    """How `total` rows are cut into micro-batches of at most `size`.

    >>> cut(64, "auto")
    'in passes of at most N tokens, chosen at the start'
    >>> cut(64, 8)
    'as 8 micro-batches of 8'
    >>> cut(60, 8)
    'as 8 micro-batches (7 of 8 and one of 4)'
    >>> cut(4, 8)
    'as 1 micro-batch of 4'
    """
    if size == "auto":
        return "in passes of at most N tokens, chosen at the start"
    whole, rest = divmod(total, min(size, total))
    if rest == 0:
        return f"as {count(whole, 'micro-batch', 'micro-batches')} of {min(size, total)}"
    return f"as {whole + 1} micro-batches ({whole} of {size} and one of {rest})"


def supervised(
    batch: int, micro_batch: AutoSize, epochs: float, noun: str, *, max_steps: int | None = None
) -> list[str]:
    """The arithmetic of a stage that makes passes over a fixed data set.

    >>> supervised(32, 8, 1, "pair")
    ['each optimiser step: 32 pairs, as 4 micro-batches of 8; 1 pass over the data']
    """
    passes = f"{epochs:g} pass{'' if epochs == 1 else 'es'} over the data"
    most = f", {count(max_steps, 'step')} at most" if max_steps else ""
    return [f"each optimiser step: {count(batch, noun)}, {cut(batch, micro_batch)}; {passes}{most}"]


def on_policy(prompts: int, answers: int, epochs: int, minibatches: int, micro_batch: AutoSize) -> list[str]:
    """The arithmetic of one iteration of PPO.

    >>> print(on_policy(128, 4, 2, 8, 8)[0])
    each iteration: 128 prompts × 4 answers = 512 responses; 2 epochs × 8 minibatches = 16 optimiser steps \
of 64 responses, each as 8 micro-batches of 8
    """
    responses = prompts * answers
    minibatches = min(
        minibatches, responses
    )  # no more can be cut; the stage's check refuses a recipe that asks for more
    steps = epochs * minibatches
    size, rest = divmod(responses, minibatches)
    uneven = f" (the first {rest} of each epoch have one more)" if rest else ""
    return [
        f"each iteration: {count(prompts, 'prompt')} × {count(answers, 'answer')} = {count(responses, 'response')}; "
        f"{count(epochs, 'epoch')} × {count(minibatches, 'minibatch', 'minibatches')} = "
        f"{count(steps, 'optimiser step')} of {count(size, 'response')}{uneven}, each {cut(size, micro_batch)}"
    ]
