"""Rounds in which the policy as it is answers prompts: who draws and scores, what is told, where a round is kept.

What is done with the answers is the method's. A round that is done is kept with its weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kedge.core.files import write_json
from kedge.core.optimiser import OptimiserSettings
from kedge.core.seeds import seed_for
from kedge.data.template import stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.forward.lora import Module, base_of
from kedge.models.loading.load import load_causal
from kedge.models.loading.start import whole_folder
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.preference_objectives import Reference, reference_for
from kedge.rewards.failures import Reward
from kedge.rewards.settings import RewardSourceSettings
from kedge.rollout.local import LocalGenerator
from kedge.runs.state import load_state, save_state
from kedge.stages.best_of_n.settings import BestOfNSettings
from kedge.stages.rl.answers import AnswerSampler, Groups, facts_of, frontier, kept, sample_of
from kedge.stages.rl.prompts import PromptDataset, fields_of, read_prompts
from kedge.stages.rl.reward import decoded, open_reward
from kedge.stages.shared.context import Context
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FRONTIER = "best-of.json"
AFTER = -1
"""The number of the round after the last, which looks at what the policy became."""

Facts = Callable[[], Mapping[str, float]]
"""More to tell of a round, looked for only where it was not told before."""


class Tell(Protocol):
    """Writes a round down, once, as of the step of the run at which the policy answered."""

    def __call__(self, step: int, more: Facts = ...) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What was drawn."""

    groups: Groups
    tell: Tell


def asker_for(
    context: Context,
    settings: BestOfNSettings,
    model: Module,
    reference: Reference,
    *,
    device: str,
    answers: int = 1,
    under: str = "",
) -> AnswerSampler:
    """Who draws from `model`. `under` is what stands before the names of the inputs in a recipe, such as `online.`."""
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    book = read_prompts(
        context.input(f"{under}prompts"),
        tokenizer,
        batch=settings.batch,
        answers=answers,
        max_tokens=settings.max_prompt_tokens,
        seed=context.seed,
        set_aside=context.folder / "prompts.broken.jsonl",
    )
    generator = LocalGenerator(
        base_of(model),
        settings.sampling,
        stop_ids=stop_ids(tokenizer),
        pad=padding_id(tokenizer),
        max_rows=settings.rows,
        decode=partial(decoded, tokenizer),
    )
    source = partial(_source, context, settings, book, tokenizer, device)
    return AnswerSampler(
        context=context,
        settings=settings,
        book=book,
        tokenizer=tokenizer,
        generator=generator,
        reward=source(settings.reward, f"{under}reward"),
        gold=source(settings.gold, f"{under}gold") if settings.gold else None,
        reference=reference,
    )


def starting_model(context: Context, model: Module, *, device: str, is_asked_often: bool) -> Reference:
    """What the stage starts from, before anything is learnt: beside adapters the base; else it stays in memory where it
    is asked often, and is read again where it is not."""
    if is_asked_often or model is not base_of(model):
        return reference_for(model)

    @contextmanager
    def read_again() -> Generator[PreTrainedModel]:
        yield load_causal(context.input("from"), dtype="float32", device=device)

    return read_again


def ask(asker: AnswerSampler, model: Module, number: int, *, name: str) -> Round:
    """The answers of round `number`; those of the first also say what the best of N would give."""
    settings, folder = asker.settings, asker.context.folder
    model.eval()
    seed = seed_for(asker.context.seed, "answers", number)
    draw = partial(asker.draw, settings.drawn, seed=seed, is_start=number == 0)
    groups, seconds = kept(folder / f"answers-{number + 1}.jsonl", draw)
    if number == 0:
        write_json(folder / FRONTIER, frontier(groups, settings.n))
    return Round(groups=groups, tell=partial(tell, asker, groups, settings.n, {name: number}, seconds))


def look_back(asker: AnswerSampler, model: Module, step: int, *, name: str) -> None:
    """One answer of the policy as it became to each prompt: how far it went, and what that is worth."""
    model.eval()
    seed = seed_for(asker.context.seed, "answers", AFTER)
    file = asker.context.folder / "answers-after.jsonl"
    groups, seconds = kept(file, partial(asker.draw, 1, seed=seed, is_start=False))
    tell(asker, groups, 1, {name: AFTER}, seconds, step)


def tell(
    asker: AnswerSampler,
    groups: Groups,
    n: int,
    about: Mapping[str, int],
    seconds: float | None,
    step: int,
    more: Facts = dict[str, float],
) -> None:
    """A line of metrics and a few samples; what a run that was killed has told is not told again.

    `about` is the name of the round's number in the metrics, and the number.
    """
    run = asker.context.run
    if any(about.items() <= one.items() for one in run.read_metrics()):
        return
    facts = facts_of(groups, n)
    if seconds:
        tokens = sum(len(one.tokens) for group in groups for one in group)
        facts |= {"time/generate": seconds, "time/step": seconds, "tokens/per_second": tokens / seconds}
    first = sorted((group[0] for group in groups), key=lambda one: one.prompt)[: asker.settings.samples]
    told = {one["number"] for one in run.read_samples() if one["step"] == step}
    for one in first:
        if one.prompt not in told:
            run.sample(sample_of(one, decoded(asker.tokenizer, asker.book.tokens[one.prompt])), step)
    _tell_unscored(asker)
    asker.context.tracker.log({**facts, **more(), **about}, step=step)
    best = f", the best of {n} {facts['reward/best']:.3f}" if "reward/best" in facts else ""
    kl = f", {facts['kl/mean']:.2f} nats from the start" if "kl/mean" in facts else ""
    asker.context.say(f"  step {step}: mean reward {facts['reward/mean']:.3f}{best}{kl}")


def finish(context: Context, learner: Learner[Any], number: int, *, step: int) -> None:
    """Keep the weights of a round that is done, which ended at `step`."""
    finished = context.folder / "finished"
    with whole_folder(finished / f"round-{number}") as beside:
        save_state(beside, {"weights": learner.state()["weights"], "last_step": step})
    shutil.rmtree(finished / f"round-{number - 1}", ignore_errors=True)


def taken_up(context: Context, model: Module, optimiser: OptimiserSettings) -> tuple[int, int]:
    """How many rounds are done, and at which step; the model gets the weights of the last one."""
    finished = context.folder / "finished"
    numbers = [int(path.name.removeprefix("round-")) for path in finished.glob("round-*")]
    if not numbers:
        return 0, 0
    state = load_state(finished / f"round-{max(numbers)}")
    Learner(model, imitation(base_of(model)), optimiser, total_steps=1).load_weights(state["weights"])
    return max(numbers) + 1, int(state["last_step"])


def _source(
    context: Context,
    settings: BestOfNSettings,
    book: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    device: str,
    wanted: RewardSourceSettings | str,
    field: str,
) -> Reward:
    return open_reward(
        context,
        wanted,
        field=field,
        tokenizer=tokenizer,
        cases=book.case,
        fields=fields_of(book.prompts),
        failures=settings.failures,
        device=device,
        max_tokens=max(map(len, book.tokens)) + settings.sampling.max_new_tokens,
    )


def _tell_unscored(asker: AnswerSampler) -> None:
    for counter in asker.reward.failure_counters:
        report = counter.report(top=3)
        if report.failed:
            reasons = "; ".join(f"{reason} ({number}x)" for reason, number in report.reasons.items())
            what = f"{report.source}: {report.failed:,} of {report.rows:,} answers have no score so far: {reasons}"
            asker.context.event("warning", "reward.unscored", what)
