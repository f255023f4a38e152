"""Tasks of other harnesses, `lm_eval:TASK` and `inspect:TASK`: run in a process of their own, their logs read as rows.

Nothing of them is imported: they need some 70 packages each. `KEDGE_LM_EVAL` and `KEDGE_INSPECT` name the command where
they are installed in an environment of their own.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from kedge.core.errors import ConfigError, DataError, RunError
from kedge.core.files import hash_json
from kedge.exams.exam import Metric, Score
from kedge.exams.items import Row, read_rows
from kedge.models.loading.resolve import resolve

_LAST_LINES = 15
_LM_EVAL_FIELDS = {
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash",
}  # fmt: skip
_INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Correct, partial, incorrect, no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExam:
    """What a task of another harness gave for one model."""

    name: str
    metrics: Mapping[str, Metric]
    items_hash: str
    scores: tuple[Score, ...]
    answers: tuple[dict[str, Any], ...]
    title: str = ""
    licence: str = "that of the task"


@dataclass(slots=True)
class _Log:
    """What is read from the logs of a task, bit by bit."""

    scores: list[Score] = field(default_factory=list[Score])
    answers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    identity: list[Any] = field(default_factory=list[Any])
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])

    def add(self, item: str, values: Mapping[str, float], answer: str, *, cluster: str = "", part: str = "") -> None:
        groups = {"task": part} if part else {}
        for metric, value in values.items():
            self.metrics.setdefault(metric, Metric(better="more", summary="as the harness computes it"))
            score = Score(item=item, metric=metric, score=value, answer=answer, cluster=cluster, groups=groups)
            self.scores.append(score)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    variable: str
    command: tuple[str, ...]
    """Where the variable is not set."""
    package: str
    module: str
    arguments: Callable[[str, Path, Path, int | None, bool], list[str]]
    read: Callable[[Path, str], _Log]


def run_engine(name: str, model: str, *, limit: int | None, chat: bool) -> EngineExam:
    """Run a task on a model and read its logs."""
    engine_name, _, task = name.partition(":")
    engine = _ENGINES[engine_name]
    place = resolve(model)
    with TemporaryDirectory(prefix="kedge-engine-") as folder:
        logs = Path(folder)
        arguments = engine.arguments(task, Path(place), logs, limit, chat)
        _run([*_command(engine_name), *arguments], engine)
        log = engine.read(logs, task)
    if not log.scores:
        raise DataError(f"{name}: its logs hold no scores")
    return EngineExam(
        name=name,
        metrics=log.metrics,
        items_hash=hash_json([name, sorted(map(json.dumps, log.identity))]),
        scores=tuple(log.scores),
        answers=tuple(log.answers),
        title=f"{task}, by {engine.package}",
    )


def check_engine(name: str) -> None:
    """Refuse a harness that is not installed, before anything is computed."""
    _command(name.partition(":")[0])


def _command(engine_name: str) -> list[str]:
    engine = _ENGINES[engine_name]
    if own := os.environ.get(engine.variable):
        command = shlex.split(own)
        if not command or shutil.which(command[0]) is None:
            raise ConfigError(f"{engine.variable}: there is no program {own!r}")
        return command
    if find_spec(engine.module) is None:
        raise ConfigError(
            f"{engine_name}: {engine.package} is not installed. Install it in an environment of its own (python -m "
            f"venv evals && evals/bin/pip install {engine.package}) and name its command: export {engine.variable}="
            f"'evals/bin/python -m {engine.module}'"
        )
    return list(engine.command)


def _run(command: Sequence[str], engine: _Engine) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ConfigError(f"{engine.package} cannot be started: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:]
        raise RunError(f"{engine.package} ended with exit code {done.returncode}:\n  " + "\n  ".join(lines))


def _lm_eval_arguments(task: str, model: Path, logs: Path, limit: int | None, chat: bool) -> list[str]:
    part = [] if limit is None else ["--limit", str(limit)]
    template = ["--apply_chat_template"] if chat else []
    return [
        "--model", "hf", "--model_args", f"pretrained={model}", "--tasks", task, "--log_samples",
        "--output_path", str(logs), "--batch_size", "auto", *part, *template,
    ]  # fmt: skip


def _inspect_arguments(task: str, model: Path, logs: Path, limit: int | None, chat: bool) -> list[str]:
    del chat  # it always speaks to a model as a chat
    part = [] if limit is None else ["--limit", str(limit)]
    return [
        "eval", task, "--model", "hf/local", "-M", f"model_path={model}", "--log-dir", str(logs),
        "--log-format", "json", "--display", "plain", *part,
    ]  # fmt: skip


def _read_lm_eval(logs: Path, task: str) -> _Log:
    """`samples_TASK_TIME.jsonl`, a file for each task of a group; results beside them say which metrics are to fall."""
    log = _Log()
    falls = _falling(logs)
    for file in sorted(logs.rglob("samples_*.jsonl")):
        part = file.name.removeprefix("samples_").rpartition("_")[0]
        for row in read_rows(file):
            item = f"{part}/{row.text('doc_id')}"
            answer = json.dumps(row.fields.get("filtered_resps"), ensure_ascii=False)
            values = {_filtered(name, row): value for name, value in _numbers(row)}
            log.add(item, values, answer, part="" if part == task else part)
            log.identity.append([item, row.fields.get("doc_hash"), row.fields.get("target")])
            prompt = [{"role": "user", "content": json.dumps(row.fields.get("doc"), ensure_ascii=False)}]
            log.answers.append({"item": item, "number": 0, "prompt": prompt, "answer": answer})
    for name in log.metrics:
        if name.partition(",")[0] in falls:
            log.metrics[name] = Metric(better="less", summary="as the harness computes it")
    return log


def _filtered(metric: str, row: Row) -> str:
    """One task may read its answers through several filters."""
    kind = row.text("filter", "none")
    return metric if kind == "none" else f"{metric},{kind}"


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    """The metrics of a sample; a list of them (one for each instruction, say) counts as its mean."""
    listed = row.fields.get("metrics")
    others = [name for name in row.fields if name not in _LM_EVAL_FIELDS]
    for name in cast("list[str]", listed) if isinstance(listed, list) else others:
        value = row.fields.get(name)
        parts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        numbers = [float(part) for part in parts if isinstance(part, bool | int | float)]
        if numbers and len(numbers) == len(parts) and all(map(math.isfinite, numbers)):
            yield name, sum(numbers) / len(numbers)


def _falling(logs: Path) -> set[str]:
    """Metrics of which less is better."""
    falls = set[str]()
    for file in logs.rglob("results_*.json"):
        for metrics in json.loads(file.read_text()).get("higher_is_better", {}).values():
            falls |= {name for name, is_more in metrics.items() if is_more is False}
    return falls


def _read_inspect(logs: Path, task: str) -> _Log:
    log = _Log()
    for file in sorted(logs.rglob("*.json")):
        whole: dict[str, Any] = json.loads(file.read_text())
        if "samples" not in whole:
            continue
        if whole.get("status") != "success":
            raise RunError(f"inspect: {task} ended as {whole.get('status')}: {whole.get('error')}")
        for sample in whole["samples"] or ():
            name, epoch = str(sample["id"]), int(sample.get("epoch", 1))
            item = name if epoch == 1 else f"{name}:{epoch}"
            answer = str((sample.get("output") or {}).get("completion", ""))
            values = {
                metric: value
                for scorer, score in (sample.get("scores") or {}).items()
                for metric, value in _inspect_values(scorer, score.get("value"))
            }
            log.add(item, values, answer, cluster=name)
            log.identity.append([item, sample.get("input"), sample.get("target")])
            asked = sample.get("input")
            prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            log.answers.append({"item": item, "number": epoch - 1, "prompt": prompt, "answer": answer})
    return log


def _inspect_values(scorer: str, value: Any) -> Iterator[tuple[str, float]]:
    """A letter, a number, or several of them by name; what is neither has no score."""
    if isinstance(value, dict):
        for name, part in cast("dict[str, Any]", value).items():
            yield from _inspect_values(f"{scorer}.{name}", part)
    elif isinstance(value, str):
        if value in _INSPECT_VALUES:
            yield scorer, _INSPECT_VALUES[value]
    elif isinstance(value, bool | int | float) and math.isfinite(value):
        yield scorer, float(value)


_ENGINES = {
    "lm_eval": _Engine(
        variable="KEDGE_LM_EVAL",
        command=(sys.executable, "-m", "lm_eval"),
        package="lm-eval",
        module="lm_eval",
        arguments=_lm_eval_arguments,
        read=_read_lm_eval,
    ),
    "inspect": _Engine(
        variable="KEDGE_INSPECT",
        command=(sys.executable, "-m", "inspect_ai"),
        package="inspect-ai",
        module="inspect_ai",
        arguments=_inspect_arguments,
        read=_read_inspect,
    ),
}
