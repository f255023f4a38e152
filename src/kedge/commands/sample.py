"""What `kedge sample` does: which model and prompts are meant, the answers as rows, and with a judge the best."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, ModelError, RewardError
from kedge.core.stats import best_of_kl
from kedge.data.examples import Message, Messages, Prompt
from kedge.data.reading import read
from kedge.data.writing import WRITABLE, row_writer
from kedge.models.loading.load import DTypeName
from kedge.rewards.failures import ScoreResult
from kedge.rewards.model import on_text
from kedge.rewards.settings import ModelSource
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.answering import Answered, Answering, answer, room_for_answers
from kedge.stages.rl.judge import Judge, load_judge
from kedge.stages.rl.reward import encoded_answer, scorer_of
from kedge.stages.shared.device import checked_device

LONGEST = 256
"""Tokens of an answer, unless asked for otherwise."""


def sample_answers(
    model: str,
    prompts: Sequence[Messages],
    sampling: Mapping[str, Any],
    *,
    answers: int,
    judge: Judge | None,
    seed: int,
    chat_template: str | None,
    device: str,
    dtype: DTypeName,
    progress: Callable[[int], None],
) -> list[dict[str, Any]]:
    """So many answers to each prompt as rows; with a judge, each with its score and the best one marked."""
    place = find_model(model)
    if sampling.get("max_new_tokens") is None:
        room = room_for_answers(place, prompts, chat_template=chat_template)
        sampling = {**sampling, "max_new_tokens": max(1, min(LONGEST, room))}
    answering = Answering(
        model=place,
        sampling=sampling_from(sampling),
        answers=answers,
        seed=seed,
        chat_template=chat_template,
        device=checked_device(device),
        dtype=dtype,
    )
    answered = answer(answering, prompts, progress=progress)
    rows = list(rows_of(answered, prompts, model=model, answers=answers, seed=seed))
    return rows if judge is None else choose(judge, rows, prompts, answered, n=answers)


def find_model(place: str) -> str:
    """The model in the folder of a run or stage that made one; anything else (alias, model folder, hub id) as it is."""
    folder = Path(place)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return place
    if is_language_model(folder / "model"):
        return str(folder / "model")
    stages = [stage for stage in sorted(folder.iterdir()) if is_language_model(stage / "model")]
    if len(stages) == 1:
        return str(stages[0] / "model")
    if stages:
        raise ModelError(f"{place}: holds {len(stages)} models; name one: {', '.join(map(str, stages))}")
    raise ModelError(
        f"{place}: no language model here; expected a folder with config.json, or a run in which a stage has made one"
    )


def asked_prompts(texts: Sequence[str], file: str | None) -> list[Messages]:
    """Texts as a user's messages, then the prompts of a data file; one broken line of it is an error."""
    found: list[Messages] = [(Message("user", text),) for text in texts]
    if file is not None:
        found += [cast(Prompt, example).prompt for example in read(file, kind="prompts", max_broken=0.0)]
    if not found:
        raise ConfigError("nothing to answer: give --prompt TEXT (as often as you like), or --prompts FILE")
    return found


def sampling_from(values: Mapping[str, Any]) -> SamplingSettings:
    """Settings from the command line; what is wrong with them is told by option."""
    try:
        return SamplingSettings.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problems = [
            f"--{str(problem['loc'][0]).replace('_', '-')}: {problem['msg']}, found {problem['input']!r}"
            for problem in error.errors()
            if problem["loc"]
        ]
        raise ConfigError("; ".join(problems)) from error


def refuse_target(to: Path | None) -> None:
    """Refused now rather than after an hour of sampling."""
    if to is not None and not to.name.endswith(WRITABLE):
        raise ConfigError(f"--to {to}: the name must end in {', '.join(WRITABLE)}")


def rows_of(
    answered: Answered, prompts: Sequence[Messages], *, model: str, answers: int, seed: int
) -> Iterator[dict[str, Any]]:
    """A row an answer; the same model, prompts, settings and seed give it again."""
    said = zip(answered.tokens(), answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
    for row, (tokens, text, is_finished) in enumerate(said):
        prompt, number = divmod(row, answers)
        yield {
            "id": f"{prompt}-{number}",
            "model": model,
            "prompt": [{"role": message.role, "content": message.content} for message in prompts[prompt]],
            "answer": text,
            "length": len(tokens),
            "finished": is_finished,
            "seed": seed,
        }


def write_rows(to: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with row_writer(to) as write:
        for row in rows:
            write(row)


def is_language_model(folder: Path) -> bool:
    """Whether a folder holds a model that writes; reward models do not."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    named: Sequence[str] = json.loads(config.read_text()).get("architectures") or ()
    return not any(name.endswith("ForSequenceClassification") for name in named)


def judge_for(best_of: int | None, reward: str | None, answers: int, *, device: str) -> Judge | None:
    """Who chooses; None where nobody was asked to. What cannot be is refused now rather than after sampling."""
    if best_of is None and reward is None:
        return None
    if best_of is None or reward is None:
        given, missing = ("--best-of N", "--reward") if reward is None else ("--reward", "--best-of N")
        raise ConfigError(f"{given} goes with {missing}: N answers are sampled, and the reward model names the best")
    if answers != 1:
        raise ConfigError(f"--answers {answers} and --best-of {best_of}: give one of them; --json shows all answers")
    return load_judge(reward, device=device)


def verdicts(judge: Judge, prompts: Sequence[Messages], answered: Answered, *, answers: int) -> list[ScoreResult]:
    """What the judge says of each answer, read as text as `kedge score` reads it; or why it says nothing."""
    source = ModelSource.model_validate({"kind": "model", "from": judge.place})
    lines = [
        Answer(
            prompt=tuple((message.role, message.content) for message in prompts[row // answers]),
            text=text,
            is_finished=is_finished,
        )
        for row, (text, is_finished) in enumerate(
            zip(answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
        )
    ]
    return on_text(scorer_of(judge), source, partial(encoded_answer, judge)).judge(lines)


def with_best(rows: Sequence[Mapping[str, Any]], told: Sequence[ScoreResult], *, n: int) -> Iterator[dict[str, Any]]:
    """The rows with their scores, the best of each n marked, and with it how far the best of n is from one answer."""
    for at in range(0, len(rows), n):
        scored = [index for index in range(at, at + n) if told[index].is_scored]
        best = max(scored, key=lambda index: told[index].score, default=None)
        for index in range(at, at + n):
            score = told[index].score
            yield {
                **rows[index],
                "score": None if math.isnan(score) else score,
                **({"unscored": told[index].reason} if math.isnan(score) else {}),
                "best": index == best,
                "best_of": n,
                "kl": best_of_kl(n),
            }


def choose(
    judge: Judge, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Messages], answered: Answered, *, n: int
) -> list[dict[str, Any]]:
    """All rows with scores, the best ones marked; a judge without a single score is an error."""
    results = verdicts(judge, prompts, answered, answers=n)
    if results and not any(result.is_scored for result in results):
        raise RewardError(f"{judge.place} gave no score to any of {len(results)} answers: {results[0].reason}")
    return list(with_best(rows, results, n=n))
