"""Prompts and models in, tasks out: `tasks.jsonl`, in random order, so that whatever is done first is a part of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.data.examples import Message, Origin, Pair, Prompt
from kedge.data.reading import read
from kedge.data.writing import row_writer
from kedge.feedback.choice import AtRandom, Chosen, choose
from kedge.stages.rl.candidates import candidate_answers, fitting_prompts, read_prompts_once
from kedge.stages.rl.judge import Judge, load_judge
from kedge.stages.shared.context import Context
from kedge.stages.tasks.pool import Answer, Opinion, PoolPair, criterion_of, near_prompts, opinion, pairs_of
from kedge.stages.tasks.settings import TasksSettings

FILE = "tasks.jsonl"
CHALLENGE = "challenge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt with the answers that are shown, in this order; why, and with which probability it was chosen."""

    prompt: Prompt
    answers: tuple[Answer, ...]
    reason: str
    propensity: float

    def row(self, number: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": message.role, "content": message.content} for message in self.prompt.prompt],
            "answers": [
                {"text": answer.text, "model": answer.model, "seed": answer.seed, "scores": answer.scores or None}
                for answer in self.answers
            ],
            "reason": self.reason,
            "propensity": self.propensity,
            "heldout": self.reason == "heldout",
            "round": number,
            "origin": str(self.prompt.origin),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How many tasks of each kind there shall be."""

    chosen: int
    heldout: int
    challenge: int


def run(context: Context, settings: TasksSettings) -> Mapping[str, Path]:
    """Answer, choose, write; returns the file of tasks."""
    own = read_prompts_once(context, code="tasks.broken")
    own = fitting_prompts(context, settings, own) if settings.models else own
    if not own:
        raise DataError(f"{context.input('prompts')}: no prompts in it; look at it with kedge data check")
    plan, challenges = _plan(context, settings, len(own))
    prompts = [*own, *challenges]
    answers = _answers(context, settings, prompts)
    if settings.ask == "pair":
        tasks = _pairs(context, settings, plan, prompts, answers, len(own))
    else:
        tasks = _whole_prompts(context, settings, plan, prompts, answers, len(own))
    if not tasks:
        raise DataError(
            "no prompt has two unlike answers to compare; raise temperature or answers, or name more models"
        )
    order = np.random.default_rng(seed_for(context.seed, "order")).permutation(len(tasks))
    tasks = [tasks[place] for place in order]
    reasons = Counter(task.reason for task in tasks)
    told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    context.event("info", "tasks.chosen", f"{len(tasks):,} tasks: {told}", **dict(reasons))
    return context.once(lambda: {"tasks": _write(context.folder / FILE, tasks, settings.round or context.round)})


def _plan(context: Context, settings: TasksSettings, prompts: int) -> tuple[_Plan, list[Prompt]]:
    number = settings.number or prompts
    known = challenge_prompts()
    challenge = round(settings.challenge * number)
    if challenge > len(known):
        message = f"challenge asks for {challenge:,} prompts, and there are {len(known)}: all of them are taken"
        context.event("warning", "tasks.challenge", message)
        challenge = len(known)
    heldout = round(settings.heldout * number)
    rng = np.random.default_rng(seed_for(context.seed, "challenge"))
    places = rng.choice(len(known), size=challenge, replace=False) if challenge else ()
    plan = _Plan(chosen=number - heldout - challenge, heldout=heldout, challenge=challenge)
    return plan, [known[int(place)] for place in places]


def challenge_prompts() -> list[Prompt]:
    """Prompts of Kedge's own in which the user insists on something wrong: who agrees to please is found out."""
    lines = files("kedge.stages.tasks").joinpath("challenge.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Prompt(
            prompt=(Message("user", row["prompt"]),),
            origin=Origin("challenge.jsonl", number),
            extra={"truth": row["truth"]},
        )
        for number, row in enumerate((orjson.loads(line) for line in lines), start=1)
    ]


def _answers(context: Context, settings: TasksSettings, prompts: Sequence[Prompt]) -> list[list[Answer]]:
    """By prompt, the answers of all models."""
    answers: list[list[Answer]] = [[] for _ in prompts]
    for name, model in zip(settings.models, context.inputs("models"), strict=True):
        candidate = candidate_answers(context, settings, prompts, name=name, model=model)
        rollouts = candidate.answered.rollouts
        for prompt, text in zip(rollouts.group_B.tolist(), candidate.answered.texts(), strict=True):
            answers[prompt].append(Answer(text=text, model=name, seed=candidate.request.seed))
    return answers


