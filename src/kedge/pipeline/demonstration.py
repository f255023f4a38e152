"""`kedge demo`: writes a small world, runs the whole loop on it, and tells the story from what the run writes down.

Whatever is told is read from the run's own files, as a person could; the sentences are `kedge.demo.story`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

import torch

from kedge.data.audit import audit
from kedge.demo import story
from kedge.demo.recipe import NAMES, Version, write_demo
from kedge.demo.world import ALL, Sizes, best_accuracy
from kedge.monitor.overoptimisation import TooLittle, fit
from kedge.pipeline.recipe import Recipe, load_recipe
from kedge.pipeline.reporting import REPORT_NAME
from kedge.pipeline.runner import run_recipe
from kedge.pipeline.wiring import connect
from kedge.runs.folder import Run
from kedge.runs.manifest import MANIFEST_NAME

Tone = Literal["heading", "plain", "sample", "warning"]
Tell = Callable[[str, Tone], None]

SAMPLE = 0
"""Which of the answers of a set is shown: always the same, so that nobody chose it for its beauty."""


def run_folder(folder: Path, version: Version) -> Path:
    """Where the run of a demo in `folder` lies."""
    return folder / "runs" / NAMES[version]


def run_demo(
    folder: Path,
    seed: int,
    *,
    tell: Tell,
    version: Version = "plain",
    sizes: Sizes = ALL,
    overrides: Sequence[str] = (),
) -> Path:
    """Write the demo into `folder`, run it and tell about it; gives the folder of the run."""
    began = time.monotonic()
    tell("A shop that replies to its customers", "heading")
    tell(story.WORLD, "plain")
    with _one_thread():
        recipe = load_recipe(write_demo(folder, seed, sizes, version=version), overrides)
        tell(f"Recipe, data and model are in {folder}; what follows is `kedge run {recipe.file}`.", "plain")
        narrator = Narrator(recipe=recipe, folder=run_folder(folder, version), version=version, tell=tell)
        narrator.audit(folder / "data")
        home = run_recipe(recipe, narrator.folder.parent, is_resumed=False, say=narrator.hear)
    narrator.end()
    _where_next(home, folder, version, tell)
    tell(f"All of it took {_duration(time.monotonic() - began)} on one thread, with seed {seed}.", "plain")
    return home


@contextmanager
def _one_thread() -> Generator[None]:
    """On matrices this small a second thread costs more than it does, and the sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(slots=True, kw_only=True)
