"""Looks at the policy of an RL run while it trains: exams, and a judge that compares it with the start.

A look leaves no trace in training: random numbers, modes and adapters are as they were, and a run with looks makes the
same policy as one without. What a look saw is in `exams/STEP/` of the stage's folder, from which its numbers can be
computed again; everything that a later look compares with is read from there, so that a resumed run goes on alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from kedge.core.errors import KedgeError
from kedge.core.files import write_json
from kedge.core.protocols import Metrics
from kedge.core.records import repeated
from kedge.core.seeds import seed_for
from kedge.core.world import replicated
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.examples import Messages, Prompt
from kedge.data.long_prompts import fit_prompts
from kedge.data.reading import read
from kedge.data.template import encode_prompt
from kedge.data.writing import row_writer
from kedge.evaluate.answers import ModelAnswer
from kedge.evaluate.judged import Judged, judged_rates, preferences_by_prompt
from kedge.evaluate.looks import fallen
from kedge.exams.changes import exam_metrics
from kedge.exams.exam import Exam
from kedge.exams.rows import ItemRow, read_rows, write_rows
from kedge.exams.sitting import item_rows, sit
from kedge.models.forward.heads import LanguageModel, language_model
from kedge.models.forward.sharding import whole_copy
from kedge.models.loading.cache import cache_root
from kedge.models.loading.describe import window_of
from kedge.rewards.context import RewardContext
from kedge.rewards.pairwise import Panelist, ledger_of
from kedge.rollout.settings import SamplingSettings
from kedge.runs.state import capture_rng, restore_rng
from kedge.stages.rl.answering import Answered, sample_answers
from kedge.stages.rl.asking import Speaker
from kedge.stages.rl.comparing import compared
from kedge.stages.rl.look_settings import LookSettings, is_file, look_steps, open_for_policy
from kedge.stages.rl.prompts import prompt_limit
from kedge.stages.rl.settings import RLSettings, num_iterations
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ITEMS, JUDGED, ABOUT = "items.jsonl", "judged.jsonl", "exam.json"
_POLICY = "policy"


def open_looks(
    context: Context, settings: RLSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Looks | None:
    """The looks that a recipe asks for: exams are opened, and prompts read, before anything is trained."""
    if settings.eval is None:
        return None
    folder = context.recipe_folder
    names = [str(folder / name) if is_file(name) else name for name in settings.eval.exams]
    return Looks(
        context=context,
        settings=settings.eval,
        steps=frozenset(look_steps(settings.eval, num_iterations(settings))),
        exams=tuple(open_for_policy(name, limit=settings.eval.limit) for name in names),
        judge=_judge(context, settings, tokenizer) if settings.eval.judge else None,
        sampling=settings.sampling,
        max_failed=settings.failures.max_share,
        model=model,
        tokenizer=tokenizer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPrompts:
    """Who compares, and on which prompts."""

    panelist: Panelist
    prompts: Sequence[Prompt]


def _judge(context: Context, settings: RLSettings, tokenizer: PreTrainedTokenizerBase) -> FixedPrompts:
    assert settings.eval is not None
    assert settings.eval.judge is not None
    source = context.input("eval.prompts")
    longest, limit_name = prompt_limit(
        context.input("from"), settings.max_prompt_tokens, settings.sampling.max_new_tokens
    )
    prompts = [cast(Prompt, prompt) for prompt in read(source, kind="prompts")]
    fitted = fit_prompts(
        tokenizer, prompts, source=source, max_tokens=longest, too_long="refuse", limit_name=limit_name
    )
    known = RewardContext(folder=context.recipe_folder, seed=context.seed, note=partial(context.event, "warning"))
    judge = settings.eval.judge
    panelist = Panelist(judge, known, cache=cache_root() / "judge", ledger=ledger_of(context.folder, judge))
    return FixedPrompts(panelist=panelist, prompts=fitted.prompts)


@dataclass(frozen=True, kw_only=True)
class Looks:
    """`take` one at each of its steps. `model` is the policy with all its weights, as it is now."""

    context: Context
    settings: LookSettings
    steps: frozenset[int]
    exams: tuple[Exam, ...]
    judge: FixedPrompts | None
    sampling: SamplingSettings
    max_failed: float
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def folder(self) -> Path:
        return self.context.folder / "exams"

    def folder_of(self, step: int) -> Path:
        return self.folder / f"{step:06d}"

    def has_start(self) -> bool:
        """Whether the policy was looked at before it learnt anything."""
        return self.context.once(lambda: (self.folder_of(0) / ABOUT).is_file())

    def take(self, step: int) -> dict[str, float]:
        """The metrics of a look; none where none is due.

        A start that cannot be looked at ends the run before anything is paid for; a later look that fails is told and
        left out.
        """
        if step not in self.steps:
            return {}
        with _without_a_trace():
            whole_copy(self.model)  # as it is now
            metrics: dict[str, float] = {}
            for what, look in (("exams", self._take_exams), ("judge", self._compare)):
                try:
                    metrics |= look(step)
                except KedgeError as error:
                    if step == 0:
                        raise
                    message = f"the look at step {step} by {what} failed and is left out: {error}"
                    self.context.event("warning", "eval.failed", message, step=step)
            self.context.once(lambda: self._write_about(step))
        return metrics

    def forget_after(self, step: int) -> None:
        """Remove what later looks left: they will be taken again."""
        self.context.once(lambda: _remove_after(self.folder, step))

    # Exams

    def _take_exams(self, step: int) -> dict[str, float]:
        rows: list[ItemRow] = []
        for exam in self.exams:
            sitting = sit(exam, self._speaker.ask, seed=self.context.seed)
            rows += item_rows(exam.name, _POLICY, sitting.scores, seed=self.context.seed)
        self.context.once(lambda: self._write_rows(step, rows))
        start = self.context.once(lambda: list(read_rows(self.folder_of(0) / ITEMS))) if step else []
        return exam_metrics(self.exams, rows, start, self._last_look(step))

    def _write_rows(self, step: int, rows: Sequence[ItemRow]) -> None:
        self.folder_of(step).mkdir(parents=True, exist_ok=True)
        write_rows(self.folder_of(step) / ITEMS, rows)

    def _write_about(self, step: int) -> None:
        """The last file of a look: where it is, the look is whole."""
        about = {"step": step, "exams": {exam.name: self._facts(exam) for exam in self.exams}}
        self.folder_of(step).mkdir(parents=True, exist_ok=True)
        write_json(self.folder_of(step) / ABOUT, about)

    def _facts(self, exam: Exam) -> dict[str, Any]:
        return {
            "title": exam.title,
            "licence": exam.licence,
            "items_hash": exam.items_hash,
            "main": next(iter(exam.metrics)),
            "metrics": {name: asdict(metric) for name, metric in exam.metrics.items()},
            "settings": {"limit": self.settings.limit, "seed": self.context.seed, "template": "chat"},
        }

    def _last_look(self, step: int) -> Metrics:
        """The metrics of the step of the look before this one."""
        earlier = [other for other in self.steps if other < step]
        rows = self.context.run.read_metrics() if earlier else []
        return next((row for row in reversed(rows) if row["step"] == max(earlier, default=0)), {})

    @cached_property
    def _tokenise(self) -> TextTokenizer:
        return TextTokenizer(self.tokenizer, for_many=True)

    @cached_property
    def _language_model(self) -> LanguageModel:
        return language_model(whole_copy(self.model))

    @cached_property
    def _speaker(self) -> Speaker:
        return Speaker(
            name=_POLICY,
            template="chat",
            tokenizer=self.tokenizer,
            prompt_tokenizer=self.tokenizer,
            tokenise=lambda: self._tokenise,
            window=window_of(self.model.config),
            model=lambda: self._language_model,
            write=self._write,
            world=replicated(self.context.world),
        )

    def _write(self, prompts: Sequence[Messages], sampling: SamplingSettings, answers: int) -> Answered:
        """Answers of the policy as it is, by the same luck at every look."""
        rows = repeated(
            [encode_prompt(self.tokenizer, prompt) for prompt in prompts], ids=range(len(prompts)), answers=answers
        )
        seed = seed_for(self.context.seed, "exam")
        model, world = whole_copy(self.model), self.context.world
        rollouts = sample_answers(model, self.tokenizer, rows, sampling, seed=seed, world=world)
        return Answered(rollouts=rollouts, tokenizer=self.tokenizer, is_cached=False)

    # The judge

    def _compare(self, step: int) -> dict[str, float]:
        if self.judge is None:
            return {}
        answers = self._answers()
        if step == 0:
            self.context.once(lambda: self._try_judge(answers))
            self.context.once(lambda: self._write_judged(step, answers, [None] * len(answers)))
            return {}
        start = self.context.once(lambda: self._read_answers(0))
        judged = self.context.once(lambda: self._judged(list(zip(answers, start, strict=True))))
        self.context.once(lambda: self._write_judged(step, answers, judged))
        earlier = [look for other in sorted(self.steps) if 0 < other < step and (look := self._read_preferences(other))]
        return judge_metrics(judged, earlier, self._last_look(step))

    def _answers(self) -> list[ModelAnswer]:
        assert self.judge is not None
        count = self.settings.answers
        answered = self._write([prompt.prompt for prompt in self.judge.prompts], self.sampling, count)
        rows = zip(answered.tokens(), answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
        return [
            ModelAnswer(
                model=_POLICY,
                prompt=place // count,
                number=place % count,
                tokens=tokens,
                text=text,
                is_finished=is_finished,
                scores={},
            )
            for place, (tokens, text, is_finished) in enumerate(rows)
        ]

    def _try_judge(self, answers: Sequence[ModelAnswer]) -> None:
        """Two calls, so that a judge that cannot be asked is known before anything is trained."""
        assert self.judge is not None
        first = answers[0]
        nothing = ModelAnswer(
            model="nothing", prompt=first.prompt, number=0, tokens=(), text="", is_finished=True, scores={}
        )
        compared(self.judge.panelist, [(first, nothing)], self.judge.prompts, max_failed=0.0)

    def _judged(self, pairs: Sequence[tuple[ModelAnswer, ModelAnswer]]) -> list[Judged]:
        assert self.judge is not None
        return compared(self.judge.panelist, pairs, self.judge.prompts, max_failed=self.max_failed)

    def _write_judged(self, step: int, answers: Sequence[ModelAnswer], judged: Sequence[Judged | None]) -> None:
        with row_writer(self.folder_of(step) / JUDGED) as write:
            for answer, comparison in zip(answers, judged, strict=True):
                verdict = {} if comparison is None else {**asdict(comparison), "preference": comparison.preference}
                write({**verdict, **asdict(answer)})

    def _read_judged(self, step: int) -> list[dict[str, Any]]:
        file = self.folder_of(step) / JUDGED
        return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.is_file() else []

    def _read_answers(self, step: int) -> list[ModelAnswer]:
        answers: list[ModelAnswer] = []
        for row in self._read_judged(step):
            fields: dict[str, Any] = {name: row[name] for name in ModelAnswer.__dataclass_fields__}
            fields["tokens"] = tuple(fields["tokens"])
            answers.append(ModelAnswer(**fields))
        return answers

    def _read_preferences(self, step: int) -> dict[int, float]:
        """The mean preference for the policy over the start on each prompt, at an earlier look."""
        names = Judged.__dataclass_fields__
        rows = self.context.once(lambda: self._read_judged(step))
        return preferences_by_prompt([Judged(**{name: row[name] for name in names}) for row in rows])


def judge_metrics(
    judged: Sequence[Judged], earlier: Sequence[Mapping[int, float]], before: Metrics
) -> dict[str, float]:
    """The win rate over the start with its interval, how the judge decided, and `judge/fallen`, the p-value of the rate
    not having fallen from its best look; `/twice` is the larger of it and that of the look before."""
    shares = {"judge/unreadable": sum(not comparison.is_readable for comparison in judged) / len(judged)}
    rates = judged_rates({"judge": {_POLICY: judged}}).get(_POLICY)
    if rates is None:
        return shares
    rate = rates["judge"]
    p = fallen(earlier, preferences_by_prompt(judged))
    metrics = {
        "judge/win_rate": rate.rate,
        "judge/win_rate/low": rate.low,
        "judge/win_rate/high": rate.high,
        "judge/ties": rate.ties,
        "judge/inconsistent": rate.inconsistent / rate.comparisons,
        **shares,
        "judge/fallen": p,
        "judge/fallen/twice": max(p, before.get("judge/fallen", 1.0)),
    }
    equal = rate.length_controlled
    return metrics if equal is None else {**metrics, "judge/win_rate/equal_length": equal.mean}


@contextmanager
def _without_a_trace() -> Generator[None]:
    """Within, random numbers may be drawn; afterwards the generators are as they were."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


def _remove_after(folder: Path, step: int) -> None:
    for look in folder.iterdir() if folder.is_dir() else ():
        if look.name.isdigit() and int(look.name) > step:
            shutil.rmtree(look)