def _pairs(
    context: Context,
    settings: TasksSettings,
    plan: _Plan,
    prompts: Sequence[Prompt],
    answers: list[list[Answer]],
    own: int,
) -> list[Task]:
    """Pairs of our prompts by the criterion and at random; of challenges one each, at random."""
    seed = context.seed
    judge = None if settings.is_random else load_judge(context.input("choose.reward"), device=context.device)
    view = _opinion(context, settings, judge, prompts, answers)
    pool = pairs_of(answers, seed=seed)
    ours, theirs = ([pair for pair in pool if (pair.prompt < own) == is_own] for is_own in (True, False))
    same = len(prompts) - len({pair.prompt for pair in pool})
    if same:
        context.event("info", "tasks.same", f"{same:,} prompts have no two unlike answers: left out")
    criterion = criterion_of(settings.choose.kind, ours, view, judge, _asked(context), seed=seed)
    groups = near_prompts(prompts)
    chosen = choose(
        criterion,
        count=plan.chosen,
        seed=seed_for(seed, "choose"),
        random_share=settings.choose.random,
        heldout=plan.heldout,
        near_duplicates=[groups[pair.prompt] for pair in ours],
    )
    missing = plan.chosen + plan.heldout - len(chosen)
    if missing > 0:
        message = f"{missing:,} tasks fewer than asked for: of a prompt, and of those nearly like it, one pair is asked"
        context.event("warning", "tasks.fewer", message)
    extra = choose(
        AtRandom(pairs=len(theirs)),
        count=plan.challenge,
        seed=seed_for(seed, "choose challenge"),
        near_duplicates=[pair.prompt for pair in theirs],
    )
    rng = np.random.default_rng(seed_for(seed, "sides"))
    return [_pair_task(pick, ours[pick.index], prompts, answers, rng) for pick in chosen] + [
        replace(_pair_task(pick, theirs[pick.index], prompts, answers, rng), reason=CHALLENGE) for pick in extra
    ]


def _pair_task(
    pick: Chosen,
    pair: PoolPair,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Answer]],
    rng: np.random.Generator,
) -> Task:
    sides = [answers[pair.prompt][place] for place in (pair.first, pair.second)]
    return Task(
        prompt=prompts[pair.prompt],
        answers=tuple(sides if rng.random() < 0.5 else sides[::-1]),
        reason=pick.reason,
        propensity=pick.propensity * pair.drawn,
    )


def _opinion(
    context: Context,
    settings: TasksSettings,
    judge: Judge | None,
    prompts: Sequence[Prompt],
    answers: list[list[Answer]],
) -> Opinion | None:
    """What the reward model says of all answers, which are given their scores; None where it is not asked."""
    if judge is None:
        if settings.choose.kind != "random":
            context.event("info", "tasks.random", "there is no reward model yet: everything is chosen at random")
        return None
    view = opinion(judge, prompts, answers, hidden=settings.choose.kind == "d_optimal", world=context.world)
    scores = iter(view.score_MA.mean(axis=0).tolist())
    for own in answers:
        own[:] = [replace(answer, scores={"reward": next(scores)}) for answer in own]
    return view


def _asked(context: Context) -> list[Pair]:
    sources = context.inputs("choose.asked")
    return [cast(Pair, example) for source in sources for example in read(source, kind="pairs")]


def _whole_prompts(
    context: Context,
    settings: TasksSettings,
    plan: _Plan,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Answer]],
    own: int,
) -> list[Task]:
    """Items that are about all answers to a prompt, about each, or about none: prompts at random, near ones once."""
    groups = near_prompts(prompts)
    chosen = choose(
        AtRandom(pairs=own),
        count=plan.chosen,
        seed=seed_for(context.seed, "choose"),
        heldout=plan.heldout,
        near_duplicates=groups[:own],
    )
    rng = np.random.default_rng(seed_for(context.seed, "sides"))
    picks = [(pick.index, pick.reason, pick.propensity) for pick in chosen]
    picks += [(place, CHALLENGE, 1.0) for place in range(own, len(prompts))]
    return [
        Task(prompt=prompts[place], answers=shown, reason=reason, propensity=propensity)
        for place, reason, propensity in picks
        for shown in _shown(settings, answers[place], rng)
    ]


def _shown(settings: TasksSettings, answers: Sequence[Answer], rng: np.random.Generator) -> list[tuple[Answer, ...]]:
    different = list({answer.text: answer for answer in answers}.values())
    match settings.ask:
        case "write":
            return [()]
        case "thumb":
            return [(answer,) for answer in different]
        case _:
            order = rng.permutation(len(different))
            return [tuple(different[place] for place in order)] if len(different) > 2 else []


def _write(file: Path, tasks: Sequence[Task], number: int) -> Path:
    with row_writer(file) as write:
        for task in tasks:
            write(task.row(number))
    return file
