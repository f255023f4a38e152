"""Best-of-N: a policy, a reward and prompts in; a model and the answers it was taught out.

The round's line in `metrics.jsonl` is about the policy as it is at that step, and what the best of its N answers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Message
from kedge.data.writing import row_writer
from kedge.models.loading.start import save_causal, start_causal
from kedge.stages.best_of_n.bond import train_distil
from kedge.stages.best_of_n.rejection import train_rejection
from kedge.stages.best_of_n.settings import BestOfNSettings, Distil, Rejection
from kedge.stages.rl.answers import AnswerSampler, ScoredAnswer, chosen
from kedge.stages.rl.rounds import ask, asker_for, look_back, starting_model
from kedge.stages.shared import loop as training
from kedge.stages.shared.context import Context

ROUND = "best_of/round"


def train(context: Context, settings: BestOfNSettings) -> Mapping[str, Path]:
    """Train, and save the policy and what it was taught; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    device = training.pick_device(context.device)
    model = start_causal(context.input("from"), lora=settings.lora, device=device, seed=context.seed)
    own = settings.method.answers if isinstance(settings.method, Distil) else 0
    start = starting_model(context, model, device=device, is_asked_often=own > 0)
    asker = asker_for(context, settings, model, start, device=device, answers=max(own, 1))
    if not settings.measures_kl:
        context.event("info", "best_of_n.kl", "KL is not measured: top_p or top_k cut the distribution")
    match settings.method:
        case Rejection():
            taught, step = train_rejection(asker, model, settings.method, partial(ask, asker, model, name=ROUND))
        case Distil():
            anchors = ask(asker, model, 0, name=ROUND)
            taught, step = chosen(anchors.groups, settings.n), train_distil(asker, model, settings.method, anchors)
    look_back(asker, model, step, name=ROUND)
    return {
        "model": save_causal(model, asker.tokenizer, context.folder / "model"),
        "demonstrations": _write_taught(asker, taught, context.folder / "chosen.jsonl"),
    }


def _write_taught(asker: AnswerSampler, taught: Sequence[ScoredAnswer], file: Path) -> Path:
    """The answers as demonstrations, with their scores beside them."""
    with row_writer(file) as write:
        for one in taught:
            asked = asker.book.prompts[one.prompt]
            messages = (*asked.prompt, Message("assistant", one.text))
            about = {"score": one.score, "gold": one.gold, "finished": one.is_finished}
            write(to_fields(Demonstration(messages=messages, origin=asked.origin, extra=about)))
    return file
