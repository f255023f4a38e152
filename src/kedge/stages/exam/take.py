"""Exams for models: one after the other, kept in a cache by the weights and the items, summarised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from kedge import __version__
from kedge.core.errors import ModelError
from kedge.core.files import hash_folder, hash_json
from kedge.core.world import ALONE, World, once
from kedge.data.template import template_hash
from kedge.exams.catalogue import is_engine, open_exam
from kedge.exams.exam import Exam, Score, Template
from kedge.exams.rows import ItemRow
from kedge.exams.sitting import Sitting, item_rows, sit
from kedge.exams.summary import Key, Result, difference_interval, summarise
from kedge.models.loading.cache import build_once, cache_root
from kedge.models.loading.hashing import folder_hash
from kedge.models.loading.load import DTypeName, dtype_for
from kedge.models.loading.resolve import resolve
from kedge.models.settings import AutoSize
from kedge.stages.exam.engines import EngineExam, check_engine, run_engine
from kedge.stages.exam.examinee import Examinee
from kedge.stages.rl.reward import tokenizer_hash
from kedge.stages.shared.device import pick_device

EFFECT_ITEMS = 200
"""Items of a choice exam that are asked with the other template too: its effect is then known to about 3 points."""
_OTHER: dict[Template, Template] = {"chat": "plain", "plain": "chat"}
_FORMAT = 1
_FILE = "sitting.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Which exams, and how they are asked; the same for all models."""

    exams: tuple[str, ...]
    template: Template = "chat"
    limit: int | None = None
    seed: int = 0
    rows: AutoSize = "auto"
    dtype: DTypeName = "auto"
    device: str = "auto"
    chat_template: str | None = None
    world: World = ALONE
    say: Callable[[str], None] = lambda _: None
    progress: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateEffect:
    """A choice exam with the other template, on a fixed part of its items; `difference` is the other minus the used."""

    exam: str
    metric: str
    model: str
    items: int
    mean: float
    other_mean: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Everything that is known after the exams."""

    models: tuple[str, ...]
    exams: dict[str, dict[str, Any]]
    rows: tuple[ItemRow, ...]
    answers: tuple[dict[str, Any], ...]
    results: tuple[Result, ...]
    template: Template
    effects: tuple[TemplateEffect, ...]
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hashes of the weights of models in folders: whom the results are about, whatever the model was called."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "models": list(self.models),
            "weights": dict(self.weights),
            "exams": self.exams,
            "results": [asdict(result) for result in self.results],
            "template": {"used": self.template, "effects": [asdict(effect) for effect in self.effects]},
        }


def take_exams(models: Sequence[tuple[str, str]], request: Request) -> Taken:
    """Every model, given as (name, place), takes every exam."""
    exams = [(name, open_exam(name, limit=request.limit)) for name in request.exams if not is_engine(name)]
    engines = [name for name in request.exams if is_engine(name)]
    for name in engines:
        check_engine(name)
    facts = {exam.name: _facts(exam, request) for _, exam in exams}
    metrics = {(exam.name, name): metric for _, exam in exams for name, metric in exam.metrics.items()}
    rows: list[ItemRow] = []
    answers: list[dict[str, Any]] = []
    effects: list[TemplateEffect] = []
    confidences: dict[Key, list[float]] = {}
    for name, place in models:
        examinee = _examinee(name, place, request)
        for source, exam in exams:
            start = time.monotonic()
            sitting, is_cached = _sitting(exam, examinee, request)
            took = "read from the cache" if is_cached else f"{time.monotonic() - start:.1f} s"
            request.say(f"  {name}: {exam.name}, {len(sitting.answers):,} answers, {took}")
            rows += item_rows(exam.name, name, sitting.scores, seed=request.seed)
            answers += _named(sitting.answers, exam.name, name)
            for score in sitting.scores:
                if score.confidence is not None:
                    confidences.setdefault((exam.name, score.metric, name), []).append(score.confidence)
            effects += _effects(source, exam, examinee, sitting, request)
        for engine in engines:
            result = once(request.world, partial(_by_engine, engine, place, request))
            facts.setdefault(engine, _facts(result, request))["metrics"] |= _metrics(result)
            rows += item_rows(engine, name, result.scores, seed=request.seed)
            answers += _named(result.answers, engine, name)
    folders = [(name, resolve(place)) for name, place in models]
    return Taken(
        models=tuple(name for name, _ in models),
        exams=facts,
        rows=tuple(rows),
        answers=tuple(answers),
        results=tuple(summarise(rows, confidences, metrics=metrics)),
        template=request.template,
        effects=tuple(effects),
        weights={name: folder_hash(place) for name, place in folders if isinstance(place, Path)},
    )


def _named(answers: Iterable[Mapping[str, Any]], exam: str, model: str) -> Iterator[dict[str, Any]]:
    """Answers with an id each, by which a badcase can be made of one."""
    for row, answer in enumerate(answers):
        yield {"id": f"{model}-{exam}-{row}", "exam": exam, "model": model, **answer}


def _examinee(name: str, place: str, request: Request) -> Examinee:
    return Examinee(
        name=name,
        place=place,
        chat_template=request.chat_template,
        device=request.device,
        dtype=request.dtype,
        rows=request.rows,
        seed=request.seed,
        world=request.world,
        progress=request.progress,
        say=request.say,
    )


def _by_engine(engine: str, place: str, request: Request) -> EngineExam:
    return run_engine(engine, place, limit=request.limit, chat=request.template == "chat")


def _metrics(exam: Exam | EngineExam) -> dict[str, Any]:
    return {name: asdict(metric) for name, metric in exam.metrics.items()}


def _facts(exam: Exam | EngineExam, request: Request) -> dict[str, Any]:
    return {
        "title": exam.title,
        "licence": exam.licence,
        "items_hash": exam.items_hash,
        "main": next(iter(exam.metrics)),
        "metrics": _metrics(exam),
        "settings": {"limit": request.limit, "seed": request.seed, "template": request.template},
    }


def _sitting(exam: Exam, examinee: Examinee, request: Request) -> tuple[Sitting, bool]:
    """The exam taken now, or read from the cache where these weights have taken it before."""
    facts = _identity(exam, examinee, request)
    folder = cache_root() / "exam-results" / hash_json(facts)
    if facts is not None:
        kept = request.world.same(_read(folder) if request.world.rank == 0 and folder.is_dir() else None)
        if kept is not None:
            return kept, True
    sitting = sit(exam, partial(examinee.ask, request.template), seed=request.seed)
    if facts is not None:
        once(request.world, lambda: build_once(folder, lambda beside: _write(beside, sitting, facts)))
    return sitting, False


def _identity(exam: Exam, examinee: Examinee, request: Request) -> dict[str, Any] | None:
    """Everything that a result depends on; None where the weights have no stable identity."""
    source = resolve(examinee.place)
    if not isinstance(source, Path):
        return None
    device = torch.device(pick_device(request.device))
    speaks = [] if examinee.is_reward_model else [tokenizer_hash(examinee.tokenizer), _template(examinee)]
    return {
        "format": _FORMAT,
        "kedge": __version__,
        "weights": hash_folder(source, suffixes=(".safetensors", "config.json", "ensemble.json")),
        "tokenizer": speaks,
        "exam": exam.name,
        "items": exam.items_hash,
        "template": request.template,
        "seed": request.seed,
        "device": device.type,
        "dtype": str(dtype_for(request.dtype, device)),
    }


def _template(examinee: Examinee) -> str | None:
    try:
        return template_hash(examinee.tokenizer)
    except ModelError:
        return None


def _write(folder: Path, sitting: Sitting, facts: dict[str, Any]) -> None:
    (folder / _FILE).write_bytes(orjson.dumps({"facts": facts, "sitting": asdict(sitting)}))


def _read(folder: Path) -> Sitting:
    kept: dict[str, Any] = orjson.loads((folder / _FILE).read_bytes())["sitting"]
    scores = tuple(Score(**score) for score in kept["scores"])
    return Sitting(scores=scores, answers=tuple(kept["answers"]), has_choices_alone=kept["has_choices_alone"])


def _effects(
    source: str, exam: Exam, examinee: Examinee, sitting: Sitting, request: Request
) -> Iterator[TemplateEffect]:
    """The main metric of a choice exam with the other template, beside the same items with the used one."""
    if not sitting.has_choices_alone or (request.template == "plain" and _template(examinee) is None):
        return
    main = next(iter(exam.metrics))
    part = open_exam(source, limit=min(EFFECT_ITEMS, request.limit or EFFECT_ITEMS))
    has_part = request.limit is None or request.limit <= EFFECT_ITEMS
    used = sitting if has_part else _sitting(part, examinee, request)[0]
    changed, _ = _sitting(part, examinee, replace(request, template=_OTHER[request.template]))
    before = {score.item: score.score for score in used.scores if score.metric == main}
    pairs = [(before[score.item], score) for score in changed.scores if score.metric == main and score.item in before]
    if pairs:
        used_N = np.array([score for score, _ in pairs])
        other_N = np.array([score.score for _, score in pairs])
        low, high = difference_interval(used_N, other_N, [score.cluster or score.item for _, score in pairs])
        yield TemplateEffect(
            exam=exam.name,
            metric=main,
            model=examinee.name,
            items=len(pairs),
            mean=float(used_N.mean()),
            other_mean=float(other_N.mean()),
            difference=float((other_N - used_N).mean()),
            low=low,
            high=high,
        )
