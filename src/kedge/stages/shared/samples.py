"""Answers to the same few prompts before and after training, for people to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kedge.data.tokenizer import padding_id, special_ids
from kedge.models.forward.greedy import greedy
from kedge.models.forward.sharding import drop_copy, whole_copy
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_samples(
    context: Context,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    step: int,
) -> None:
    """Greedy answers into `samples.jsonl`; those that a killed run has already written are not written twice."""
    written = {record["number"] for record in context.run.read_samples() if record["step"] == step}
    if len(written) == len(prompts):
        return
    stop = special_ids(tokenizer)
    answers = greedy(whole_copy(model), prompts, max_new_tokens=max_new_tokens, stop=stop, pad=padding_id(tokenizer))
    drop_copy(model)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        texts = {"prompt": str(tokenizer.decode(list(prompt))), "answer": str(tokenizer.decode(answer))}
        if number not in written:
            context.run.sample({"number": number, **texts}, step)
