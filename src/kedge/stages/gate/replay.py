"""The badcases put to a model: it answers, and every answer is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, DataError
from kedge.core.seeds import seed_for
from kedge.core.world import ALONE, World, once
from kedge.data.examples import Message, Messages, Role
from kedge.gate.badcases import Badcase
from kedge.gate.checks import passes
from kedge.gate.replayed import Asked, CaseResult, result_of
from kedge.models.loading.load import DTypeName
from kedge.models.settings import AutoSize
from kedge.rewards.build import text_source
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import results_of
from kedge.rewards.model import on_text
from kedge.rewards.settings import JudgeSource, MixSource, ModelSource, RewardSourceSettings
from kedge.rollout.settings import SamplingSettings
from kedge.stages.gate.trained_on import trained_on
from kedge.stages.rl.answering import Answering, answer, room_for_answers
from kedge.stages.rl.judge import combining, load_judge
from kedge.stages.rl.reward import scorer_of

Say = Callable[[str], None]
Score = Callable[[Sequence[Answer]], list[float]]
"""NaN where an answer has no score."""
AT_LEAST = "at_least"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How cases are replayed. `files` is what the model was trained on; None where nobody knows."""

    model: str
    files: Sequence[Path] | None
    folder: Path
    """Where relative paths of checks start."""
    seed: int
    device: str = "auto"
    dtype: DTypeName = "auto"
    rows: AutoSize = "auto"
    chat_template: str | None = None
    max_new_tokens: int = 256
    temperature: float = 1.0
    world: World = ALONE
    say: Say = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    prompt: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]
    is_finished: tuple[bool, ...]


def replay(cases: Sequence[Badcase], how: Replay) -> list[CaseResult]:
    """Samples of every case and of its siblings, checked; in the order of the cases."""
    if not cases:
        return []
    scorers = {case.id: _scorer(case, how) for case in cases}  # what is wrong with a check costs no sampling
    known = once(how.world, lambda: _known(cases, how))
    by_count: dict[int, list[Badcase]] = {}
    for case in cases:
        by_count.setdefault(case.samples, []).append(case)
    sampled: dict[str, list[_Sampled]] = {}
    for samples, alike in by_count.items():
        sampled |= _sample(alike, samples, how)
    return once(
        how.world, lambda: [_result(case, sampled[case.id], known[case.id], scorers[case.id]) for case in cases]
    )


def _known(cases: Sequence[Badcase], how: Replay) -> dict[str, list[bool]]:
    """Of every case, which of its prompts were trained on."""
    if how.files is None:
        how.say(f"  nobody knows what {how.model} was trained on: every badcase counts by its own prompt")
        return {case.id: [False] * len(case.prompts()) for case in cases}
    asked = [(case.id, place, prompt) for case in cases for place, prompt in enumerate(case.prompts())]
    texts = ["\n".join(content for role, content in prompt if role != "system") for _, _, prompt in asked]
    places = trained_on(texts, how.files, note=lambda text: how.say(f"  {text}"))
    known = {case.id: [False] * len(case.prompts()) for case in cases}
    for place in places:
        name, number, _ = asked[place]
        known[name][number] = True
    return known


def _sample(cases: Sequence[Badcase], samples: int, how: Replay) -> dict[str, list[_Sampled]]:
    prompts = [(case.id, prompt) for case in cases for prompt in case.prompts()]
    messages = [_messages(prompt) for _, prompt in prompts]
    room = room_for_answers(how.model, messages, chat_template=how.chat_template)
    if room < 1:
        raise DataError(f"a badcase leaves no room for an answer in the window of {how.model}")
    request = Answering(
        model=how.model,
        sampling=SamplingSettings(temperature=how.temperature, max_new_tokens=min(how.max_new_tokens, room)),
        answers=samples,
        seed=seed_for(how.seed, "badcases"),
        chat_template=how.chat_template,
        device=how.device,
        dtype=how.dtype,
        rows=how.rows,
    )
    answered = answer(request, messages, world=how.world)
    texts, finished = answered.texts(), cast("list[bool]", answered.rollouts.finished_B.tolist())
    sampled: dict[str, list[_Sampled]] = {}
    for number, (name, prompt) in enumerate(prompts):
        part = slice(number * samples, (number + 1) * samples)
        own = _Sampled(prompt=prompt, texts=tuple(texts[part]), is_finished=tuple(finished[part]))
        sampled.setdefault(name, []).append(own)
    return sampled


