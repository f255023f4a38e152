"""Best-of-N: a policy, a reward and prompts in; a model and the answers it was taught out.

The round's line in `metrics.jsonl` is about the policy as it is at that step, and what the best of its N answers are.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kedge.core.files import write_json
from kedge.core.seeds import seed_for
from kedge.data.convert import to_fields
from kedge.data.examples import Demonstration, Message
from kedge.data.template import stop_ids
from kedge.data.tokenizer import padding_id
from kedge.data.writing import row_writer
from kedge.models.adapters import Module, base_of
from kedge.models.load import load_causal
from kedge.models.preference_objectives import Reference, reference_for
from kedge.models.start import save_causal, start_causal
from kedge.pipeline import training
from kedge.pipeline.best_of_answers import Asker, Drawn, Groups, Round, chosen, facts_of, frontier, kept, sample_of
from kedge.pipeline.context import Context
from kedge.pipeline.distil_training import train_distil
from kedge.pipeline.prompt_book import PromptBook, read_prompts
from kedge.pipeline.rejection_training import train_rejection
from kedge.pipeline.reward_wiring import decoded, open_reward
from kedge.pipeline.stages.best_of_n import BestOfNSettings, Distil, Rejection
from kedge.pipeline.tokenizers import tokenizer_for
from kedge.rewards.build import Reward
from kedge.rewards.settings import RewardSettings
from kedge.rollout.local import LocalGenerator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FRONTIER = "best-of.json"
_ROUND, _AFTER = "best_of/round", -1


def train_best_of_n(context: Context, settings: BestOfNSettings) -> Mapping[str, Path]:
    """Train, and save the policy and what it was taught; a resumed run goes on where it was."""
    torch.manual_seed(context.seed)
    device = training.pick_device(context.device)
    model = start_causal(context.input("from"), lora=settings.lora, device=device, seed=context.seed)
    asker = _asker(context, settings, model, device)
    if not settings.measures_kl:
        context.event("info", "best_of_n.kl", "KL is not measured: top_p or top_k cut the distribution")
    match settings.method:
        case Rejection():
            taught, step = train_rejection(asker, model, settings.method, partial(_ask, asker, model))
        case Distil():
            anchors = _ask(asker, model, 0)
            taught, step = chosen(anchors.groups, settings.n), train_distil(asker, model, settings.method, anchors)
    _look_back(asker, model, step)
    return {
        "model": save_causal(model, asker.tokenizer, context.folder / "model"),
        "demonstrations": _write_taught(asker, taught, context.folder / "chosen.jsonl"),
    }


def _asker(context: Context, settings: BestOfNSettings, model: Module, device: str) -> Asker:
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    book = read_prompts(
        context.input("prompts"),
        tokenizer,
        batch=settings.batch,
        answers=settings.method.answers if isinstance(settings.method, Distil) else 1,
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
    return Asker(
        context=context,
        settings=settings,
        book=book,
        tokenizer=tokenizer,
        generator=generator,
        reward=source(settings.reward, "reward"),
        gold=source(settings.gold, "gold") if settings.gold else None,
        reference=_reference(context, settings, model, device),
    )


def _source(
    context: Context,
    settings: BestOfNSettings,
    book: PromptBook,
    tokenizer: PreTrainedTokenizerBase,
    device: str,
    wanted: RewardSettings | str,
    field: str,
) -> Reward:
    return open_reward(
        context,
        wanted,
        field=field,
        tokenizer=tokenizer,
        cases=book.case,
        failures=settings.failures,
        device=device,
        max_tokens=max(map(len, book.tokens)) + settings.sampling.max_new_tokens,
    )


def _reference(context: Context, settings: BestOfNSettings, model: Module, device: str) -> Reference:
    """Beside adapters it is the base; distilling asks it at every step; else it is read again when it is asked."""
    if settings.lora is not None or isinstance(settings.method, Distil):
        return reference_for(model)

    @contextmanager
    def read_again() -> Generator[PreTrainedModel]:
        yield load_causal(context.input("from"), dtype="float32", device=device)

    return read_again


def _ask(asker: Asker, model: Module, number: int) -> Round:
    """The answers of round `number`; those of the first also say what the best of N would give."""
    settings, folder = asker.settings, asker.context.folder
    model.eval()
    seed = seed_for(asker.context.seed, "answers", number)
    groups, seconds = kept(
        folder / f"answers-{number + 1}.jsonl",
        partial(asker.draw, settings.drawn, seed=seed, is_start=number == 0),
    )
    if number == 0:
        write_json(folder / FRONTIER, frontier(groups, settings.n))
    return Round(groups=groups, tell=partial(_tell, asker, groups, number, settings.n, seconds))


def _look_back(asker: Asker, model: Module, step: int) -> None:
    """One answer of the policy as it became to each prompt: how far it went, and what that is worth."""
    model.eval()
    seed = seed_for(asker.context.seed, "answers", _AFTER)
    groups, seconds = kept(
        asker.context.folder / "answers-after.jsonl", partial(asker.draw, 1, seed=seed, is_start=False)
    )
    _tell(asker, groups, _AFTER, 1, seconds, step)


def _tell(asker: Asker, groups: Groups, number: int, n: int, seconds: float | None, step: int) -> None:
    """A line of metrics and a few samples; what a run that was killed has told is not told again."""
    run = asker.context.run
    if any(one.get(_ROUND) == number for one in run.read_metrics()):
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
    asker.context.tracker.log({**facts, _ROUND: number}, step=step)
    best = f", the best of {n} {facts['reward/best']:.3f}" if "reward/best" in facts else ""
    kl = f", {facts['kl/mean']:.2f} nats from the start" if "kl/mean" in facts else ""
    asker.context.say(f"  step {step}: mean reward {facts['reward/mean']:.3f}{best}{kl}")


def _tell_unscored(asker: Asker) -> None:
    for tally in asker.reward.tallies:
        report = tally.report(top=3)
        if report.failed:
            reasons = "; ".join(f"{reason} ({number}x)" for reason, number in report.reasons.items())
            what = f"{report.source}: {report.failed:,} of {report.rows:,} answers have no score so far: {reasons}"
            asker.context.event("warning", "reward.unscored", what)


def _write_taught(asker: Asker, taught: Sequence[Drawn], file: Path) -> Path:
    """The answers as demonstrations, with their scores beside them."""
    with row_writer(file) as write:
        for one in taught:
            asked = asker.book.prompts[one.prompt]
            messages = (*asked.prompt, Message("assistant", one.text))
            about = {"score": one.score, "gold": one.gold, "finished": one.is_finished}
            write(to_fields(Demonstration(messages=messages, origin=asked.origin, extra=about)))
    return file
