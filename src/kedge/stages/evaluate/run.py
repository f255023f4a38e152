"""Models in, an evaluation out: everybody answers the same prompts, the answers are scored, compared and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.core.seeds import seed_for
from kedge.data.examples import Prompt
from kedge.data.mixing import group_values
from kedge.data.template import template_hash
from kedge.evaluate.answers import ModelAnswer, preferences
from kedge.evaluate.evaluation import evaluate
from kedge.evaluate.groups import by_group
from kedge.evaluate.judged import judged_rates
from kedge.models.forward.heads import language_model
from kedge.models.loading.load import load_causal
from kedge.rewards.build import try_sources
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import Reward, refuse_unscored
from kedge.rewards.rollouts import PromptRecord
from kedge.stages.evaluate.files import Results, write_answers, write_numbers, write_pairs
from kedge.stages.evaluate.judging import judge_answers, open_panel, write_judgements
from kedge.stages.evaluate.people import ask_people
from kedge.stages.evaluate.settings import EvaluateSettings
from kedge.stages.rl.candidates import Candidate, candidate_answers, fitting_prompts, read_prompts_once
from kedge.stages.rl.divergence import log_ratios
from kedge.stages.rl.prompts import fields_of
from kedge.stages.rl.reward import open_reward, report_unscored, tokenizer_hash
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(context: Context, settings: EvaluateSettings) -> Mapping[str, Path]:
    """Answer, score, compare, write; returns the files that other stages may read."""
    prompts = fitting_prompts(context, settings, read_prompts_once(context, code="evaluate.broken"))
    _try_sources(context, settings, prompts)
    panel = open_panel(context, settings)
    records = [prompt.extra for prompt in prompts]
    groups = {field: group_values(records, field, setting="groups") for field in settings.groups}
    candidates = [
        candidate_answers(context, settings, prompts, name=name, model=model)
        for name, model in zip(settings.models, context.inputs("models"), strict=True)
    ]
    scores = _scores(context, settings, candidates, prompts)
    kl = _divergences(context, settings, candidates)
    answers = [
        record
        for candidate in candidates
        for record in _records(candidate, scores[candidate.name], kl.get(candidate.name))
    ]
    request = candidates[0].request
    if settings.people:
        # Before they are asked: who waits wants to see what.
        context.once(lambda: write_answers(context.folder / "answers.jsonl", answers, prompts, seed=request.seed))
    by_people = {judge.label: ask_people(context, judge, answers, prompts) for judge in settings.people}
    by_machines = judge_answers(context, panel, answers, prompts, max_failed=settings.failures.max_share)
    judged = {judge.label: {**by_people, **by_machines}[judge.label] for judge in settings.judges}
    tie, seed = settings.tie, seed_for(context.seed, "bootstrap")
    results = Results(
        evaluation=evaluate(answers, tie=tie, seed=seed),
        judges=judged_rates(judged),
        groups=by_group(answers, groups, judged, tie=tie, seed=seed),
        pairs=preferences(answers, "reward", tie=tie),
    )
    for line in results.lines():
        context.say(f"  {line}")
    pairs = results.pairs
    if settings.reward is not None:
        left_out = f"{pairs.ties:,} ties and {pairs.unpaired:,} prompts without two scored answers are left out"
        context.event("info", "evaluate.pairs", f"{len(pairs.pairs):,} pairs for the next round of data; {left_out}")

    def write() -> Mapping[str, Path]:
        write_answers(context.folder / "answers.jsonl", answers, prompts, seed=request.seed)
        if judged:
            write_judgements(context.folder / "judgements.jsonl", judged, settings.answers)
        return {
            "evaluation": write_numbers(context.folder / "evaluation.json", results, request),
            "pairs": write_pairs(context.folder / "pairs.jsonl", pairs, prompts),
        }

    return context.once(write)


def _try_sources(context: Context, settings: EvaluateSettings, prompts: Sequence[Prompt]) -> None:
    """A source that cannot work, such as a function with a parameter that nothing fills, is refused before sampling."""
    known = RewardContext(folder=context.recipe_folder, seed=context.seed, fields=fields_of(prompts))
    for source in (settings.reward, settings.gold):
        if source is not None and not isinstance(source, str):
            try_sources(source, known)


def _scores(
    context: Context, settings: EvaluateSettings, candidates: Sequence[Candidate], prompts: Sequence[Prompt]
) -> dict[str, dict[str, list[float]]]:
    """By model, then by source. A source is opened once for all models that speak alike."""
    cases = [
        PromptRecord(
            prompt=tuple((message.role, message.content) for message in prompt.prompt),
            solution=prompt.answer,
            extra=prompt.extra,
        )
        for prompt in prompts
    ]
    open_source = partial(
        open_reward,
        context,
        cases=cases.__getitem__,
        fields=fields_of(prompts),
        failures=settings.failures,
        device=context.device,
        max_tokens=max(candidate.answered.rollouts.tokens_BT.shape[1] for candidate in candidates),
    )
    scores: dict[str, dict[str, list[float]]] = {candidate.name: {} for candidate in candidates}
    for field, source in (("reward", settings.reward), ("gold", settings.gold)):
        if source is None:
            continue
        by_language: dict[str, Reward] = {}
        for candidate in candidates:
            tokenizer = candidate.answered.tokenizer
            if (language := _language(tokenizer)) not in by_language:
                by_language[language] = open_source(source, field=field, tokenizer=tokenizer)
            scores[candidate.name][field] = by_language[language].score(candidate.answered.rollouts).tolist()
        counters = [counter for reward in by_language.values() for counter in reward.failure_counters]
        report_unscored(context, counters, code="evaluate.unscored")
        refuse_unscored([score for candidate in candidates for score in scores[candidate.name][field]], counters)
    return scores


def _divergences(
    context: Context, settings: EvaluateSettings, candidates: Sequence[Candidate]
) -> dict[str, list[float]]:
    """By model, log p − log p of the baseline for each answer; of models that read the same tokens as the baseline."""
    baseline, *others = candidates
    if settings.top_p < 1 or settings.top_k is not None:
        # Answers from a part of the distribution say nothing about the whole of it.
        context.event("info", "evaluate.kl", "KL is not measured: top_p or top_k cut the distribution")
        return {}
    own = _language(baseline.answered.tokenizer)
    alike = [candidate for candidate in others if _language(candidate.answered.tokenizer) == own]
    for candidate in others:
        if candidate not in alike:
            why = f"its tokenizer or template is not that of {baseline.name}"
            context.event("info", "evaluate.kl", f"KL of {candidate.name} is not measured: {why}")
    if not alike:
        return {}
    model = language_model(
        load_causal(baseline.request.model, dtype=settings.dtype, device=pick_device(context.device))
    )
    with model.active():
        return {
            candidate.name: log_ratios(
                model, candidate.answered.rollouts, temperature=settings.temperature, world=context.world
            ).tolist()
            for candidate in alike
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
            number=row % candidate.request.answers,
            tokens=tokens,
            text=text,
            is_finished=is_finished,
            scores={source: values[row] for source, values in scores.items()},
            kl=kl[row] if kl is not None else None,
        )
