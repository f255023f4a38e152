"""Models in, an evaluation out: everybody answers the same prompts, the answers are scored, compared and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kedge.core.seeds import seed_for
from kedge.data.examples import Prompt
from kedge.data.reading import read
from kedge.data.template import template_hash
from kedge.evaluate.answers import ModelAnswer, preferences
from kedge.evaluate.evaluation import evaluate, table_lines
from kedge.models.loading.load import load_causal
from kedge.rewards.failures import Reward
from kedge.rewards.rollouts import PromptRecord
from kedge.rollout.settings import SamplingSettings
from kedge.stages.evaluate.files import write_answers, write_numbers, write_pairs
from kedge.stages.evaluate.settings import EvaluateSettings
from kedge.stages.rl.answering import Answered, Answering, answer
from kedge.stages.rl.divergence import log_ratios
from kedge.stages.rl.prompts import fields_of
from kedge.stages.rl.reward import open_reward, tokenizer_hash
from kedge.stages.shared.context import Context
from kedge.stages.shared.loop import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUIET_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One model of the evaluation, and what it said."""

    name: str
    asked: Answering
    answered: Answered


def run(context: Context, settings: EvaluateSettings) -> Mapping[str, Path]:
    """Answer, score, compare, write; returns the files that other stages may read."""
    prompts = _prompts(context)
    candidates = [
        _ask(context, settings, prompts, name=name, model=model)
        for name, model in zip(settings.models, context.inputs("models"), strict=True)
    ]
    scores = _scores(context, settings, candidates, prompts)
    kl = _divergences(context, settings, candidates)
    answers = [one for each in candidates for one in _records(each, scores[each.name], kl.get(each.name))]
    evaluation = evaluate(answers, tie=settings.tie, seed=seed_for(context.seed, "bootstrap"))
    pairs = preferences(answers, "reward", tie=settings.tie)
    for line in table_lines(evaluation):
        context.say(f"  {line}")
    if settings.reward is not None:
        left_out = f"{pairs.ties:,} ties and {pairs.unpaired:,} prompts without two scored answers are left out"
        context.event("info", "evaluate.pairs", f"{len(pairs.pairs):,} pairs for the next round of data; {left_out}")
    write_answers(context.folder / "answers.jsonl", answers, prompts, seed=candidates[0].asked.seed)
    return {
        "evaluation": write_numbers(context.folder / "evaluation.json", evaluation, pairs, candidates[0].asked),
        "pairs": write_pairs(context.folder / "pairs.jsonl", pairs, prompts),
    }


def _prompts(context: Context) -> list[Prompt]:
    set_aside = context.folder / "prompts.broken.jsonl"
    reading = read(context.input("prompts"), kind="prompts", set_aside=set_aside)
    found = [cast(Prompt, example) for example in reading]
    if reading.num_broken:
        context.event("warning", "evaluate.broken", f"{reading.num_broken:,} broken lines are set aside in {set_aside}")
    return found


def _ask(
    context: Context, settings: EvaluateSettings, prompts: Sequence[Prompt], *, name: str, model: str
) -> Candidate:
    asked = Answering(
        model=model,
        sampling=SamplingSettings(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=settings.max_new_tokens,
        ),
        answers=settings.answers,
        # One seed for all models: they draw with the same luck, and what differs is the model.
        seed=seed_for(context.seed, "answers"),
        chat_template=context.chat_template,
        device=context.device,
        dtype=settings.dtype,
        rows=settings.rows,
    )
    total = len(prompts) * settings.answers
    told = _now_and_then(context, lambda done: f"  {name}: {done:,} of {total:,} answers")
    answered = answer(asked, [one.prompt for one in prompts], progress=told)
    where = ", read from the cache" if answered.is_cached else ""
    context.say(f"  {name}: {len(answered.rollouts.tokens_BT):,} answers{where}")
    return Candidate(name=name, asked=asked, answered=answered)