def _messages(prompt: Sequence[tuple[str, str]]) -> Messages:
    return tuple(Message(cast(Role, role), content) for role, content in prompt)


def _result(case: Badcase, sampled: Sequence[_Sampled], known: Sequence[bool], scorer: Score | None) -> CaseResult:
    return result_of(case, list(_asked(case, sampled, known, scorer)))


def _asked(case: Badcase, sampled: Sequence[_Sampled], known: Sequence[bool], scorer: Score | None) -> Iterator[Asked]:
    for own, is_known in zip(sampled, known, strict=True):
        question = own.prompt[-1][1]
        if scorer is None:
            good = [passes(case.check, question, text) for text in own.texts]
        else:
            good = _scored(case, own, scorer)
        bad = [text for text, is_good in zip(own.texts, good, strict=True) if is_good is False]
        yield Asked(
            text=question,
            good=sum(is_good is True for is_good in good),
            unknown=sum(is_good is None for is_good in good),
            is_trained_on=is_known,
            example=bad[0] if bad else "",
        )


def _scored(case: Badcase, own: _Sampled, score: Score) -> list[bool | None]:
    """Of each sample, whether its score is high enough; None where it has none."""
    answers = [
        Answer(prompt=own.prompt, text=text, is_finished=is_finished)
        for text, is_finished in zip(own.texts, own.is_finished, strict=True)
    ]
    if case.check.judge is not None:
        least = float(case.check.judge[AT_LEAST])
        return [None if grade != grade else grade >= least for grade in score(answers)]
    *scores, bad = score([*answers, Answer(prompt=own.prompt, text=case.bad, is_finished=True)])
    return [None if value != value or bad != bad else value > bad for value in scores]


def _scorer(case: Badcase, how: Replay) -> Score | None:
    """Who scores the answers of a case; None where its check reads the text alone."""
    if case.check.judge is not None:
        source = judge_settings(case.check.judge, where=f"{case.file}: {case.id}: check.judge")
    elif case.check.beats is not None:
        source = reward_settings(case.check.beats, where=f"{case.file}: {case.id}: check.beats")
    else:
        return None
    if isinstance(source, ModelSource):
        return _model_scorer(source, how)
    text = text_source(cast(Any, source), RewardContext(folder=how.folder, seed=how.seed))
    return lambda answers: [result.score for result in results_of(text, answers, name=case.id)]


def _model_scorer(source: ModelSource, how: Replay) -> Score:
    place = how.folder / source.place
    judge = combining(load_judge(str(place) if place.exists() else source.place, device=how.device), source.combine)

    def encode(answer: Answer) -> list[int]:
        return judge.encoder.tokens(_messages(answer.prompt), (Message("assistant", answer.text),))

    return on_text(scorer_of(judge), source, encode).score


def judge_settings(values: Mapping[str, Any], *, where: str) -> JudgeSource:
    """The judge of a check; `at_least` is the grade that passes."""
    least = values.get(AT_LEAST)
    if not isinstance(least, int | float) or isinstance(least, bool):
        raise ConfigError(f"{where}: needs `{AT_LEAST}`, the least grade that passes")
    given = {"kind": "judge", **{name: value for name, value in values.items() if name != AT_LEAST}}
    return cast(JudgeSource, _source(given, where))


def reward_settings(values: str | Mapping[str, Any], *, where: str) -> RewardSourceSettings:
    source = _source({"kind": "model", "from": values} if isinstance(values, str) else values, where)
    if isinstance(source, MixSource):
        raise ConfigError(f"{where}: one reward source, not a mix of several")
    return source


def _source(values: Mapping[str, Any], where: str) -> RewardSourceSettings:
    try:
        return TypeAdapter[RewardSourceSettings](RewardSourceSettings).validate_python(dict(values))
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{where}: {told}") from None
