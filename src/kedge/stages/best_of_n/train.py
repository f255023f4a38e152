"""Best-of-N: a policy, a reward and prompts in; a model and the answers it was taught out.

The round's line in `metrics.jsonl` is about the policy as it is at that step, and what the best of its N answers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Message
from kedge.data.writing import row_writer
from kedge.stages.best_of_n.bond import train_bond
from kedge.stages.best_of_n.rejection import train_rejection
from kedge.stages.best_of_n.settings import BestOfNSettings, Bond, Rejection
from kedge.stages.rl.answers import AnswerSampler, ScoredAnswer
from kedge.stages.rl.rounds import log_trained_policy, open_sampler, starting_model
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.policy import save_policy, start_policy

ROUND = "best_of/round"


def train(context: Context, settings: BestOfNSettings) -> Mapping[str, Path]:
    """Train, and save the policy and what it was taught; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    device = pick_device(context.device)
    model, trained, policy = start_policy(context, settings.lora, settings.memory)
    start = starting_model(context, model, device=device, is_asked_often=isinstance(settings.method, Bond))
    sampler = open_sampler(context, settings.round_settings(), model, start, device=device, round_metric=ROUND)
    if not sampler.settings.measures_kl:
        context.event("info", "best_of_n.kl", "KL is not measured: top_p or top_k cut the distribution")
    match settings.method:
        case Rejection():
            taught, step = train_rejection(sampler, settings, settings.method, trained, policy)
        case Bond():
            taught, step = train_bond(sampler, settings, settings.method, trained, policy)
    log_trained_policy(sampler, step)
    dtype = settings.memory.save_dtype
    saved = save_policy(context, model, sampler.tokenizer, weights=trained.weights(), dtype=dtype)
    return {
        "model": saved,
        "demonstrations": context.once(lambda: _write_taught(sampler, taught, context.folder / "chosen.jsonl")),
    }


def _write_taught(sampler: AnswerSampler, taught: Sequence[ScoredAnswer], file: Path) -> Path:
    """The answers as demonstrations, with their scores beside them."""
    with row_writer(file) as write:
        for answer in taught:
            prompt = sampler.dataset.prompts[answer.prompt]
            messages = (*prompt.prompt, Message("assistant", answer.text))
            about = {"score": answer.score, "gold": answer.gold, "finished": answer.is_finished}
            write(to_fields(Demonstration(messages=messages, origin=prompt.origin, extra=about)))
    return file
