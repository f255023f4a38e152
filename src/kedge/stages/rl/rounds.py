"""Rounds in which the policy as it is answers prompts: drawn and scored once, logged, and kept with its weights.

What is learnt from the answers is up to the method.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kedge.core.files import write_json
from kedge.core.seeds import seed_for
from kedge.data.template import stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import has_adapters
from kedge.models.forward.sharding import compute_dtype, gathered_state, shard_model, whole_copy
from kedge.models.loading.load import DTypeName, load_causal
from kedge.models.loading.start import whole_folder
from kedge.models.training.learner import Learner
from kedge.models.training.passes import Passes
from kedge.models.training.preference_objectives import OpenReference, Reference, as_it_is, reference_for
from kedge.models.training.train_step import TrainedWeights
from kedge.rewards.failures import Reward, refuse_unscored
from kedge.rewards.settings import RewardSourceSettings
from kedge.rollout.local import LocalGenerator
from kedge.rollout.rows import rows_at_once
from kedge.rollout.shared import SharedGenerator
from kedge.runs.state import load_state, save_state
from kedge.stages.rl.answers import (
    AnswerSampler,
    Groups,
    frontier,
    read_answers,
    round_metrics,
    sample_record,
    write_answers,
)
from kedge.stages.rl.prompts import PromptDataset, fields_of, prompt_limit, read_prompts, report_long_prompts
from kedge.stages.rl.reward import decoded, open_reward, report_unscored
from kedge.stages.rl.round_settings import RoundSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FRONTIER = "best-of.json"
AFTER = -1
"""The number of the round after the last one, in which the trained policy answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The answers of a round. `number` counts from 0; `seconds` is None where they were read from their file."""

    number: int
    groups: Groups
    seconds: float | None


def open_sampler(
    context: Context,
    settings: RoundSettings,
    model: PreTrainedModel,
    reference: Reference,
    *,
    device: str,
    round_metric: str,
    under: str = "",
) -> AnswerSampler:
    """What draws from `model`. `under` stands before the names of the inputs in the recipe, such as `online.`."""
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    longest, limit_name = prompt_limit(
        context.input("from"), settings.max_prompt_tokens, settings.sampling.max_new_tokens
    )
    dataset = read_prompts(
        context.input(f"{under}prompts"),
        tokenizer,
        batch=settings.batch,
        answers=settings.step_answers,
        max_tokens=longest,
        limit_name=limit_name,
        seed=context.seed,
        set_aside=context.set_aside("prompts.broken.jsonl"),
        too_long=settings.too_long,
        report=partial(report_long_prompts, context, settings.too_long),
    )
    policy = whole_copy(model)
    answers = max(settings.answers * len(dataset.prompts), settings.step_answers * settings.batch)
    longest_prompt = max(map(len, dataset.tokens))
    rows = rows_at_once(
        policy,
        settings.rows,
        longest=longest_prompt + settings.sampling.max_new_tokens,
        total=-(-answers // context.world.size),
    )
    pad = padding_id(tokenizer)
    generator = LocalGenerator(
        policy,
        settings.sampling,
        stop_ids=stop_ids(tokenizer),
        pad=pad,
        max_rows=rows,
        decode=partial(decoded, tokenizer),
    )
    source = partial(_open_source, context, settings, dataset, tokenizer, device)
    return AnswerSampler(
        context=context,
        settings=settings,
        round_metric=round_metric,
        dataset=dataset,
        tokenizer=tokenizer,
        generator=SharedGenerator(generator, context.world, pad=pad, device=model.device),
        refresh=lambda: whole_copy(model),
        rows=rows,
        reward=source(settings.reward, f"{under}reward"),
        gold=source(settings.gold, f"{under}gold") if settings.gold else None,
        reference=reference,
    )


def starting_model(context: Context, model: PreTrainedModel, *, device: str, is_asked_often: bool) -> Reference:
    """The model that the stage starts from, before anything is learnt.

    Beside adapters it is their base. Else it stays in memory where it is asked often, and is read again where not, in
    the type that `model` computes in: the two differ by what was learnt alone.
    """
    if is_asked_often or has_adapters(model):
        return reference_for(model)
    dtype: DTypeName = "bfloat16" if compute_dtype(model).itemsize == 2 else "float32"

    @contextmanager
    def read_again() -> Generator[OpenReference]:
        start = load_causal(context.input("from"), dtype=dtype, device=device)
        if context.world.mesh is not None:
            shard_model(start.requires_grad_(False), context.world.mesh)
        with as_it_is(start)() as opened:
            yield opened

    return read_again


def draw_round(sampler: AnswerSampler, number: int) -> Round:
    """The answers of round `number`, new or as they were drawn before the run was resumed.

    From those of the first one it is estimated what the best of N gives.
    """
    folder, settings = sampler.context.folder, sampler.settings
    drawn = _draw(sampler, number, answers=settings.answers, name=f"answers-{number + 1}.jsonl")
    if number == 0:
        sampler.context.once(lambda: write_json(folder / FRONTIER, frontier(drawn.groups, settings.n)))
    return drawn


def log_trained_policy(sampler: AnswerSampler, step: int) -> None:
    """Log one answer of the trained policy to each prompt: what it scores, and how far it is from the start."""
    log_round(sampler, _draw(sampler, AFTER, answers=1, name="answers-after.jsonl"), step)


def log_round(sampler: AnswerSampler, drawn: Round, step: int, metrics: Mapping[str, float] | None = None) -> None:
    """A line of metrics with `metrics` in it and a few samples, as of the step at which the policy answered.

    A round that a run has logged before it was resumed is not logged again.
    """
    run, settings = sampler.context.run, sampler.settings
    number = {sampler.round_metric: drawn.number}
    if any(number.items() <= line.items() for line in run.read_metrics()):
        return
    n = 1 if drawn.number == AFTER else settings.n
    line = round_metrics(drawn.groups, n)
    if drawn.seconds:
        num_tokens = sum(len(answer.tokens) for group in drawn.groups for answer in group)
        seconds = drawn.seconds
        line |= {"time/generate": seconds, "time/step": seconds, "tokens/per_second": num_tokens / seconds}
    _write_samples(sampler, drawn.groups, step)
    report_unscored(sampler.context, sampler.reward.failure_counters)
    sampler.context.tracker.log({**line, **(metrics or {}), **number}, step=step)
    best = f", the best of {n} {line['reward/best']:.3f}" if "reward/best" in line else ""
    kl = f", {line['kl/mean']:.2f} nats from the start" if "kl/mean" in line else ""
    sampler.context.say(f"  step {step}: mean reward {line['reward/mean']:.3f}{best}{kl}")


def save_round(context: Context, learner: Learner[Any], number: int, *, step: int) -> None:
    """Keep the weights of a round that is done, which ended at `step`."""
    finished = context.folder / "finished"
    state = {
        "weights": gathered_state(learner.weights()),
        "last_step": step,
        "passes": learner.train_step.passes.state(),
    }

    def save() -> None:
        with whole_folder(finished / f"round-{number}") as beside:
            save_state(beside, state)
        shutil.rmtree(finished / f"round-{number - 1}", ignore_errors=True)

    context.once(save)


def resume_rounds(context: Context, trained: TrainedWeights, passes: Passes) -> tuple[int, int]:
    """How many rounds are done, and at which step; the model gets the weights of the last one, `passes` their size."""
    finished = context.folder / "finished"
    numbers = context.once(lambda: [int(path.name.removeprefix("round-")) for path in finished.glob("round-*")])
    if not numbers:
        return 0, 0
    state = load_state(finished / f"round-{max(numbers)}")
    trained.load(state["weights"])
    passes.load(state["passes"])
    return max(numbers) + 1, int(state["last_step"])


def _draw(sampler: AnswerSampler, number: int, *, answers: int, name: str) -> Round:
    file = sampler.context.folder / name
    before = sampler.context.once(lambda: read_answers(file) if file.exists() else None)
    if before is not None:
        return Round(number=number, groups=before, seconds=None)
    since = time.perf_counter()
    seed = seed_for(sampler.context.seed, "answers", number)
    groups = sampler.draw(answers, seed=seed, is_start=number == 0)
    _refuse_unscored_round(sampler, groups)  # before the answers are kept: a resumed run draws and scores them again
    sampler.context.once(lambda: write_answers(file, groups))
    return Round(number=number, groups=groups, seconds=time.perf_counter() - since)


def _refuse_unscored_round(sampler: AnswerSampler, groups: Groups) -> None:
    """A round without a single score, of the reward or of the gold source, ends the run."""
    answers = [answer for group in groups for answer in group]
    refuse_unscored([answer.score for answer in answers], sampler.reward.failure_counters)
    if sampler.gold:
        gold = [math.nan if answer.gold is None else answer.gold for answer in answers]
        refuse_unscored(gold, sampler.gold.failure_counters)


def _write_samples(sampler: AnswerSampler, groups: Groups, step: int) -> None:
    """The first answers to the first few prompts; those that a killed run has already written are not written twice."""
    run, dataset = sampler.context.run, sampler.dataset
    written = {record["number"] for record in run.read_samples() if record["step"] == step}
    first = sorted((group[0] for group in groups), key=lambda answer: answer.prompt)[: sampler.settings.samples]
    for answer in first:
        if answer.prompt not in written:
            run.sample(sample_record(answer, decoded(sampler.tokenizer, dataset.tokens[answer.prompt])), step)


def _open_source(
    context: Context,
    settings: RoundSettings,
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    device: str,
    source: RewardSourceSettings | str,
    field: str,
) -> Reward:
    return open_reward(
        context,
        source,
        field=field,
        tokenizer=tokenizer,
        cases=dataset.case,
        fields=fields_of(dataset.prompts),
        failures=settings.failures,
        device=device,
        max_tokens=max(map(len, dataset.tokens)) + settings.sampling.max_new_tokens,
    )
