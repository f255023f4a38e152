"""Rejection sampling: rounds of drawing, choosing and imitating. A finished round is kept with its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil

import torch

from kedge.core.batches import Batch
from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.data.batching import TokenSequence, num_steps, padded_batches, step_rows
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import Module, base_of
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.stages.best_of_n.settings import Rejection
from kedge.stages.rl.answers import AnswerSampler, Groups, ScoredAnswer, chosen
from kedge.stages.rl.rounds import Round, finish, taken_up
from kedge.stages.shared import loop as training

Ask = Callable[[int], Round]
"""The answers of a round, by its number, counted from 0."""


def train_rejection(asker: AnswerSampler, model: Module, method: Rejection, ask: Ask) -> tuple[list[ScoredAnswer], int]:
    """All rounds, from where the run was; gives what the last one imitated, and the last step."""
    done, step = taken_up(asker.context, model, asker.settings.optimiser)
    for number in range(done, method.rounds):
        # Of its own, so that a run that is resumed between two rounds goes on with the same random numbers.
        torch.manual_seed(seed_for(asker.context.seed, "dropout", number))
        drawn = ask(number)
        kept = worth_imitating(asker, drawn.groups, method, number)
        learner, step = _imitate(
            asker, model, method, kept, number=number, first_step=step, before=partial(drawn.tell, step)
        )
        finish(asker.context, learner, number, step=step)
    return worth_imitating(asker, ask(method.rounds - 1).groups, method, None), step


def worth_imitating(asker: AnswerSampler, groups: Groups, method: Rejection, number: int | None) -> list[ScoredAnswer]:
    """The best of N of each prompt, less what the settings leave out; what that is, is said of round `number`."""
    taken = chosen(groups, asker.settings.n)
    whole = [one for one in taken if one.is_finished or not method.finished]
    above = [one for one in whole if method.above is None or one.score > method.above]
    best = sorted(above, key=lambda one: -one.score)[: ceil(method.share * len(above))]
    lost = {
        "have no scored answer": len(groups) - len(taken),
        "have a best answer that was cut off": len(taken) - len(whole),
        f"have none above {method.above}": len(whole) - len(above),
        f"are not in the best {method.share:.0%}": len(above) - len(best),
    }
    left_out = ", ".join(f"{count:,} {why}" for why, count in lost.items() if count)
    if not best:
        raise DataError(
            f"round {(number or 0) + 1}: none of {len(groups):,} prompts has an answer worth imitating: {left_out}; "
            "allow longer answers (sampling.max_new_tokens) or cut ones (method.finished), or lower method.above"
        )
    if number is not None:
        told = f"round {number + 1}: {len(best):,} of {len(groups):,} prompts have an answer to imitate"
        asker.context.event("info", "best_of_n.kept", told + (f"; {left_out}" if left_out else ""))
    return sorted(best, key=lambda one: one.prompt)


def _imitate(
    asker: AnswerSampler,
    model: Module,
    method: Rejection,
    kept: Sequence[ScoredAnswer],
    *,
    number: int,
    first_step: int,
    before: Callable[[], None],
) -> tuple[Learner[Batch], int]:
    settings, pad = asker.settings, padding_id(asker.tokenizer)
    sequences = [_sequence(asker.book.tokens[one.prompt], one.tokens) for one in kept]
    total = num_steps(len(sequences), epochs=method.epochs, batch=settings.batch)
    learner = Learner(model, imitation(base_of(model)), settings.optimiser, total_steps=total)
    seed = seed_for(asker.context.seed, "order", number)

    def steps(start: int) -> Iterator[list[Batch]]:
        order = step_rows(len(sequences), epochs=method.epochs, batch=settings.batch, seed=seed, start=start)
        return (padded_batches([sequences[row] for row in rows], rows=settings.micro_batch, pad=pad) for rows in order)

    last = training.fit(
        asker.context,
        learner,
        settings,
        steps_from=steps,
        held=(),
        tokens_of=lambda batch: int((batch.segment_BT > 0).sum()),
        first_step=first_step,
        before=before,
    )
    return learner, last


def _sequence(prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
    """What was sampled, token for token; the prompt is not learnt."""
    return TokenSequence(tokens=[*prompt, *answer], counted=[False] * len(prompt) + [True] * len(answer))