def _now_and_then(context: Context, words: Callable[[int], str]) -> Callable[[int], None]:
    """Says how far it is, but not more often than every `_QUIET_S`."""
    since = [time.monotonic()]

    def tell(done: int) -> None:
        if time.monotonic() - since[0] >= _QUIET_S:
            since[0] = time.monotonic()
            context.say(words(done))

    return tell


def _scores(
    context: Context, settings: EvaluateSettings, candidates: Sequence[Candidate], prompts: Sequence[Prompt]
) -> dict[str, dict[str, list[float]]]:
    """By model, then by source. A source is opened once for all models that speak alike."""
    cases = [
        PromptRecord(
            prompt=tuple((message.role, message.content) for message in one.prompt),
            solution=one.answer,
            extra=one.extra,
        )
        for one in prompts
    ]
    open_source = partial(
        open_reward,
        context,
        cases=cases.__getitem__,
        fields=fields_of(prompts),
        failures=settings.failures,
        device=context.device,
        max_tokens=max(each.answered.rollouts.tokens_BT.shape[1] for each in candidates),
    )
    found: dict[str, dict[str, list[float]]] = {each.name: {} for each in candidates}
    for field, source in (("reward", settings.reward), ("gold", settings.gold)):
        if source is None:
            continue
        opened: dict[str, Reward] = {}
        for each in candidates:
            tokenizer = each.answered.tokenizer
            if (key := _language(tokenizer)) not in opened:
                opened[key] = open_source(source, field=field, tokenizer=tokenizer)
            found[each.name][field] = opened[key].score(each.answered.rollouts).tolist()
        _tell_failures(context, opened.values())
    return found


def _tell_failures(context: Context, opened: Iterable[Reward]) -> None:
    for report in (counter.report() for reward in opened for counter in reward.failure_counters):
        if report.failed:
            why = "; ".join(f"{reason} ({count:,}×)" for reason, count in report.reasons.items())
            message = f"{report.source} gave no score to {report.failed:,} of {report.rows:,} answers: {why}"
            context.event("warning", "evaluate.unscored", message)


def _divergences(
    context: Context, settings: EvaluateSettings, candidates: Sequence[Candidate]
) -> dict[str, list[float]]:
    """log p − log p of the baseline for each answer, of the models for which it can be told."""
    baseline, *others = candidates
    if settings.top_p < 1 or settings.top_k is not None:
        # Answers from a part of the distribution say nothing about the whole of it.
        context.event("info", "evaluate.kl", "KL is not measured: top_p or top_k cut the distribution")
        return {}
    own = _language(baseline.answered.tokenizer)
    alike = [each for each in others if _language(each.answered.tokenizer) == own]
    for each in others:
        if each not in alike:
            message = f"KL of {each.name} is not measured: its tokenizer or template is not that of {baseline.name}"
            context.event("info", "evaluate.kl", message)
    if not alike:
        return {}
    model = load_causal(baseline.asked.model, dtype=settings.dtype, device=pick_device(context.device))
    return {
        each.name: log_ratios(model, each.answered.rollouts, temperature=settings.temperature).tolist()
        for each in alike
    }


def _language(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal where the same conversation becomes the same tokens."""
    return f"{tokenizer_hash(tokenizer)} {template_hash(tokenizer)}"


def _records(
    candidate: Candidate, scores: Mapping[str, Sequence[float]], kl: Sequence[float] | None
) -> Iterator[ModelAnswer]:
    answered = candidate.answered
    rows = zip(
        answered.rollouts.group_B.tolist(),
        answered.tokens(),
        answered.texts(),
        answered.rollouts.finished_B.tolist(),
        strict=True,
    )
    for row, (prompt, tokens, text, is_finished) in enumerate(rows):
        yield ModelAnswer(
            model=candidate.name,
            prompt=prompt,
            number=row % candidate.asked.answers,
            tokens=tokens,
            text=text,
            is_finished=is_finished,
            scores={source: own[row] for source, own in scores.items()},
            kl=kl[row] if kl is not None else None,
        )
