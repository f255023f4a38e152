"""Rejection sampling: rounds of drawing, choosing and imitating. A finished round is kept with its weights."""

from __future__ import annotations

from math import ceil

import torch

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.data.batching import num_steps, step_rows
from kedge.data.tokenizer import padding_id
from kedge.models.forward.heads import LanguageModel
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.train_step import TrainedWeights
from kedge.stages.best_of_n.settings import BestOfNSettings, Rejection
from kedge.stages.rl.answers import AnswerSampler, Groups, ScoredAnswer, chosen, learnt_sequence
from kedge.stages.rl.rounds import draw_round, log_round, resume_rounds, save_round
from kedge.stages.shared.context import Context
from kedge.stages.shared.interrupt import interruptible
from kedge.stages.shared.loop import TrainLoop, batches_of, passes_for, steps_left, stop_if_asked


def train_rejection(
    sampler: AnswerSampler,
    settings: BestOfNSettings,
    method: Rejection,
    trained: TrainedWeights,
    policy: LanguageModel,
) -> tuple[list[ScoredAnswer], int]:
    """All rounds, from where the run was; gives what the last one imitated, and the last step."""
    context, pad = sampler.context, padding_id(sampler.tokenizer)
    passes = passes_for(context, settings.micro_batch)
    done, step = resume_rounds(context, trained, passes)
    with interruptible(context.stop, context.say):
        for number in range(done, method.rounds):
            stop_if_asked(context, step)
            if (left := steps_left(settings.max_steps, step)) == 0:
                break
            # Of its own, so that a run that is resumed between two rounds goes on with the same random numbers.
            torch.manual_seed(seed_for(context.seed, "dropout", number))
            drawn = draw_round(sampler, number)
            answers, left_out = worth_imitating(drawn.groups, settings.n, method)
            _report(context, number, len(answers), len(drawn.groups), left_out)
            sequences = [learnt_sequence(sampler.dataset.tokens[answer.prompt], answer) for answer in answers]
            total = num_steps(len(sequences), epochs=method.epochs, batch=settings.batch, max_steps=left)
            learner = Learner(
                trained, policy.backbone, imitation(policy), settings.optimiser, total_steps=total, passes=passes
            )
            loop = TrainLoop(context, learner, checkpoints=settings.checkpoints, first_step=step)
            if not loop.is_resumed:
                log_round(sampler, drawn, step)
            order = step_rows(
                len(sequences),
                epochs=method.epochs,
                batch=settings.batch,
                seed=seed_for(context.seed, "order", number),
                start=learner.step,
                max_steps=left,
            )
            for rows in loop.steps(order):
                metrics = loop.update(batches_of([sequences[row] for row in rows], pad))
                if metrics is not None:
                    loop.finish(metrics)
            step = loop.step
            save_round(context, learner, number, step=step)
            done = number + 1
    last = draw_round(sampler, max(done, 1) - 1)
    answers, _ = worth_imitating(last.groups, settings.n, method)
    return answers, step


def worth_imitating(groups: Groups, n: int, method: Rejection) -> tuple[list[ScoredAnswer], str]:
    """The best of n of each prompt, less what the settings leave out; and in words why prompts are left out."""
    taken = chosen(groups, n)
    whole = [answer for answer in taken if answer.is_finished or not method.finished]
    above = [answer for answer in whole if method.above is None or answer.score > method.above]
    best = sorted(above, key=lambda answer: -answer.score)[: ceil(method.share * len(above))]
    counts = {
        "have no scored answer": len(groups) - len(taken),
        "have a best answer that was cut off": len(taken) - len(whole),
        f"have none above {method.above}": len(whole) - len(above),
        f"are not in the best {method.share:.0%}": len(above) - len(best),
    }
    left_out = ", ".join(f"{count:,} {why}" for why, count in counts.items() if count)
    return sorted(best, key=lambda answer: answer.prompt), left_out


def _report(context: Context, number: int, num_answers: int, num_prompts: int, left_out: str) -> None:
    """Say how many prompts of a round have an answer to imitate; none is an error."""
    if not num_answers:
        raise DataError(
            f"round {number + 1}: none of {num_prompts:,} prompts has an answer worth imitating: {left_out}; "
            "allow longer answers (sampling.max_new_tokens) or cut ones (method.finished), or lower method.above"
        )
    message = f"round {number + 1}: {num_answers:,} of {num_prompts:,} prompts have an answer to imitate"
    context.event("info", "best_of_n.kept", message + (f"; {left_out}" if left_out else ""))
