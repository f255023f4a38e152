"""Tells a demo's story while it runs, from the files that the run writes, as a person could who looked into its folder.

The sentences are `kedge.demo.story`; what is run, and what comes before and after, is `kedge.commands.demo`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

from kedge.demo import course, story
from kedge.demo.world import best_accuracy
from kedge.monitor.overoptimisation import NoFit, fit
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import connect
from kedge.runs.folder import Run
from kedge.runs.manifest import MANIFEST_NAME

Tone = Literal["heading", "plain", "sample", "warning"]
Tell = Callable[[str, Tone], None]

SAMPLE = 0
"""Which of the answers of a set is shown: always the same, so that nobody chose it for its beauty."""


@dataclass(slots=True, kw_only=True)
class Narrator:
    """Listens to a run. What the run says is only the sign that there may be something new in its folder."""

    recipe: Recipe
    folder: Path
    steps: Mapping[str, story.Step]
    judge: Literal["gold", "reward"]
    """Which score says what is good: the truth where it is known."""
    tell: Tell
    policy: str = "ppo"
    """The stage that improves the policy."""
    waiting: list[str] = field(init=False)
    """Stages that have not begun."""
    stage: str = field(default="", init=False)
    """The one that is running."""
    told: dict[str, int] = field(default_factory=dict[str, int], init=False)
    """How many events and samples of a stage have been told."""

    def __post_init__(self) -> None:
        self.waiting = list(connect(self.recipe).order)

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
        step, total = self.steps[self.stage], len(self.recipe.stages)
        self.tell(f"{total - len(self.waiting)}/{total} {step.title}", "heading")
        self.tell(step.about, "plain")

    def _look(self) -> None:
        if not self.stage:
            return
        run = Run.open(self.folder / self.stage, for_writing=False)
        for event in self._new("events", run.read_events()):
            if event["level"] in ("warning", "fatal"):
                word = "iteration" if self.stage == self.policy else "step"
                at = f"{word} {event['step']}: " if event["step"] is not None else ""
                self.tell(f"{at}{event['message']}", "warning")
        if self.stage == self.policy:
            self._tell_iterations(run)

    def _tell_iterations(self, run: Run) -> None:
        settings = run.manifest.settings
        total = min(int(settings["iterations"]), int(settings.get("max_steps") or settings["iterations"]))
        by_step = {row["step"]: row for row in run.read_metrics()}
        for sample in self._new("samples", run.read_samples()):
            if sample["number"] == SAMPLE and sample["step"] in by_step:
                self.tell(story.iteration(by_step[sample["step"]], total), "plain")
                self.tell(story.reply(sample["answer"], self._verdict(sample)), "sample")

    def _verdict(self, record: Mapping[str, Any]) -> str:
        return story.verdict(self.judge, record[self.judge])

    def _new(self, kind: str, records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The records that were not there the last time. A run that went back has fewer."""
        key = f"{self.stage} {kind}"
        shown = min(self.told.get(key, 0), len(records))
        self.told[key] = len(records)
        return records[shown:]

    def _close(self) -> None:
        ends = {
            "prepare": self._prepared,
            "sft": self._imitated,
            "reward": self._learnt,
            "ppo": self._improved,
            "eval": self._evaluated,
        }
        if self.stage in ends:
            ends[self.stage](self.folder / self.stage)

    def _prepared(self, home: Path) -> None:
        prepared = next(event for event in records(home / "events.jsonl") if event["code"] == "data.prepared")
        self.tell(f"Done: {prepared['message']}.", "plain")

    def _imitated(self, home: Path) -> None:
        same = [sample for sample in records(home / "samples.jsonl") if sample["number"] == SAMPLE]
        if same:
            self.tell(f"A customer: {story.reply(_asked(same[0]['prompt']))}", "plain")
            self.tell(f"before: {story.babble(same[0]['answer'])}", "sample")
            self.tell(f"after:  {story.reply(same[-1]['answer'])}", "sample")

    def _learnt(self, home: Path) -> None:
        report = json.loads((home / "reward-report.json").read_text(encoding="utf-8"))
        held = records(self.folder / "prepare/data/heldout.jsonl")
        best = best_accuracy([{side: turns[-1]["content"] for side, turns in row.items()} for row in held])
        self.tell(story.judged(report["accuracy"]["value"], best, report["pairs"]), "plain")

    def _improved(self, home: Path) -> None:
        """Only where nothing held the policy is there a fall to speak of."""
        if self.steps["ppo"] is not story.WITHOUT_KL:
            return
        run = Run.open(home, for_writing=False)
        metrics = run.read_metrics()
        start, best, end = course.start_best_end(metrics)
        for line in course.table(start, best, end):
            self.tell(line, "plain")
        self.tell(course.fall(best, end), "warning")
        alarms = [record for record in run.read_events() if record["level"] != "info"]
        self.tell(course.alarms(alarms), "warning")
        law = fit([record["kl/mean"] for record in metrics], [record["gold/mean"] for record in metrics], kind="rl")
        if law.observed is not None:
            self.tell(f"By means of several looks, {law.observed.in_words()}.", "warning")
        if isinstance(law, NoFit):
            self.tell(f"The law of Gao et al. (2022), fitted to it: {law.in_words()}.", "plain")
        else:
            self.tell(course.peak(law.peak_kl, law.peak_kl_interval, law.kl), "warning")

    def _evaluated(self, home: Path) -> None:
        evaluation = json.loads((home / "evaluation.json").read_text(encoding="utf-8"))
        baseline: str = evaluation["baseline"]
        asked, models = typical(records(home / "answers.jsonl"), baseline, self.policy, self.judge)
        self.tell(f"A typical case (the median gain). Asked: {story.reply(asked)}", "plain")
        for name, reply in models.items():
            said = story.reply(reply["answer"], self._verdict(reply["scores"]))
            self.tell(f"{story.name_of(name)}: {said}", "sample")
        self.tell(f"On {evaluation['prompts']:,} messages that no model has seen (intervals are 95 %)", "heading")
        for line in story.table(evaluation, self.judge):
            self.tell(line, "plain")


def typical(
    answers: Sequence[Mapping[str, Any]], baseline: str, policy: str, judge: str
) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """The message on which the policy gains the median over the baseline, and what every model replied to it."""
    by_prompt: dict[str, dict[str, Mapping[str, Any]]] = {}
    for answer in answers:
        by_prompt.setdefault(answer["origin"], {})[answer["model"]] = answer
    gains = {at: own[policy]["scores"][judge] - own[baseline]["scores"][judge] for at, own in by_prompt.items()}
    middle = median_low(gains.values())
    pair = by_prompt[next(at for at, gain in gains.items() if gain == middle)]
    return pair[baseline]["prompt"][-1]["content"], pair


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _asked(prompt: str) -> str:
    """What the customer wrote, out of a prompt with its template around it."""
    return prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