class Narrator:
    """Listens to a run. What the run says is only the sign that there may be something new in its folder."""

    recipe: Recipe
    folder: Path
    version: Version
    tell: Tell
    waiting: list[str] = field(init=False)
    """Stages that have not begun."""
    stage: str = field(default="", init=False)
    """The one that is running."""
    told: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """How many events and samples of a stage have been told."""

    def __post_init__(self) -> None:
        self.waiting = list(connect(self.recipe).order)

    def audit(self, data: Path) -> None:
        train = [str(data / f"{name}.jsonl") for name in ("demonstrations", "pairs", "prompts")]
        found = audit(train, heldout=[str(data / "heldout-prompts.jsonl")])
        bad = [one.message for one in found.findings if one.level in ("warning", "fatal")]
        items = sum(one.items for one in found.files)
        self.tell(story.audited(items, len(found.files), len(found.findings), len(bad)), "plain")
        for message in bad:
            self.tell(message, "warning")

    def hear(self, _: str) -> None:
        while self.waiting and (self.folder / self.waiting[0] / MANIFEST_NAME).is_file():
            self._close()
            self.stage = self.waiting.pop(0)
            self._open()
        self._look()

    def end(self) -> None:
        self._look()
        self._close()

    def _open(self) -> None:
        is_let_go = self.version == "overoptimised" and self.stage == "ppo"
        step = story.LET_GO if is_let_go else story.STEPS[self.stage]
        number, total = len(self.recipe.stages) - len(self.waiting), len(self.recipe.stages)
        self.tell(f"{number}/{total} {step.title}", "heading")
        self.tell(step.about, "plain")

    def _look(self) -> None:
        if not self.stage:
            return
        run = Run.open(self.folder / self.stage, for_writing=False)
        for event in self._new("events", run.read_events()):
            if event["level"] in ("warning", "fatal"):
                at = f"iteration {event['step']}: " if event["step"] is not None else ""
                self.tell(f"{at}{event['message']}", "warning")
        if self.stage == "ppo":
            self._tell_iterations(run)

    def _tell_iterations(self, run: Run) -> None:
        total = int(run.manifest.settings["iterations"])
        by_step = {row["step"]: row for row in run.read_metrics()}
        for sample in self._new("samples", run.read_samples()):
            if sample["number"] == SAMPLE and sample["step"] in by_step:
                self.tell(story.iteration(by_step[sample["step"]], total), "plain")
                self.tell(story.reply(sample["answer"], sample["gold"]), "sample")

    def _new(self, kind: str, records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The records that were not there the last time. A run that went back has fewer."""
        key = f"{self.stage} {kind}"
        seen = min(self.told.get(key, 0), len(records))
        self.told[key] = len(records)
        return records[seen:]

    def _close(self) -> None:
        ends = {"prepare": self._prepared, "sft": self._imitated, "reward": self._judging, "eval": self._evaluated}
        if self.stage == "ppo" and self.version == "overoptimised":
            self._overoptimised()
        elif self.stage in ends:
            ends[self.stage](self.folder / self.stage)

    def _prepared(self, home: Path) -> None:
        prepared = next(one for one in _records(home / "events.jsonl") if one["code"] == "data.prepared")
        self.tell(f"Done: {prepared['message']}.", "plain")

    def _imitated(self, home: Path) -> None:
        same = [one for one in _records(home / "samples.jsonl") if one["number"] == SAMPLE]
        if same:
            self.tell(f"A customer: {story.reply(_asked(same[0]['prompt']))}", "plain")
            self.tell(f"before: {story.reply(' '.join(same[0]['answer'].split()[:12]))} …", "sample")
            self.tell(f"after:  {story.reply(same[-1]['answer'])}", "sample")

    def _judging(self, home: Path) -> None:
        report = json.loads((home / "reward-report.json").read_text(encoding="utf-8"))
        held = _records(self.folder / "prepare/data/heldout.jsonl")
        best = best_accuracy([{side: turns[-1]["content"] for side, turns in row.items()} for row in held])
        self.tell(story.judged(report["accuracy"]["value"], best, report["pairs"]), "plain")

    def _overoptimised(self) -> None:
        metrics = _records(self.folder / "ppo" / "metrics.jsonl")
        self.tell(story.fall(metrics), "warning")
        found = fit([one["kl/mean"] for one in metrics], [one["gold/mean"] for one in metrics], kind="rl")
        if isinstance(found, TooLittle):
            self.tell(f"The law of Gao et al. (2022) was not fitted: {found.reason}.", "plain")
        else:
            self.tell(story.peak(found.peak_kl, found.peak_kl_interval, found.kl), "warning")

    def _evaluated(self, home: Path) -> None:
        evaluation = json.loads((home / "evaluation.json").read_text(encoding="utf-8"))
        answers = _records(home / "answers.jsonl")
        asked, models = typical(answers)
        self.tell(f"A typical case (the median gain). The customer: {story.reply(asked)}", "plain")
        for name, one in models.items():
            self.tell(f"{story.NAMES[name]}: {story.reply(one['answer'], one['scores']['gold'])}", "sample")
        self.tell(f"By {evaluation['prompts']:,} messages that no model has seen (intervals are 95 %)", "heading")
        for line in story.table(evaluation):
            self.tell(line, "plain")


def typical(answers: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """The message on which PPO gains the median over SFT by the truth, and what every model replied to it."""
    by_prompt: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in answers:
        by_prompt.setdefault(one["origin"], {})[one["model"]] = one
    gains = {at: own["ppo"]["scores"]["gold"] - own["sft"]["scores"]["gold"] for at, own in by_prompt.items()}
    middle = median_low(gains.values())
    found = by_prompt[next(at for at, gain in gains.items() if gain == middle)]
    return found["sft"]["prompt"][-1]["content"], found


def _where_next(home: Path, folder: Path, version: Version, tell: Tell) -> None:
    tell("Where to go from here", "heading")
    tell(f"The report, with curves, samples and events: {home / REPORT_NAME}", "plain")
    message = "The kettle of order 107 smells of fish. May I have a refund?"
    other = "kedge demo --overoptimise" if version != "overoptimised" else f"kedge doctor {home / 'ppo'}"
    tell(f'kedge sample {home / "ppo"} -p "{message}"', "sample")
    tell(f"kedge run {folder / 'demo.yaml'} --set name=mine --set stages.ppo.kl.target=6", "sample")
    tell(other, "sample")


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _asked(prompt: str) -> str:
    """What the customer wrote, out of a prompt with its template around it."""
    return prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]


def _duration(seconds: float) -> str:
    """
    >>> _duration(170.4), _duration(9.2)
    ('2 min 50 s', '9 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
